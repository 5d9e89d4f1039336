"""Growing a draft tree out of any head."""

from __future__ import annotations

import torch
from torch import Tensor

from ..heads import DraftHead, DraftState, TargetEnds
from .rounds import Prefill, Round
from .tree import DraftTree, TreeShape


class RootOnly:
    """No guesses: the same engine as plain decoding, one token a round."""

    feature_layers: tuple[int, ...] = ()
    max_nodes = 1

    def begin(self, prompt: Prefill, roots_B: Tensor) -> None:
        """Nothing to prepare."""

    def propose(self, roots_B: Tensor) -> DraftTree:
        """The root alone."""
        roots_B1 = roots_B[:, None]
        return DraftTree(roots_B1, torch.full_like(roots_B1, -1), torch.ones_like(roots_B), max_depth=0)

    def observe(self, finished: Round) -> None:
        """Nothing to learn."""


class StaticTree:
    """A head's best guesses in a fixed shape, node by node of a `TreeShape` (Medusa, section 2.1.2)."""

    def __init__(self, head: DraftHead, shape: TreeShape, ends: TargetEnds) -> None:
        if shape.depth > head.max_depth:
            raise ValueError(f"the tree is {shape.depth} deep, but the head drafts at most {head.max_depth} tokens")
        widest = max((level.width for level in shape.levels), default=0)
        if widest > head.draft_vocab_size:
            raise ValueError(
                f"the tree asks for the {widest} best tokens of a node, but the head's draft vocabulary has "
                f"{head.draft_vocab_size}"
            )
        self.head = head
        self.shape = shape
        self.ends = ends
        self.feature_layers = head.feature_layers
        self.max_nodes = shape.size
        self._state: DraftState | None = None

    def begin(self, prompt: Prefill, roots_B: Tensor) -> None:
        """Show the head the prompt."""
        device = prompt.tokens_BT.device
        self._parents_N = torch.tensor(self.shape.parents, device=device)
        self._levels = [
            tuple(
                torch.tensor(index, dtype=torch.int64, device=device)
                for index in (level.picks, level.frontier, level.parents)
            )
            for level in self.shape.levels
        ]
        next_tokens_BT = prompt.tokens_BT.roll(-1, dims=1).scatter(1, prompt.lengths_B[:, None] - 1, roots_B[:, None])
        state = self.head.begin(self.ends, len(roots_B), prompt.capacity, self.shape.depth)
        self._state = self.head.observe(state, prompt.features_BTF, next_tokens_BT, prompt.lengths_B)

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Expand level by level; each node is a token of a given rank among its parent's children."""
        assert self._state is not None
        state, batch = self._state, len(roots_B)
        levels_BW = [roots_B[:, None]]
        frontier_BW, parents_BW = levels_BW[0], torch.full_like(levels_BW[0], -1)
        for level, (picks, frontier, parents) in zip(self.shape.levels, self._levels, strict=True):
            logits_BWV, state = self.head.expand(state, frontier_BW, parents_BW)
            best_BWR = logits_BWV.topk(level.width, dim=-1).indices.expand(-1, frontier_BW.shape[1], -1)
            nodes_BW = self.head.target_tokens(best_BWR.reshape(batch, -1)[:, picks])
            levels_BW.append(nodes_BW)
            frontier_BW, parents_BW = nodes_BW[:, frontier], parents.expand(batch, -1)
        tokens_BN = torch.cat(levels_BW, dim=1)
        sizes_B = torch.full_like(roots_B, self.shape.size)
        return DraftTree(tokens_BN, self._parents_N.expand(batch, -1), sizes_B, self.shape.depth)

    def observe(self, finished: Round) -> None:
        """Show the head what was accepted."""
        assert self._state is not None
        self._state = self.head.observe(
            self._state, finished.features_BAF, finished.emitted_BA, finished.verdict.lengths_B
        )
