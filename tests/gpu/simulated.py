"""A simulated accelerator: tensors on "sim:0" and "sim:1" lie in ordinary memory and behave as a
GPU's where bugs hide.

An operation that mixes devices raises, as CUDA's would, and so does a draw by a generator of
another device. What makes the host wait for the device (`.item()`, `.tolist()`, `.cpu()`,
`nonzero`, an index by a boolean mask) and what the host uploads is counted, by line of the project;
so are all operations, but for those in `uncounted()`. An upload is a wait, too, unless it is
`non_blocking` and comes from pinned memory.

    with simulated.counted() as counts:
        lm.generate(prompts.to("sim"), ...)
    counts.waits, counts.uploads, counts.operations, counts.launches

Functions are recorded and replayed as CUDA graphs are, by `SimGraph`, which refuses what a capture
refuses.

Built on torch's Python backend for PrivateUse1. Nothing runs asynchronously, so that a missing wait
cannot be seen.
"""

from __future__ import annotations

import collections
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from headstart.heads.layers import constants

PROJECT = Path(__file__).parents[2]
aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
}
"""Operations whose result the host must know."""
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
"""Those for which it must if an index is a boolean mask."""
DEVICES = 2


@dataclass
class Counts:
    """What happened, by line of the project."""

    waits: collections.Counter[str] = field(default_factory=collections.Counter)
    uploads: collections.Counter[str] = field(default_factory=collections.Counter)
    operations: collections.Counter[str] = field(default_factory=collections.Counter)
    launches: collections.Counter[str] = field(default_factory=collections.Counter)
    """Operations, and replays of recordings, but not what runs inside of these."""


_counts: list[Counts] = []
_silent = 0
recorder: SimGraph | None = None


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts what the block does."""
    _counts.append(Counts())
    try:
        yield _counts[-1]
    finally:
        _counts.pop()


@contextmanager
def uncounted() -> Iterator[None]:
    """Operations in the block are somebody else's; waits and uploads still count."""
    global _silent
    _silent += 1
    try:
        yield
    finally:
        _silent -= 1


