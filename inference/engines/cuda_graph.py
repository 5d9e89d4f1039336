"""CUDA graphs of tensor functions: recorded from eager operations, replayed by one launch.

A round launches some 2,000 kernels, and launching them takes four times as long as running them
(benchmarks/gpu.md). Nothing is compiled: a function runs as it is when it is first called with
inputs of some shapes, is recorded at the second such call, in about the time of one more, and
replayed from then on. Numbers that it takes from the host are part of the key of a recording.
Inputs are copied to where the recording reads them.

A round replays these, each with memory of its own, so that a result is valid until its function's
next call:

    draft        StaticTree.draft, DynamicTree.draft     drafters.tree_policies
                 or DraftModelState.expand, once a level, for trees that are drawn or end early
    forward      ModelEngine.tree_forward               engines.model_engine
    verdict      verify_and_compact                      rounds.verification
    observe      the head's `observe`                    drafters.draft_model_state
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ...heads.layers.constants import recording
from ...heads.layers.draft_cache import DraftCache
from ..cache.kv_cache import LEAST_DOUBLING, TreeCache
from .base import Runner

RECORDINGS = 256
"""Recordings that are kept; one more drops all."""
CALLED = 4096
"""First calls that are remembered, at most."""
LARGE = 2**16
"""Inputs of at least this many bytes are read in place where another recording left them; smaller
ones are copied."""
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows to which a batch shrinks; larger ones are multiples of `MANY_ROWS`."""
MANY_ROWS = 32
CACHES = (TreeCache, DraftCache)


class Graph(Protocol):
    """A recording of the operations of one call.

    Graphs of one pool share memory: a replay overwrites what others of the pool returned.
    """

    def __init__(self, pool: Any, device: torch.device) -> None: ...

    @staticmethod
    def new_pool() -> Any:
        """A pool, to be used as long as one of its graphs exists."""

    def record(self, call: Callable[[], Any]) -> Any:
        """Record a call without running its operations, and return its result.

        The result has no values yet.
        """

    def replay(self) -> None:
        """Run the operations on whatever their inputs hold now."""


