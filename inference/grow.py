"""Growing a draft tree out of any head."""

from __future__ import annotations

import torch
from torch import Tensor

from ..heads import DraftHead, DraftState, TargetEnds
from ..heads.base import wide
from .rounds import Drafter, Prefill, Round
from .tree import Origin, DraftTree, DynamicShape, TreePolicy, TreeShape


class RootOnly:
    """No guesses: the same engine as plain decoding, one token a round."""

    feature_layers: tuple[int, ...] = ()
    max_nodes = 1
    origin: Origin = "picked"

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

    origin: Origin = "picked"

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
        state = self.head.begin(self.ends, len(roots_B), prompt.capacity, self.shape.depth, self.max_nodes)
        self._state = self.head.observe(state, prompt.features_BTF, prompt.next_tokens_BT(roots_B), prompt.lengths_B)

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


class DynamicTree:
    """A tree that goes where the head is confident (EAGLE-2, arXiv:2406.16858), for any head.

    A node's value is the product of the draft's probabilities on its path. Layer by layer the `width` best nodes are
    expanded, each to its `width` best children (section 4.1); of all candidates the best `nodes - 1` stay (4.2). Ties
    go to the shallower node: a child whose log-probability rounds to 0 must not push out its parent.
    """

    origin: Origin = "picked"

    def __init__(self, head: DraftHead, shape: DynamicShape, ends: TargetEnds) -> None:
        if shape.depth > head.max_depth:
            raise ValueError(f"the tree is {shape.depth} deep, but the head drafts at most {head.max_depth} tokens")
        self.head = head
        self.ends = ends
        self.feature_layers = head.feature_layers
        self.depth = shape.depth
        self.width = min(shape.width, head.draft_vocab_size)
        candidates = self.width + (shape.depth - 1) * self.width**2
        self.max_nodes = min(shape.size, candidates + 1)
        self._state: DraftState | None = None

    def begin(self, prompt: Prefill, roots_B: Tensor) -> None:
        """Show the head the prompt."""
        expanded = 1 + (self.depth - 1) * self.width
        state = self.head.begin(self.ends, len(roots_B), prompt.capacity, self.depth, expanded)
        self._state = self.head.observe(state, prompt.features_BTF, prompt.next_tokens_BT(roots_B), prompt.lengths_B)

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Expand, then keep the best."""
        assert self._state is not None
        state, batch, width = self._state, len(roots_B), self.width
        frontier_BW = roots_B[:, None]
        parents_BW = torch.full_like(frontier_BW, -1)
        # Candidates are numbered from 1 in the order of their making, the root being 0.
        numbers_BW, values_BW = torch.zeros_like(frontier_BW), torch.zeros(batch, 1, device=roots_B.device)
        tokens, parents, values = [], [], []
        first = 1
        for depth in range(1, self.depth + 1):
            logits_BWV, state = self.head.expand(state, frontier_BW, parents_BW)
            best = wide(logits_BWV).log_softmax(-1).topk(width, dim=-1)
            values_BWR = values_BW[..., None] + best.values
            tokens_BWR = self.head.target_tokens(best.indices).expand_as(values_BWR)
            tokens.append(tokens_BWR.flatten(1))
            parents.append(numbers_BW.repeat_interleave(width, dim=1))
            values.append(values_BWR.flatten(1))
            if depth == self.depth:
                break
            values_BW, chosen_BW = values[-1].topk(width, dim=-1)
            frontier_BW, parents_BW = tokens[-1].gather(1, chosen_BW), chosen_BW // width
            numbers_BW = first + chosen_BW
            first += tokens[-1].shape[1]
        return self._best(roots_B, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(values, 1))

    def _best(self, roots_B: Tensor, tokens_BC: Tensor, parents_BC: Tensor, values_BC: Tensor) -> DraftTree:
        """The best of all candidates C as a tree; a parent is worth at least as much as its child and stands before."""
        order_BC = values_BC.sort(dim=-1, descending=True, stable=True).indices
        chosen_BN = order_BC[:, : self.max_nodes - 1].sort(dim=-1).values
        root_B1, rank_N = torch.zeros_like(roots_B[:, None]), torch.arange(1, self.max_nodes, device=roots_B.device)
        places_BC = torch.zeros_like(parents_BC).scatter(1, chosen_BN, rank_N.expand_as(chosen_BN))
        node_of_number = torch.cat([root_B1, places_BC], dim=1)
        parents_BN = node_of_number.gather(1, parents_BC.gather(1, chosen_BN))
        return DraftTree(
            tokens_BN=torch.cat([roots_B[:, None], tokens_BC.gather(1, chosen_BN)], dim=1),
            parents_BN=torch.cat([root_B1 - 1, parents_BN], dim=1),
            sizes_B=torch.full_like(roots_B, self.max_nodes),
            max_depth=min(self.depth, self.max_nodes - 1),
        )

    def observe(self, finished: Round) -> None:
        """Show the head what was accepted."""
        assert self._state is not None
        self._state = self.head.observe(
            self._state, finished.features_BAF, finished.emitted_BA, finished.verdict.lengths_B
        )


def drafter_of(head: DraftHead, policy: TreePolicy, ends: TargetEnds) -> Drafter:
    """A head with a policy."""
    return StaticTree(head, policy, ends) if isinstance(policy, TreeShape) else DynamicTree(head, policy, ends)