class SimTensor(torch.Tensor):
    """A tensor on a simulated device; `raw` holds its numbers."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, index: int, requires_grad: bool = False) -> SimTensor:
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("sim", index),
            requires_grad=requires_grad,
        )
        out.raw = raw
        return out

    def __repr__(self, **_: Any) -> str:
        return f"SimTensor({self.raw!r}, {self.device})"

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(self._here(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(self._here(index), value)

    def _here(self, index: Any) -> Any:
        """Lists in an index are uploaded."""
        if isinstance(index, tuple):
            return tuple(map(self._here, index))
        if not isinstance(index, list):
            return index
        return torch.tensor(index, device=self.device, dtype=None if index else torch.int64)

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["raw"], self.device.index or 0

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], index: int, *_: Any) -> SimTensor:
        return SimTensor(parts["raw"], index)

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        _note("waits")
        return self.raw.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _note(kind: str) -> None:
    """Count for the innermost line of the project that is running."""
    if recorder is not None and kind in ("waits", "uploads"):
        raise RuntimeError(
            f"not permitted while operations are recorded: it {kind.removesuffix('s')}s"
        )
    if not _counts:
        return
    frame: Any = sys._getframe(1)
    where = "elsewhere"
    while frame is not None:
        if (file := _project_file(frame.f_code.co_filename)) is not None:
            where = f"{file}:{frame.f_lineno}"
            break
        frame = frame.f_back
    for counts in _counts:
        getattr(counts, kind)[where] += 1


@functools.cache
def _project_file(filename: str) -> Path | None:
    """The path in the repository, or None for tests and other projects."""
    path = Path(filename)
    if not path.is_relative_to(PROJECT):
        return None
    path = path.relative_to(PROJECT)
    return None if "site-packages" in path.parts or path.parts[0] == "tests" else path


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, SimTensor) else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func.overloadpacket is aten.to:  # which inference mode leaves whole: a copy, or nothing
        return func.decompose(*args, **kwargs)
    if recorder is None and not _is_view(func):
        _note("launches")
    if not _silent:
        _note("operations")
    leaves = pytree.tree_leaves((args, kwargs))
    here = {leaf.device for leaf in leaves if isinstance(leaf, SimTensor)}
    host = [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, SimTensor)
    ]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if func is aten._to_copy.default:
        return _copied(
            args[0], asked, {name: value for name, value in kwargs.items() if name != "device"}
        )
    if func is aten.copy_.default:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        _transferred(args[1], args[0].device, non_blocking)
        if recorder is None:
            _raw(args[0]).copy_(_raw(args[1]))
        else:
            recorder.run(func, (_raw(args[0]), _raw(args[1])), {}, on_device=True)
        return args[0]
    on_host = [tensor for tensor in host if tensor.dim() > 0]
    if len(here) > 1 or (here and on_host):
        found = ", ".join(
            sorted({str(device) for device in (*here, *(tensor.device for tensor in on_host))})
        )
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two: {found}"
            f" ({func})"
        )
    device = (
        next(iter(here)) if here else asked if asked is not None and asked.type == "sim" else None
    )
    generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    if device is not None and generator is not None and generator.device.type != "sim":
        raise RuntimeError(
            f"Expected a 'sim' device type for generator but found '{generator.device.type}'"
        )
    masked = func in INDEXED and any(
        isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool
        for leaf in pytree.tree_leaves(args[1])
    )
    if func in WAITING or masked:
        _note("waits")
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    raw_args, raw_kwargs = pytree.tree_map(_raw, args), pytree.tree_map(_raw, kwargs)
    if recorder is None:
        result = func(*raw_args, **raw_kwargs)
    else:
        result = recorder.run(func, raw_args, raw_kwargs, on_device=device is not None)
    written = [leaf for leaf in leaves if isinstance(leaf, SimTensor)]

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, SimTensor) or device is None:
            return value
        same = next((tensor for tensor in written if tensor.raw is value), None)  # changed in place
        if same is not None:
            return same
        # a view of what was made outside inference mode belongs there, too
        with torch.inference_mode(value.is_inference()):
            return SimTensor(value, device.index or 0)

    return pytree.tree_map(wrapped, result)


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether an operation returns a part of what it is given, for which no kernel runs."""
    aliases = [each.alias_info for each in func._schema.returns if each.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _copied(
    tensor: torch.Tensor, asked: torch.device | None, options: dict[str, Any]
) -> torch.Tensor:
    """`to`: a copy on the asked device, or on the tensor's own."""
    device = tensor.device if asked is None else asked
    _transferred(tensor, device, bool(options.get("non_blocking")))
    if recorder is None:
        copied = aten._to_copy.default(_raw(tensor), **options)
    else:
        copied = recorder.run(aten._to_copy.default, (_raw(tensor),), options, on_device=True)
    return SimTensor(copied, device.index or 0) if device.type == "sim" else copied


def _transferred(source: torch.Tensor, to: torch.device, non_blocking: bool) -> None:
    if source.device.type == "sim" and to.type != "sim":
        _note("waits")
    if source.device.type != "sim" and to.type == "sim" and source.dim() > 0:
        _note("uploads")
        if not (non_blocking and getattr(source, "pinned", False)):
            _note("waits")


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """`Tensor.pin_memory()`: a copy from which uploads do not wait."""
    copied = tensor.clone()
    copied.pinned = True  # type: ignore[attr-defined]
    return copied


class SimPool:
    """Memory that recordings share."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[SimGraph] = weakref.WeakSet()
        self.order = 0
        self.used = False


class SimGraph:
    """A recording of operations, as strict as a CUDA graph: it is replayed on the memory that it
    was recorded with.

    While it records it refuses to wait, to upload and to draw random numbers. What the operations
    write to is set back afterwards, and what they make holds nothing usable before the first
    replay. Nor does what was made by graphs that were recorded in the same pool later, once this
    one is replayed: there it may lie on what this one uses meanwhile. A pool whose graphs are all
    gone must not be used again.
    """

    def __init__(self, pool: SimPool, device: torch.device) -> None:
        self.pool = pool
        self.steps: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.made: dict[int, torch.Tensor] = {}
        """Tensors that the operations make, by the address of their memory."""
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors from outside that they write to, with what these held."""

    @staticmethod
    def new_pool() -> SimPool:
        return SimPool()

    def record(self, call: Callable[[], Any]) -> Any:
        global recorder
        assert recorder is None
        assert not self.pool.used or len(self.pool.graphs) > 0, "a pool must not outlive its graphs"
        self.pool.used = True
        recorder = self
        try:
            return call()
        finally:
            recorder = None
            for tensor, held in self.before.values():
                tensor.copy_(held)
            self.pool.order += 1
            self.order = self.pool.order
            self.pool.graphs.add(self)
            self.poison()

    def poison(self) -> None:
        for tensor in self.made.values():
            tensor.fill_(POISON.get(tensor.dtype, 2**40) if tensor.dtype != torch.bool else True)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], on_device: bool) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise RuntimeError(
                f"not permitted while operations are recorded: {func} draws random numbers"
            )
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not on_device:
            return func(*args, **kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in pytree.tree_leaves(value):
                    whole = _whole(tensor)
                    if whole.data_ptr() not in self.made and whole.data_ptr() not in self.before:
                        self.before[whole.data_ptr()] = whole, whole.clone()
        result = func(*args, **kwargs)
        there = {_whole(tensor).data_ptr() for tensor in given if tensor.numel()}
        new = []
        for tensor in pytree.tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.numel()
                and _whole(tensor).data_ptr() not in there
            ):
                self.made[_whole(tensor).data_ptr()] = _whole(tensor)
                new.append(tensor)
        self.steps.append((func, args, kwargs, new))
        return result

    def replay(self) -> None:
        _note("launches")
        for graph in list(self.pool.graphs):
            if graph.order > self.order:
                graph.poison()
        for func, args, kwargs, new in self.steps:
            result = func(*args, **kwargs)
            if not new:
                continue
            again = [
                each
                for each in pytree.tree_leaves(result)
                if isinstance(each, torch.Tensor) and each.numel()
            ]
            for tensor, value in zip(new, again, strict=True):
                assert tensor.shape == value.shape, (
                    f"{func} returned another shape when it was replayed"
                )
                tensor.copy_(value)


