"""Growing a draft tree out of a head, or out of anything that is asked like one."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..heads import TargetEnds
from ..heads.base import wide
from .guessing import Guesser, HeadDrafter, RootOnly, drawn_children, lucky
from .planning import cut
from .rounds import Start
from .stopping import StoppingChain
from .tree import DraftTree, DrawnShape, DynamicShape, Origin, StoppingShape, TreePolicy, TreeShape


class StaticTree(HeadDrafter):
    """A head's guesses in a fixed shape, node by node of a `TreeShape`.

    Picked: a node's rank says the how-many-best token of its parent it is (Medusa, section 2.1.2). Drawn: siblings are
    drawn without replacement from the head's own distribution at the user's settings, and the rank is their order
    (Gumbel-top-k at every node, as in Sequoia, arXiv:2402.12374, and RSD, 2402.14160), or each by itself (SpecInfer,
    2305.09781). Greedy decoding always picks.
    """

    def __init__(
        self,
        head: Guesser,
        shape: TreeShape,
        ends: TargetEnds,
        origin: Origin = "picked",
        budget: int | None = None,
    ) -> None:
        """See `drafter_of`."""
        widest = max((level.width for level in shape.levels), default=0)
        if widest > head.draft_vocab_size:
            raise ValueError(
                f"the tree asks for {widest} tokens after one node, but the head's draft vocabulary has "
                f"{head.draft_vocab_size}"
            )
        super().__init__(head, ends, shape.depth, shape.expanded, shape.size)
        self.shape, self.budget, self.origin = shape, budget, origin

    def begin(self, start: Start) -> None:
        """An empty state; how to draw."""
        super().begin(start)
        self._draw = start.draw
        self._probs_of = None if self.origin == "picked" else start.draft_probs

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Expand level by level."""
        batch = len(roots_B)
        shape = self.shape if self.budget is None else cut(self.shape, self.budget // batch)
        if not shape.paths:
            return RootOnly().propose(roots_B)
        drawn_from: list[Tensor] = []
        plan = _plan(shape, roots_B.device)
        if self._probs_of is None:
            return DraftTree.of_shape(shape, self.grown(roots_B, shape.depth, shape, plan)[0])
        tokens_BN = self._levels(self.state, roots_B, None, plan, drawn_from)
        inner = torch.cat(drawn_from, dim=1)
        probs_BNV = inner.new_zeros(batch, shape.size, inner.shape[-1]).index_copy(1, plan[0], inner)
        return DraftTree.of_shape(shape, tokens_BN, self.origin, probs_BNV)

    def _grow(self, state: Any, roots_B: Tensor, gumbel_BKD: Tensor | None, plan: Plan) -> tuple[Tensor, ...]:
        """See `HeadDrafter._grow`."""
        return (self._levels(state, roots_B, gumbel_BKD, plan, []),)

    def _levels(
        self, state: Any, roots_B: Tensor, gumbel_BKD: Tensor | None, plan: Plan, drawn_from: list[Tensor]
    ) -> Tensor:
        """Tokens, level by level; where siblings are drawn, `drawn_from` gets the distributions."""
        _, levels = plan
        tokens = [roots_B[:, None]]
        frontier_BW, parents_BW = tokens[0], torch.full_like(tokens[0], -1)
        for depth, (width, picks, frontier, parents) in enumerate(levels):
            nodes = frontier_BW.shape[1]
            if self._probs_of is None:
                logits_BWV, state = self.head.expand(state, frontier_BW, parents_BW)
                logits_BWV = lucky(logits_BWV, gumbel_BKD, depth)
                ranked_BWR = self.head.target_tokens(logits_BWV.topk(width, dim=-1).indices).expand(-1, nodes, -1)
            else:
                logits_BWV, state = self.expand(depth, state, frontier_BW, parents_BW)
                ranked_BWR, probs_BWV = drawn_children(
                    self.head, logits_BWV, nodes, width, self._probs_of, self._draw, self.origin == "independent"
                )
                drawn_from.append(probs_BWV)
            children_BC = ranked_BWR.flatten(1)
            tokens.append(children_BC if picks is None else children_BC[:, picks])
            frontier_BW = tokens[-1] if frontier is None else tokens[-1][:, frontier]
            parents_BW = parents.expand(len(roots_B), -1)
        return torch.cat(tokens, dim=1)


Plan = tuple[Tensor, list[tuple[int, Tensor | None, Tensor | None, Tensor]]]
"""A shape for a device: the nodes that have children, and each level's width, picks, frontier and parents; None for
picks and a frontier that are all there is, in its order."""


@lru_cache(maxsize=64)
def _plan(shape: TreeShape, device: torch.device) -> Plan:
    def indices(numbers: tuple[int, ...]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    def chosen(numbers: tuple[int, ...], count: int) -> Tensor | None:
        return None if numbers == tuple(range(count)) else indices(numbers)

    levels, nodes = [], 1
    for level in shape.levels:
        picks, frontier = chosen(level.picks, nodes * level.width), chosen(level.frontier, len(level.picks))
        levels.append((level.width, picks, frontier, indices(level.parents)))
        nodes = len(level.frontier)
    return indices(shape.inner), levels


class DynamicTree(HeadDrafter):
    """A tree that goes where the head is confident (EAGLE-2, arXiv:2406.16858), for any head.

    A node's value is the product of the draft's probabilities on its path. Layer by layer the `width` best nodes are
    expanded, each to its `width` best children (section 4.1); of all candidates the best `nodes - 1` stay (4.2). Ties
    go to the shallower node: a child whose log-probability rounds to 0 must not push out its parent.
    """

    def __init__(self, head: Guesser, shape: DynamicShape, ends: TargetEnds, budget: int | None = None) -> None:
        """See `drafter_of`."""
        self.width = min(shape.width, head.draft_vocab_size)
        candidates = self.width + (shape.depth - 1) * self.width**2
        expanded = dataclasses.replace(shape, width=self.width).expanded
        super().__init__(head, ends, shape.depth, expanded, min(shape.size, candidates + 1))
        self.budget = budget

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Expand, then keep the best."""
        size = self.max_nodes if self.budget is None else min(self.max_nodes, self.budget // len(roots_B))
        if size < 2:
            return RootOnly().propose(roots_B)
        depth = min(self.depth, size - 1)
        tokens_BN, parents_BN = self.grown(roots_B, depth, (size, depth), (size, depth))
        return DraftTree(tokens_BN, parents_BN, torch.full_like(roots_B, tokens_BN.shape[1]), max_depth=depth)

    def _grow(
        self, state: Any, roots_B: Tensor, gumbel_BKD: Tensor | None, plan: tuple[int, int]
    ) -> tuple[Tensor, ...]:
        """See `HeadDrafter._grow`; the plan is size and depth."""
        size, depth = plan
        return _best(size, roots_B, *self.candidates(state, roots_B, depth, gumbel_BKD))

    def candidates(
        self, state: Any, roots_B: Tensor, depth: int, gumbel_BKD: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and values [B, C] of all nodes that are looked at, level by level; the root is number 0."""
        width = self.width
        frontier_BW = roots_B[:, None]
        parents_BW = torch.full_like(frontier_BW, -1)
        # Candidates are numbered from 1 in the order of their making.
        numbers_BW, values_BW = torch.zeros_like(frontier_BW), torch.zeros(frontier_BW.shape, device=roots_B.device)
        tokens, parents, values = [], [], []
        first = 1
        for level in range(1, depth + 1):
            logits_BWV, state = self.head.expand(state, frontier_BW, parents_BW)
            best = wide(lucky(logits_BWV, gumbel_BKD, level - 1)).log_softmax(-1).topk(width, dim=-1)
            values_BWR = values_BW[..., None] + best.values
            tokens_BWR = self.head.target_tokens(best.indices).expand_as(values_BWR)
            tokens.append(tokens_BWR.flatten(1))
            parents.append(numbers_BW.repeat_interleave(width, dim=1))
            values.append(values_BWR.flatten(1))
            if level == depth:
                break
            values_BW, chosen_BW = values[-1].topk(width, dim=-1)
            frontier_BW, parents_BW = tokens[-1].gather(1, chosen_BW), chosen_BW // width
            numbers_BW = first + chosen_BW
            first += tokens[-1].shape[1]
        return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(values, 1)


def _best(
    size: int, roots_B: Tensor, tokens_BC: Tensor, parents_BC: Tensor, values_BC: Tensor
) -> tuple[Tensor, Tensor]:
    """The best of all candidates C as a tree; a parent is worth at least as much as its child and stands before."""
    size = min(size, values_BC.shape[1] + 1)
    order_BC = values_BC.sort(dim=-1, descending=True, stable=True).indices
    chosen_BN = order_BC[:, : size - 1].sort(dim=-1).values
    root_B1, rank_N = torch.zeros_like(roots_B[:, None]), torch.arange(1, size, device=roots_B.device)
    places_BC = torch.zeros_like(parents_BC).scatter(1, chosen_BN, rank_N.expand_as(chosen_BN))
    node_of_number = torch.cat([root_B1, places_BC], dim=1)
    parents_BN = node_of_number.gather(1, parents_BC.gather(1, chosen_BN))
    return (
        torch.cat([roots_B[:, None], tokens_BC.gather(1, chosen_BN)], dim=1),
        torch.cat([root_B1 - 1, parents_BN], dim=1),
    )


def drafter_of(head: Guesser, policy: TreePolicy, ends: TargetEnds, budget: int | None = None) -> HeadDrafter:
    """A head with a policy.

    Args:
        head: what guesses.
        policy: the tree.
        ends: the target's embedding and LM head.
        budget: tokens that one forward of the target should hold: in a batch the trees shrink to it, down to the
            roots alone. None for trees that are always as large as the policy says.
    """
    if isinstance(policy, DynamicShape):
        return DynamicTree(head, policy, ends, budget)
    if isinstance(policy, StoppingShape):
        return StoppingChain(head, policy, ends, budget)
    if isinstance(policy, DrawnShape):
        return StaticTree(head, policy.shape, ends, policy.origin, budget)
    return StaticTree(head, policy, ends, budget=budget)
