"""The end of a round on the device: a rule decides, and the cache keeps what stands; on a GPU one graph, if compiled.

A rule is some dozens of small operations, and moving the cache two for every layer: far more time to ask for than to
compute. Random numbers are drawn before, so that a graph can be replayed.

Letters in tensor names: B batch, N nodes, U uniform numbers, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import TreeCache
from .compiled import Graph
from .rounds import Round, TargetOutput, Verdict
from .sampling import Draw, RandomDraw, ReadyDraw
from .stats import Stats
from .tree import DraftTree
from .verify import Verifier


class Decider:
    """An acceptance rule, and what follows from its verdict."""

    def __init__(self, verify: Verifier, draws: bool = True) -> None:
        """Hold a rule; `draws` is False for one that asks for no random numbers."""
        self.verify, self.draws = verify, draws
        self.graph: Graph | None = None

    def compile(self, device: torch.device) -> None:
        """From now on in a graph."""
        self.graph = self.graph or Graph(self._settle, "the acceptance rule", device, replay=True)

    def __call__(
        self, tree: DraftTree, output: TargetOutput, scores_BNV: Tensor, draw: Draw, cache: TreeCache, stats: Stats
    ) -> Round:
        """What stands of a tree; the cache commits it. Both are timed."""
        source: Draw | Tensor = draw
        if isinstance(draw, RandomDraw):  # others are a test's
            rows, nodes = tree.tokens_BN.shape
            # Of each row no rule asks for more than all nodes at every depth, and one for the bonus token.
            most = nodes * tree.max_depth + 1 if self.draws else 0
            source = draw.uniform((rows, most), scores_BNV.device)
        graph = self.graph if source is not draw else None
        # On a CPU moving entries takes as long in a graph, which takes long to make.
        moved = cache if graph is not None and graph.replay else None
        given = (tree, output, scores_BNV, source, moved)
        with stats.clock("verify"):
            found = self._settle(*given) if graph is None else self._in_graph(graph, *given)
        verdict = Verdict(*found[:3])
        with stats.clock("cache"):
            if moved is None:
                cache.move(verdict.path_BA)
            cache.commit(verdict.lengths_B)
        return Round(tree, output, verdict, *found[3:])

    def _settle(
        self, tree: DraftTree, output: TargetOutput, scores_BNV: Tensor, source: Draw | Tensor, cache: TreeCache | None
    ) -> tuple[Tensor, ...]:
        """A verdict, and what a round adds to it; entries of a cache are moved. A graph if compiled."""
        draw = ReadyDraw(source) if isinstance(source, Tensor) else source
        verdict = self.verify(tree, scores_BNV, draw)
        if cache is not None:
            cache.move(verdict.path_BA)
        finished = Round.of(tree, output, scores_BNV, verdict)
        return (
            *(verdict.path_BA, verdict.lengths_B, verdict.next_tokens_B),
            *(finished.emitted_BA, finished.features_BAF, finished.finite_BA),
        )

    def _in_graph(
        self,
        graph: Graph,
        tree: DraftTree,
        output: TargetOutput,
        scores_BNV: Tensor,
        source: Draw | Tensor,
        cache: TreeCache | None,
    ) -> tuple[Tensor, ...]:
        caches = [] if cache is None else [cache]
        seen = [tree.ancestors_BNN, tree.depths_BN]  # which a tree remembers: a graph is given them

        def sizes() -> list[tuple[Tensor, int]]:
            by_row = [tree.sizes_B, *(each.lengths_B for each in caches)]
            given = [tree.tokens_BN, tree.parents_BN, *seen, tree.draft_probs_BNV, output.features_BNF, scores_BNV]
            by_node = [*given, source, *(each.slots_BN for each in caches)]
            both = [(tensor, i) for tensor in by_node if isinstance(tensor, Tensor) for i in (0, 1)]
            return [(seen[0], 2), *((tensor, 0) for tensor in by_row), *both]

        drawn_shape = None if tree.draft_probs_BNV is None else tree.shape
        kind = (len(tree.sizes_B) == 1, tree.tokens_BN.shape[1] == 1, tree.max_depth, drawn_shape)
        return graph(kind, sizes, caches, tree, output, scores_BNV, source, cache)