POISON = {
    torch.float16: torch.nan,
    torch.bfloat16: torch.nan,
    torch.float32: torch.nan,
    torch.float64: torch.nan,
}
"""What recorded tensors hold before the first replay, by dtype; integers hold an index that is out
of range."""
POISON |= {torch.uint8: 255, torch.int8: 127, torch.int16: 2**14, torch.int32: 2**30}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory in which a tensor lies, as numbers of its dtype."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of `torch.sim`."""

    def device_count(self) -> int:
        return DEVICES

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream()


class _Stream:
    """The one stream of the device, on which nothing is ever left to do."""

    def synchronize(self) -> None:
        return None


backend_registration._setup_privateuseone_for_python_backend("sim", backend_module=_Module())
_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")


def _made_on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor(..., device="sim")` does not reach the dispatcher: it is made on the host and
    uploaded."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None and args and isinstance(args[0], SimTensor):
            return args[0]
        if device is None or torch.device(device).type != "sim":
            return make(*args, device=device, **kwargs)
        return make(*args, **kwargs).to(device)

    return made


def _counted_up(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.arange(..., device="sim")` would resize an empty tensor, which its wrapper would not
    follow."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "sim":
            return make(*args, device=device, **kwargs)
        if not _silent:
            _note("operations")
        if recorder is None:
            return SimTensor(make(*args, **kwargs), torch.device(device).index or 0)
        counted_up = recorder.run(aten.clone.default, (make(*args, **kwargs),), {}, on_device=True)
        return SimTensor(counted_up, torch.device(device).index or 0)

    return made


constants.PINNED.add("sim")
torch.Tensor.pin_memory = _pinned  # type: ignore[method-assign, assignment]
torch.arange = _counted_up(torch.arange)  # type: ignore[assignment]
torch.tensor, torch.as_tensor = _made_on_host(torch.tensor), _made_on_host(torch.as_tensor)  # type: ignore[assignment]
