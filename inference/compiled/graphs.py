"""A function compiled once for all lengths of text and sizes of tree, with the function itself to fall back on.

On an accelerator it runs as a CUDA graph. A size of 1 is compiled by itself, all others are symbolic dimensions of one
variant. A CPU has kernels of our own instead (`cpu_kernels`), which are built faster. This module imports torch's
compiler, which takes seconds: import it where something is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.exc import InductorError
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

GRAPHS = 64
"""Variants of one function, at most; torch's own limit is too small for batches that shrink."""
# Imported by name: no annotation knows its `patch`.
symbols: Any = import_module("torch.fx.experimental._config")

Sizes = Sequence[tuple[Tensor, int]]
"""Tensors, each with a dimension whose size differs between calls."""


class CompiledFunction:
    """A function of tensors, compiled at the first call of each variant."""

    def __init__(self, function: Callable[..., Any], what: str, device: torch.device, cuda_graph: bool = False) -> None:
        """Prepare to compile a function, named `what` in warnings; what it reads beside its arguments must not change.

        With `cuda_graph` it runs as a CUDA graph on a GPU, and returns a tuple of tensors. One is captured for each
        address of the caches, so a generation whose caches lie elsewhere captures again.
        """
        self.function, self.what = function, what

        def traced(*arguments: Any) -> Any:
            return function(*arguments)

        # torch keeps graphs, and what it learned of sizes, with a function's code object; with one of its own, one
        # model's graph is never used for another.
        own = FunctionType(traced.__code__.replace(), traced.__globals__, what, None, traced.__closure__)
        self.variants: set[Hashable] = set()
        self.broken = False
        self.cuda_graph = cuda_graph and device.type == "cuda"
        backend = _Inductor(None, {"triton.cudagraphs": self.cuda_graph}, None)
        options: dict[str, Any] = {"guard_filter_fn": _guards_to_keep}
        self._compiled = torch.compile(own, fullgraph=True, backend=backend, options=options)

    def __call__(
        self, variant: Hashable, sizes: Callable[[], Sizes], cache_sizes: Callable[[], Sizes], *arguments: Any
    ) -> Any:
        """Call the function; calls of one variant share a graph.

        For a new variant `cache_sizes` returns the dynamic dimensions of the tensors to which the function writes in
        place, and `sizes` those of the others.
        """
        if self.broken:
            return self.function(*arguments)
        if self.cuda_graph:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            known = variant in self.variants
            if not known:
                self._mark(sizes(), cache_sizes())
            value = self._run(arguments, known)
            self.variants.add(variant)
        except (TorchDynamoException, FailOnRecompileLimitHit, ConstraintViolationError, InductorError) as error:
            self.broken = True
            reason = " ".join(str(error).split("\n\n")[0].split())
            if isinstance(error, FailOnRecompileLimitHit):
                reason = f"it needs more than {GRAPHS} graphs"
            warnings.warn(f"{self.what} runs without compiling: {reason}", stacklevel=3)
            return self.function(*arguments)
        # The next replay overwrites what this one returned.
        return tuple(tensor.clone() for tensor in value) if self.cuda_graph else value

    def _mark(self, sizes: Sizes, written: Sizes) -> None:
        """Tell torch which dimensions are dynamic, and which tensors are written in place."""
        for tensor, dimension in (*sizes, *written):
            if tensor.shape[dimension] > 1:
                torch._dynamo.mark_dynamic(tensor, dimension)
        if self.cuda_graph:  # which copies its arguments, and writes in place to none but these
            for tensor in {id(tensor): tensor for tensor, _ in written}.values():
                torch._dynamo.mark_static_address(tensor)

    def _run(self, arguments: tuple[Any, ...], known: bool) -> Any:
        """Call the function, for a known variant without setting the options: that takes longer than a small graph."""
        if known:
            with suppress(FailOnRecompileLimitHit, BackendCompilerFailed):  # a guard failed within the variant
                return self._compiled(*arguments)
        with symbols.patch(use_duck_shape=False), torch._dynamo.config.patch(recompile_limit=GRAPHS):
            return self._compiled(*arguments)


class _Inductor(torch._TorchCompileInductorWrapper):
    """torch's own backend, which refuses to compile without our options, as torch does where a guard fails."""

    __name__ = "inductor"

    def __call__(self, *given: Any, **named: Any) -> Any:
        if symbols.use_duck_shape:  # which `CompiledFunction._run` turns off
            raise RuntimeError("a graph without the options is slow")
        return super().__call__(*given, **named)


def _guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Keep guards on arguments; drop guards on module state, which is frozen."""
    return [
        not guard.is_global and "self" not in guard.name and not guard.orig_guard.source.is_unspecialized_nn_module()
        for guard in guards
    ]
