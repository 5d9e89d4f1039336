"""A function as one compiled graph for all lengths of text and sizes of tree, and the function itself to fall back on.

On an accelerator the graph is replayed (CUDA graphs). A size of 1 is a graph of its own, all others share one: lengths
are symbols in it. A CPU has kernels of our own instead (`cpu_kernels`), which need not be waited for. This module
imports torch's compiler, which takes seconds: import it where something is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from importlib import import_module
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.exc import InductorError
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

GRAPHS = 64
"""Graphs of one function, at most: one for each kind; torch's own limit is too small for batches that shrink."""
# A module whose `patch` no annotation knows.
symbols: Any = import_module("torch.fx.experimental._config")


Sizes = Sequence[tuple[Tensor, int]]
"""Tensors, each with a dimension whose size differs between calls."""


class InPlace(Protocol):
    """What is allocated for a generation and written to in place."""

    def sizes(self) -> Sizes:
        """Of its tensors."""


class CompiledFunction:
    """A function of tensors that is compiled when it is first called with something of a kind."""

    def __init__(self, function: Callable[..., Any], what: str, device: torch.device, replay: bool = False) -> None:
        """Nothing is compiled yet.

        Args:
            function: what it reads beside its arguments must never change.
            what: it is, for the user.
            device: where it runs.
            replay: as a CUDA graph on a GPU; the function returns a tuple of tensors. One is recorded for each address
                of the caches: a generation whose caches lie elsewhere records again.
        """
        self.function, self.what, self.device = function, what, device

        def traced(*arguments: Any) -> Any:
            return function(*arguments)

        # torch keeps graphs, and what it learned of sizes, with a function's code; with code of its own, one model's
        # graph never answers for another.
        own = FunctionType(traced.__code__.replace(), traced.__globals__, what, None, traced.__closure__)
        self.kinds: set[Hashable] = set()
        self.broken = False
        self.replay = replay and device.type == "cuda"
        backend = _Inductor(None, {"triton.cudagraphs": self.replay}, None)
        options: dict[str, Any] = {"guard_filter_fn": _needed}
        self._compiled = torch.compile(own, fullgraph=True, backend=backend, options=options)

    def __call__(
        self, kind: Hashable, sizes: Callable[[], Sizes], caches: Callable[[], Sequence[InPlace]], *arguments: Any
    ) -> Any:
        """The function's value.

        Args:
            kind: calls of one kind share a graph.
            sizes: asked for a kind that is new: what may differ within it, but for what the caches know themselves.
            caches: asked for a kind that is new: what among the arguments the function writes to in place.
            arguments: of the function.
        """
        if self.broken:
            return self.function(*arguments)
        if self.replay:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            known = kind in self.kinds
            value = self._again(arguments) if known else self._first(kind, sizes(), caches(), arguments)
        except (TorchDynamoException, FailOnRecompileLimitHit, ConstraintViolationError, InductorError) as error:
            self.broken = True
            reason = " ".join(str(error).split("\n\n")[0].split())
            if isinstance(error, FailOnRecompileLimitHit):
                reason = f"it needs more than {GRAPHS} graphs"
            warnings.warn(f"{self.what} runs without compiling: {reason}", stacklevel=3)
            return self.function(*arguments)
        # The next replay writes over what this one returned.
        return tuple(tensor.clone() for tensor in value) if self.replay else value

    def _first(self, kind: Hashable, sizes: Sizes, caches: Sequence[InPlace], arguments: tuple[Any, ...]) -> Any:
        """A call that may have to compile."""
        written = [each for cache in caches for each in cache.sizes()]
        for tensor, dimension in (*sizes, *written):
            if tensor.shape[dimension] > 1:
                torch._dynamo.mark_dynamic(tensor, dimension)
        if self.replay:  # a graph that is replayed works on copies of its arguments, and writes to none but these
            for tensor in {id(tensor): tensor for tensor, _ in written}.values():
                torch._dynamo.mark_static_address(tensor)
        value = self._with_options(arguments)
        self.kinds.add(kind)
        return value

    def _again(self, arguments: tuple[Any, ...]) -> Any:
        """A call of a known kind: to set the options takes longer than a small graph."""
        with suppress(FailOnRecompileLimitHit, BackendCompilerFailed):  # guards saw a difference that no kind tells
            return self._compiled(*arguments)
        return self._with_options(arguments)

    def _with_options(self, arguments: tuple[Any, ...]) -> Any:
        with (
            symbols.patch(use_duck_shape=False),
            torch._dynamo.config.patch(recompile_limit=GRAPHS),
        ):
            return self._compiled(*arguments)


class _Inductor(torch._TorchCompileInductorWrapper):
    """torch's own backend, with our options only: torch compiles by itself too, where its guards see a difference."""

    __name__ = "inductor"

    def __call__(self, *given: Any, **named: Any) -> Any:
        if symbols.use_duck_shape:  # which `_with_options` turns off
            raise RuntimeError("a graph without the options is slow")
        return super().__call__(*given, **named)


def _needed(guards: Sequence[Any]) -> list[bool]:
    """What is checked at every call: what is said of the arguments. Of the models nothing changes."""
    return [
        not guard.is_global and "self" not in guard.name and not guard.orig_guard.source.is_unspecialized_nn_module()
        for guard in guards
    ]
