"""Growing a draft tree out of a head, or out of anything that is asked like one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...heads import TargetModules
from ...heads.layers.decoder_layer import at_least_fp32
from ...heads.layers.draft_cache import counting
from ..tree import DraftTree
from ..tuning.tree_search import cut
from ..tuning.tree_spec import DynamicShape, EarlyExitShape, SampledShape, TreeKind, TreePolicy, TreeShape
from .base import DraftContext
from .early_exit import EarlyExitChain
from .head_drafter import DraftModel, HeadDrafter, NoDraft, drawn_children, lucky


class StaticTree(HeadDrafter):
    """A head's guesses in a fixed shape, node by node of a `TreeShape`.

    Picked: a node's rank says the how-many-best token of its parent it is (Medusa, section 2.1.2). Drawn: siblings are
    drawn without replacement from the head's own distribution at the user's settings, and the rank is their order
    (Gumbel-top-k at every node, as in Sequoia, arXiv:2402.12374, and RSD, 2402.14160), or each by itself (SpecInfer,
    2305.09781). Greedy decoding always picks.
    """

    def __init__(
        self,
        head: DraftModel,
        shape: TreeShape,
        modules: TargetModules,
        kind: TreeKind = "top_k",
        budget: int | None = None,
    ) -> None:
        """See `drafter_of`."""
        widest = max((level.width for level in shape.levels), default=0)
        if widest > head.draft_vocab_size:
            raise ValueError(
                f"the tree asks for {widest} tokens after one node, but the head's draft vocabulary has "
                f"{head.draft_vocab_size}"
            )
        super().__init__(head, modules, shape.depth, shape.expanded, shape.size)
        self.shape, self.budget, self.kind = shape, budget, kind

    def begin(self, start: DraftContext) -> None:
        """An empty state; how to draw."""
        super().begin(start)
        self._draw = start.draw
        self._probs_of = None if self.kind == "top_k" else start.draft_probs

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Expand level by level."""
        batch = len(roots_B)
        shape = self.shape if self.budget is None else cut(self.shape, self.budget // batch)
        if not shape.paths:
            return NoDraft().propose(roots_B)
        drawn_from: list[Tensor] = []
        plan = _plan(shape, roots_B.device)
        if self._probs_of is None:
            return DraftTree.of_shape(shape, self.grown(roots_B, shape.depth, shape, plan)[0])
        tokens_BN = self._levels(self.state, roots_B, None, plan, drawn_from)
        inner = torch.cat(drawn_from, dim=1)
        probs_BNV = inner.new_zeros(batch, shape.size, inner.shape[-1]).index_copy(1, plan.inner_N, inner)
        return DraftTree.of_shape(shape, tokens_BN, self.kind, probs_BNV)

    def _grow(self, state: Any, roots_B: Tensor, gumbel_BKD: Tensor | None, plan: Plan) -> tuple[Tensor, ...]:
        """See `HeadDrafter._grow`."""
        return (self._levels(state, roots_B, gumbel_BKD, plan, []),)

    def _levels(
        self, state: Any, roots_B: Tensor, gumbel_BKD: Tensor | None, plan: Plan, drawn_from: list[Tensor]
    ) -> Tensor:
        """Tokens, level by level; where siblings are drawn, `drawn_from` gets the distributions."""
        tokens = [roots_B[:, None]]
        frontier_BW, parents_BW = tokens[0], in_each_row(plan.above_root_11, roots_B)
        for depth, level in enumerate(plan.levels):
            nodes = frontier_BW.shape[1]
            if self._probs_of is None:
                logits_BWV, state = self.head.expand(state, frontier_BW, parents_BW)
                logits_BWV = lucky(logits_BWV, gumbel_BKD, depth)
                ranked_BWR = for_each(self.head.target_tokens(logits_BWV.topk(level.width, dim=-1).indices), nodes)
            else:
                logits_BWV, state = self.expand(depth, state, frontier_BW, parents_BW)
                ranked_BWR, probs_BWV = drawn_children(
                    self.head,
                    logits_BWV,
                    nodes,
                    level.width,
                    self._probs_of,
                    self._draw,
                    self.kind == "sampled_independent",
                )
                drawn_from.append(probs_BWV)
            children_BC = ranked_BWR.flatten(1)
            tokens.append(children_BC if level.picks_C is None else children_BC[:, level.picks_C])
            frontier_BW = tokens[-1] if level.frontier_W is None else tokens[-1][:, level.frontier_W]
            parents_BW = in_each_row(level.parents_1W, roots_B)
        return torch.cat(tokens, dim=1)


def for_each(of_frontier_BWR: Tensor, nodes: int) -> Tensor:
    """What a draft says of each node of a frontier; W is 1 where it says the same of all."""
    return of_frontier_BWR if of_frontier_BWR.shape[1] == nodes else of_frontier_BWR.expand(-1, nodes, -1)


def in_each_row(tensor_1X: Tensor, roots_B: Tensor) -> Tensor:
    """The same in each row, [B, X]."""
    return tensor_1X if len(roots_B) == 1 else tensor_1X.expand(len(roots_B), -1)


@dataclass(frozen=True)
class PlannedLevel:
    """What is expanded at a depth, as tensors; None for picks and a frontier that are all there is, in its order."""

    width: int
    picks_C: Tensor | None
    frontier_W: Tensor | None
    parents_1W: Tensor


@dataclass(frozen=True)
class Plan:
    """A shape for a device."""

    above_root_11: Tensor
    inner_N: Tensor
    """The nodes that have children."""
    levels: list[PlannedLevel]


@lru_cache(maxsize=64)
def _plan(shape: TreeShape, device: torch.device) -> Plan:
    def indices(numbers: tuple[int, ...]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    def chosen(numbers: tuple[int, ...], count: int) -> Tensor | None:
        return None if numbers == tuple(range(count)) else indices(numbers)

    levels, nodes = [], 1
    for level in shape.levels:
        picks, frontier = chosen(level.picks, nodes * level.width), chosen(level.frontier, len(level.picks))
        levels.append(PlannedLevel(level.width, picks, frontier, indices(level.parents)[None]))
        nodes = len(level.frontier)
    return Plan(indices((-1,))[None], indices(shape.inner), levels)


class DynamicTree(HeadDrafter):
    """A tree that goes where the head is confident (EAGLE-2, arXiv:2406.16858), for any head.

    A node's value is the product of the draft's probabilities on its path. Layer by layer the `width` best nodes are
    expanded, each to its `width` best children (section 4.1); of all candidates the best `nodes - 1` stay (4.2). Ties
    go to the shallower node: a child whose log-probability rounds to 0 must not push out its parent.
    """

    def __init__(
        self, head: DraftModel, shape: DynamicShape, modules: TargetModules, budget: int | None = None
    ) -> None:
        """See `drafter_of`."""
        self.width = min(shape.width, head.draft_vocab_size)
        candidates = self.width + (shape.depth - 1) * self.width**2
        expanded = dataclasses.replace(shape, width=self.width).expanded
        super().__init__(head, modules, shape.depth, expanded, min(shape.size, candidates + 1))
        self.budget = budget

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Expand, then keep the best."""
        size = self.max_nodes if self.budget is None else min(self.max_nodes, self.budget // len(roots_B))
        if size < 2:
            return NoDraft().propose(roots_B)
        depth = min(self.depth, size - 1)
        plan = (size, depth, _root(roots_B.device))
        tokens_BN, parents_BN = self.grown(roots_B, depth, (size, depth), plan)
        sizes_B = counting(1, roots_B.device, tokens_BN.shape[1]).expand(len(roots_B))
        return DraftTree(tokens_BN, parents_BN, sizes_B, max_depth=depth, padding=False)

    def _grow(
        self, state: Any, roots_B: Tensor, gumbel_BKD: Tensor | None, plan: tuple[int, int, Root]
    ) -> tuple[Tensor, ...]:
        """See `HeadDrafter._grow`; the plan is size, depth, and what the root is to the candidates."""
        size, depth, root = plan
        return _best(size, *self.candidates(state, roots_B, depth, gumbel_BKD, root))

    def candidates(
        self,
        state: Any,
        roots_B: Tensor,
        depth: int,
        gumbel_BKD: Tensor | None = None,
        root: Root | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and values [B, 1 + C] of all nodes that are looked at, level by level.

        The root is the first, has the parent -1 and is worth more than any other.
        """
        root = root or _root(roots_B.device)
        width, frontier_BW, values_BW1, first = self.width, roots_B[:, None], None, 1
        parents_BW, value_B1, number_B1 = (in_each_row(each, roots_B) for each in (root.above, root.value, root.number))
        tokens, parents, values, numbers = [frontier_BW], [parents_BW], [value_B1], [number_B1]
        for level in range(1, depth + 1):
            logits_BWV, state = self.head.expand(state, frontier_BW, parents_BW)
            best = at_least_fp32(lucky(logits_BWV, gumbel_BKD, level - 1)).log_softmax(-1).topk(width, dim=-1)
            values_BWR = best.values if values_BW1 is None else best.values + values_BW1
            values.append(values_BWR.flatten(1))
            tokens.append(for_each(self.head.target_tokens(best.indices), values_BWR.shape[1]).flatten(1))
            if level == depth:
                break
            values_BW, chosen_BW = values[-1].topk(width, dim=-1)
            frontier_BW, parents_BW, values_BW1 = (
                tokens[-1].gather(1, chosen_BW),
                chosen_BW // width,
                values_BW[..., None],
            )
            numbers.append(chosen_BW + first)
            first += tokens[-1].shape[1]
        # The first level's nodes lie below the root, and those of each later one below the frontier before.
        parents.append(torch.cat(numbers, 1).repeat_interleave(width, dim=1))
        return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(values, 1)


@dataclass(frozen=True)
class Root:
    """What the root of a dynamic tree is to the candidates, [1, 1] each."""

    above: Tensor
    number: Tensor
    value: Tensor


@lru_cache(maxsize=64)
def _root(device: torch.device) -> Root:
    """Made once; see `heads.layers.draft_cache.counting`."""
    return Root(*(torch.tensor([[number]], device=device) for number in (-1, 0, torch.inf)))


def _best(size: int, tokens_BC: Tensor, parents_BC: Tensor, values_BC: Tensor) -> tuple[Tensor, Tensor]:
    """The best of all candidates C as a tree; a parent is worth at least as much as its child and stands before."""
    chosen_BN = values_BC.sort(dim=-1, descending=True, stable=True).indices[:, :size].sort(dim=-1).values
    # A candidate's place in the tree is its place among the chosen ones; the parent of the root stands before them.
    parents_BN = torch.searchsorted(chosen_BN, parents_BC.gather(1, chosen_BN), right=True) - 1
    return tokens_BC.gather(1, chosen_BN), parents_BN


def drafter_of(head: DraftModel, policy: TreePolicy, modules: TargetModules, budget: int | None = None) -> HeadDrafter:
    """A head with a policy.

    Args:
        head: what guesses.
        policy: the tree.
        modules: the target's embedding and LM head.
        budget: tokens that one forward of the target should hold: in a batch the trees shrink to it, down to the
            roots alone. None for trees that are always as large as the policy says.
    """
    if isinstance(policy, DynamicShape):
        return DynamicTree(head, policy, modules, budget)
    if isinstance(policy, EarlyExitShape):
        return EarlyExitChain(head, policy, modules, budget)
    if isinstance(policy, SampledShape):
        return StaticTree(head, policy.shape, modules, policy.kind, budget)
    return StaticTree(head, policy, modules, budget=budget)
