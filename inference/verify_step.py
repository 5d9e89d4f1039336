"""The end of a round on the device: a rule decides, and the cache keeps what stands; compiled, the rule is a graph.

A rule is some dozens of small operations, far more time to ask for than to compute. Random numbers are drawn before, so
that a graph can be replayed; a graph that is replayed (on a GPU) moves the cache's entries too, two operations a layer.

Letters in tensor names: B batch, N nodes, U uniform numbers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .compiled import cpu_kernels
from .drafters.base import StepResult
from .kv_cache import TreeCache
from .logits import PositionSampler, PrecomputedSampler, RandomSampler, Sampler
from .stats import Stats
from .target import TargetOutput
from .tree import DraftTree
from .tuning.tree_spec import TreeShape
from .verify import Verifier, VerifyResult, point_mass

if TYPE_CHECKING:
    from .compiled.graphs import CompiledFunction

DRAWN_SHAPES = 2
"""Shapes of drawn trees that get a graph each; where shapes keep changing, their rule runs as it is."""


class Decider:
    """An acceptance rule, and what follows from its verdict."""

    def __init__(self, verify: Verifier, draws: bool = True) -> None:
        """Hold a rule; `draws` is False for one that asks for no random numbers."""
        self.verify, self.draws = verify, draws
        self.by_place = verify is point_mass
        """Whether it draws one token a node, which can therefore be drawn by the numbers of the node's place."""
        self.graph: CompiledFunction | None = None
        self._shapes: set[TreeShape | None] = set()

    def compile(self, device: torch.device) -> None:
        """From now on in a graph; on a CPU its operations cost next to nothing as they are."""
        if not cpu_kernels.serve(device):
            from .compiled.graphs import CompiledFunction  # imports torch's compiler

            self.graph = self.graph or CompiledFunction(self._settle, "the acceptance rule", device, cuda_graph=True)

    def __call__(
        self, tree: DraftTree, output: TargetOutput, scores_BNV: Tensor, draw: Sampler, cache: TreeCache, stats: Stats
    ) -> StepResult:
        """What stands of a tree; the cache commits it. Both are timed."""
        with stats.clock("verify"):
            numbers = self._numbers(tree, scores_BNV, draw)
            graph = self._graph_for(tree) if isinstance(numbers, Tensor) else None
            # On a CPU moving entries takes as long in a graph, which takes long to make.
            moved = cache if graph is not None and graph.cuda_graph else None
            given = (tree, output, scores_BNV, numbers, moved)
            if graph is None:
                found = self._settle(*given)
            else:
                assert isinstance(numbers, Tensor)
                tree.ancestors_BNN, tree.depths_BN, tree.above_BN  # noqa: B018 - remembered, so that none is traced
                beside = [output.features_BNF, scores_BNV, numbers]
                caches = [] if moved is None else [moved]
                found = graph(_kind(tree), lambda: _sizes(tree, beside, moved), lambda: caches, *given)
            path_BA, lengths_B, next_tokens_B, emitted_BA, features_BAF, finite_BA = found
        with stats.clock("cache"):
            if moved is None:
                cache.keep(path_BA, lengths_B, tree.in_order)
            else:
                cache.commit(lengths_B)
        return StepResult(
            tree, output, VerifyResult(path_BA, lengths_B, next_tokens_B), emitted_BA, features_BAF, finite_BA
        )

    def _numbers(self, tree: DraftTree, scores_BNV: Tensor, draw: Sampler) -> Tensor | Sampler:
        """Random numbers for a rule; a source of another kind (a test's) draws for itself."""
        rows, nodes = tree.tokens_BN.shape
        if not self.draws:
            return draw if self.graph is None else scores_BNV.new_empty(rows, 0)
        if type(draw) is PositionSampler:
            return draw.exponential_BNV
        if type(draw) is not RandomSampler:
            return draw
        # Of each row no rule asks for more than all nodes at every depth, and one for the bonus token.
        return draw.uniform((rows, nodes * tree.max_depth + 1), scores_BNV.device)

    def _graph_for(self, tree: DraftTree) -> CompiledFunction | None:
        """Rules for drawn trees walk the tree on the host, so that each shape is a graph of its own."""
        if self.graph is not None and tree.draft_probs_BNV is not None and tree.shape not in self._shapes:
            if len(self._shapes) == DRAWN_SHAPES:
                return None
            self._shapes.add(tree.shape)
        return self.graph

    def _settle(
        self,
        tree: DraftTree,
        output: TargetOutput,
        scores_BNV: Tensor,
        numbers: Tensor | Sampler,
        cache: TreeCache | None,
    ) -> tuple[Tensor, ...]:
        """A verdict, and what a round adds to it; entries of a cache are moved if one is given. A graph if compiled."""
        if isinstance(numbers, Tensor):  # three dimensions: of each node for every token
            numbers = PositionSampler(numbers) if numbers.ndim == 3 else PrecomputedSampler(numbers)
        verdict = self.verify(tree, scores_BNV, numbers)
        if cache is not None and not tree.in_order:
            cache.move(verdict.path_BA)
        finished = StepResult.of(tree, output, scores_BNV, verdict)
        return (
            verdict.path_BA,
            verdict.lengths_B,
            verdict.next_tokens_B,
            finished.emitted_BA,
            finished.features_BAF,
            finished.finite_BA,
        )


def _kind(tree: DraftTree) -> Hashable:
    """Trees that share a graph."""
    drawn_shape = None if tree.draft_probs_BNV is None else tree.shape
    rows, nodes = tree.tokens_BN.shape
    return rows == 1, nodes == 1, tree.max_depth, tree.in_order, tree.padding, drawn_shape


def _sizes(tree: DraftTree, beside: Sequence[Tensor], cache: TreeCache | None) -> list[tuple[Tensor, int]]:
    """Rows and nodes of a tree, of what was computed for each of its nodes, and of a cache's places for them."""
    by_row = [tree.sizes_B]
    by_node = [tree.tokens_BN, tree.parents_BN, tree.above_BN, tree.depths_BN, tree.ancestors_BNN, *beside]
    if tree.draft_probs_BNV is not None:
        by_node.append(tree.draft_probs_BNV)
    if cache is not None:
        by_row.append(cache.lengths_B)
        by_node.append(cache.slots_BN)
    both = [(tensor, dimension) for tensor in by_node for dimension in (0, 1)]
    return [*((tensor, 0) for tensor in by_row), *both, (tree.ancestors_BNN, 2)]