class CudaGraph:
    """A CUDA graph."""

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.pool = pool
        self.stream = _recording_stream(device)

    @staticmethod
    def new_pool() -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Any]) -> Any:
        # CUDA cannot capture its default stream, so another one takes over after it.
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        # Freeing a graph while another is recorded would break that recording off.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self.stream):
                # thread_local: other threads may go on using the device.
                self.graph.capture_begin(self.pool, capture_error_mode="thread_local")
                try:
                    result = call()
                except BaseException:
                    with suppress(RuntimeError):  # the first error says what went wrong
                        self.graph.capture_end()
                    raise
                self.graph.capture_end()
                return result
        finally:
            if collects:
                gc.enable()

    def replay(self) -> None:
        self.graph.replay()


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all graphs of a device are recorded, so that they share workspaces."""
    return torch.cuda.Stream(device)


GRAPHS: dict[str, type[Graph]] = {"cuda": CudaGraph}
"""What records, by type of device."""


@dataclass
class Recording:
    """A recorded call."""

    graph: Graph
    inputs: list[Tensor]
    """Where the recording reads its inputs."""
    result: Any
    """What the call returned: every replay writes to these tensors."""
    kept: tuple[Any, ...]
    """Everything else that the recording reads; held here to stay in memory."""


class GraphRunner(Runner):
    """Records functions and replays them; see the module."""

    replays = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recordings: dict[Hashable, Recording] = {}
        self.called: set[Hashable] = set()
        """Functions with host values and shapes of inputs that were called once, and so can be
        recorded."""
        self.left_by: dict[int, Callable[..., Any]] = {}
        """By the address of a large result, the function whose recording left it there."""
        self.unrecordable: set[Any] = set()
        self.replays_now = True
        self.pools: dict[Callable[..., Any], Any] = {}
        """Memory of each function's recordings."""

    def __call__(self, function: Callable[..., Any], fixed: tuple[Any, ...], *inputs: Any) -> Any:
        """Return `function(*fixed, *inputs)`; see `Runner`.

        It is valid until the function is called again.
        """
        try:
            return self._result(function, fixed, inputs)
        except torch.OutOfMemoryError:
            # Recordings hold memory of their own: without them a retry may fit.
            self.forget()
            raise

    def _result(
        self, function: Callable[..., Any], fixed: tuple[Any, ...], inputs: tuple[Any, ...]
    ) -> Any:
        if function in self.unrecordable or not self.replays_now:
            return function(*fixed, *inputs)

        # 1. The key. A recording serves calls with the same host values and shapes, with `fixed` at
        # the same addresses, and with the same large inputs read where they lie.
        leaves = Leaves(inputs)
        fixed_addresses = tuple(Leaves(fixed).places())
        shapes = (
            function,
            leaves.values,
            tuple((tensor.shape, tensor.dtype) for tensor in leaves.tensors),
        )
        read_in_place = tuple(self._left_elsewhere(tensor, function) for tensor in leaves.tensors)
        key = (shapes, fixed_addresses, read_in_place)

        if key not in self.recordings:
            # 2. The first call with these shapes runs as it is: kernels may have to be compiled,
            # and shapes that never recur are not worth a recording.
            if shapes not in self.called:
                if len(self.called) >= CALLED:
                    self.called.clear()
                self.called.add(shapes)
                return function(*fixed, *inputs)

            # 3. The second call is recorded. Recording runs nothing: step 4 follows at once.
            try:
                recorded = self.record(function, fixed, leaves, read_in_place)
            except torch.OutOfMemoryError:  # a RuntimeError, too, but not the function's fault
                raise
            except RuntimeError as error:
                self._give_up(function, error)
                return function(*fixed, *inputs)
            self._keep(key, function, recorded)

        # 4. Replay: copy the inputs to where the recording reads them, and launch it.
        recording = self.recordings[key]
        copy_all(recording.inputs, leaves.tensors)
        recording.graph.replay()
        return recording.result

    def _give_up(self, function: Callable[..., Any], error: RuntimeError) -> None:
        """Note that a function cannot be recorded, and warn: from now on it runs as it is."""
        self.unrecordable.add(function)
        name = getattr(function, "__qualname__", repr(function))
        reason = str(error).split("\n")[0]
        warnings.warn(
            f"{name} is launched operation by operation, which is slow: {reason}", stacklevel=5
        )

    def _keep(self, key: Hashable, function: Callable[..., Any], recorded: Recording) -> None:
        """Keep a recording, and note where it leaves large results."""
        if len(self.recordings) >= RECORDINGS:
            self.forget()
        self.recordings[key] = recorded
        for tensor in Leaves((recorded.result,)).tensors:
            if tensor.nbytes >= LARGE:
                self.left_by[tensor.data_ptr()] = function

    def rounded_capacity(self, tokens: int) -> int:
        """Round up to one less than a power of two, for example 1500 to 2047.

        With few different sizes a cache often lies where an earlier one lay, and recordings fit.
        """
        # The power of two above, less one: 2047 stays 2047, and 2048 becomes 4095.
        return max(LEAST_DOUBLING, 1 << tokens.bit_length()) - 1

    def rounded_rows(self, rows: int) -> int:
        """Round up to one of a few numbers, since each number of rows needs its own recording."""
        for size in ROWS:
            if rows <= size:
                return size
        return -(-rows // MANY_ROWS) * MANY_ROWS  # up to a multiple

    def keep(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @contextmanager
    def as_it_is(self) -> Iterator[None]:
        before = self.replays_now
        self.replays_now = False
        try:
            yield
        finally:
            self.replays_now = before

    def forget(self) -> None:
        self.recordings.clear()
        self.called.clear()
        self.left_by.clear()
        self.pools.clear()

    def _left_elsewhere(self, tensor: Tensor, function: Callable[..., Any]) -> Hashable:
        """Return where a large tensor lies that another function's recording wrote; else None.

        That recording writes there at every replay, so this one can read it in place: the
        logits [1, 60, 128256], 31 MB, are not copied from the forward to the verdict.

            forward's recording    writes logits at 0x7f00    left_by = {0x7f00: forward}
            verdict's recording    reads them at 0x7f00

        A function's own results are copied. Each of its recordings writes elsewhere, so reading in
        place would need another recording after each.
        """
        if tensor.nbytes < LARGE:
            return None
        address = tensor.data_ptr()
        if self.left_by.get(address, function) == function:  # not by a recording, or by its own
            return None
        return address, tensor.stride()

    def record(
        self,
        function: Callable[..., Any],
        fixed: tuple[Any, ...],
        leaves: Leaves,
        read_in_place: tuple[Hashable, ...],
    ) -> Recording:
        # 1. Where the recording reads its inputs: in place, or in a buffer of its own.
        buffers: list[Tensor] = []
        for tensor, address in zip(leaves.tensors, read_in_place, strict=True):
            in_place = address is not None
            buffers.append(
                tensor if in_place else tensor.clone(memory_format=torch.contiguous_format)
            )
        inputs = leaves.rebuilt(buffers)

        # 2. Memory for what is computed: shared by all recordings of the function.
        make_graph = GRAPHS[self.device.type]
        if function not in self.pools:
            self.pools[function] = make_graph.new_pool()
        graph = make_graph(self.pools[function], self.device)

        # 3. Record. `used` collects the constants that the operations read.
        with recording() as used, restored(fixed):
            result = graph.record(lambda: function(*fixed, *inputs))
        return Recording(graph, buffers, result, (function, fixed, inputs, used))


@contextmanager
def restored(fixed: tuple[Any, ...]) -> Iterator[None]:
    """Restore the attributes of caches that a call sets while it is recorded.

    Tensors that are made in a recording hold no values before its first replay.
    """
    attributes_before = [(cache, dict(vars(cache))) for cache in fixed if isinstance(cache, CACHES)]
    try:
        yield
    finally:
        for cache, attributes in attributes_before:
            vars(cache).update(attributes)


class Leaves:
    """The tensors in nested tuples, lists and dataclasses, and everything else in them."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.tensors: list[Tensor] = []
        others: list[Hashable] = []
        self._collect(value, others)
        self.values = tuple(others)
        """Everything that is not a tensor, and the structure: values with equal ones can take each
        other's place."""

    def _collect(self, value: Any, others: list[Hashable]) -> None:
        # For example ([a, 3],) with a tensor a: others = [(tuple, 1), (list, 2), "tensor", 3].
        if isinstance(value, Tensor):
            self.tensors.append(value)
            others.append("tensor")
        elif isinstance(value, CACHES):
            others += cache_places(value)  # written in place, so the address counts
        elif isinstance(value, tuple | list):
            others.append((type(value), len(value)))
            for part in value:
                self._collect(part, others)
        elif holds_tensors(value):
            others.append(cast(Any, type(value)))  # mypy does not know that a class is hashable
            for name in field_names(type(value)):
                self._collect(getattr(value, name), others)
        else:
            others.append(value)

    def places(self) -> Iterator[Hashable]:
        """Everything, with the addresses of tensors in place of their values."""
        yield self.values
        for tensor in self.tensors:
            yield tensor.data_ptr(), tensor.shape, tensor.stride()

    def rebuilt(self, tensors: list[Tensor]) -> Any:
        """The same value with other tensors."""
        return _rebuilt(self.value, iter(tensors))


def holds_tensors(value: Any) -> bool:
    """Whether a value is a dataclass that holds tensors.

    Its fields may be tensors, or hold them in dataclasses, tuples and lists.
    """
    return any(_is_tensor_or_holds_one(getattr(value, name)) for name in field_names(type(value)))


def field_names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass; none of another class."""
    names = _FIELDS.get(kind)
    if names is None:
        names = ()
        if dataclasses.is_dataclass(kind):
            names = tuple(field.name for field in dataclasses.fields(kind))
        _FIELDS[kind] = names
    return names


_FIELDS: dict[type, tuple[str, ...]] = {}
"""Results of `field_names`, by class: asking dataclasses takes longer than copying a tensor."""


def _is_tensor_or_holds_one(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_is_tensor_or_holds_one(part) for part in value)
    return isinstance(value, (Tensor, *CACHES)) or holds_tensors(value)


def _rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, CACHES):
        return value
    if isinstance(value, tuple | list):
        return type(value)([_rebuilt(part, tensors) for part in value])
    if holds_tensors(value):
        changed = {
            name: _rebuilt(getattr(value, name), tensors) for name in field_names(type(value))
        }
        return dataclasses.replace(value, **changed)
    return value


def cache_places(cache: TreeCache | DraftCache) -> list[Hashable]:
    """The addresses of a cache's memory, and what the host decides about the slots in use."""
    if isinstance(cache, TreeCache):
        blocks = [(block.data_ptr(), block.shape) for block in cache.blocks]
        return [*blocks, cache.capacity, len(cache.lengths_B)]
    states = [
        (tensor.data_ptr(), tensor.shape, tensor.stride())
        for tensor in (*cache.keys, *cache.values)
    ]
    return [*states, cache.nodes, cache.attended]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors, all contiguous ones by one launch; skip those that lie there already."""
    bytes_to: list[Tensor] = []
    bytes_from: list[Tensor] = []
    for target, tensor in zip(targets, sources, strict=True):
        if target.data_ptr() == tensor.data_ptr() or not tensor.nbytes:
            continue
        if tensor.is_contiguous():
            # As bytes all dtypes are alike: one launch copies int64 tokens and bfloat16 states.
            bytes_to.append(as_bytes(target))
            bytes_from.append(as_bytes(tensor))
        else:
            target.copy_(tensor)
    if bytes_to:
        torch._foreach_copy_(bytes_to, bytes_from)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, as one row."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
