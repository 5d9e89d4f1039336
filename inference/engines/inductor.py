"""The model's forward, fused by torch.compile: one variant for all lengths of text and sizes of tree.

A size of 1 is compiled by itself, all others are symbolic dimensions of one variant. A CPU has kernels of our own
instead, which are built faster. This module imports torch's compiler, which takes seconds: import it where something is
compiled.
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

from ..kv_cache import TreeCache
from ..target_model import TargetModel
from .base import Runner
from .eager import EagerEngine, Masks

GRAPHS = 64
"""Variants of one function, at most; torch's own limit is too small for batches that shrink."""
# Imported by name: no annotation knows its `patch`.
symbols: Any = import_module("torch.fx.experimental._config")

Sizes = Sequence[tuple[Tensor, int]]
"""Tensors, each with a dimension whose size differs between calls."""


class CompiledFunction:
    """A function of tensors, compiled at the first call of each variant."""

    def __init__(self, function: Callable[..., Any], what: str) -> None:
        """Prepare to compile a function, named `what` in warnings.

        What it reads beside its arguments must not change.
        """
        self.function, self.what = function, what

        def traced(*arguments: Any) -> Any:
            return function(*arguments)

        # torch keeps graphs, and what it learned of sizes, with a function's code object; with one of its own, one
        # model's graph is never used for another.
        own = FunctionType(traced.__code__.replace(), traced.__globals__, what, None, traced.__closure__)
        self.variants: set[Hashable] = set()
        self.broken = False
        backend = _Inductor(None, {"triton.cudagraphs": False}, None)
        options: dict[str, Any] = {"guard_filter_fn": _guards_to_keep}
        self._compiled = torch.compile(own, fullgraph=True, backend=backend, options=options)

    def __call__(self, variant: Hashable, sizes: Callable[[], Sizes], *arguments: Any) -> Any:
        """Call the function; calls of one variant share a graph, and `sizes` returns its dynamic dimensions."""
        if self.broken:
            return self.function(*arguments)
        try:
            known = variant in self.variants
            if not known:
                for tensor, dimension in sizes():
                    if tensor.shape[dimension] > 1:
                        torch._dynamo.mark_dynamic(tensor, dimension)
            value = self._run(arguments, known)
            self.variants.add(variant)
            return value
        except (TorchDynamoException, FailOnRecompileLimitHit, ConstraintViolationError, InductorError) as error:
            self.broken = True
            reason = " ".join(str(error).split("\n\n")[0].split())
            if isinstance(error, FailOnRecompileLimitHit):
                reason = f"it needs more than {GRAPHS} graphs"
            warnings.warn(f"{self.what} runs without compiling: {reason}", stacklevel=3)
            return self.function(*arguments)

    def _run(self, arguments: tuple[Any, ...], known: bool) -> Any:
        """Call the function, for a known variant without setting the options: that takes longer than a small graph."""
        if known:
            with suppress(FailOnRecompileLimitHit, BackendCompilerFailed):  # a guard failed within the variant
                return self._compiled(*arguments)
        with symbols.patch(use_duck_shape=False), torch._dynamo.config.patch(recompile_limit=GRAPHS):
            return self._compiled(*arguments)


class InductorEngine(EagerEngine):
    """The transformers model with its forward compiled, and on a GPU recorded as a CUDA graph as well."""

    def __init__(self, target: TargetModel, runner: Runner | None = None) -> None:
        super().__init__(target, runner)
        self.name = f"compiled, {self.name}"
        self.tree_kernel = False
        self.compiled = CompiledFunction(self._model_forward, f"the forward of {target.name!r}")

    def _forward_over_nodes(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        masks: Masks,
        cache: TreeCache,
        layers: tuple[int, ...],
        logits_to_keep: int | Tensor,
    ) -> tuple[Tensor, Tensor]:
        def sizes() -> list[tuple[Tensor, int]]:
            nodes = tokens_BN.shape[1]
            every_mask: list[Any] = list(masks.values()) if isinstance(masks, dict) else [masks]
            found = [(tensor, i) for tensor in (tokens_BN, positions_BN, cache.slots_BN) for i in (0, 1)]
            found += [(mask, i) for mask in every_mask for i in (0, 2, 3) if nodes > 1 or i != 2]
            if isinstance(logits_to_keep, Tensor):
                found.append((logits_to_keep, 0))
            return [*found, *((states, i) for states in (*cache.keys, *cache.values) for i in (0, 2))]

        variant = (len(cache.lengths_B) == 1, tokens_BN.shape[1] == 1, layers, isinstance(logits_to_keep, int))
        given = (tokens_BN, positions_BN, masks, cache, layers, logits_to_keep)
        logits_BNV, features_BNF = self.compiled(variant, sizes, *given)
        return logits_BNV, features_BNF


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
