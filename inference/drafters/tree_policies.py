"""Tree policies: how a draft tree grows, depth by depth, from a head or other next-token logits.

    StaticTree     a fixed shape: top-k children (Medusa, arXiv:2401.10774, section 2.1.2), or
                   sampled ones: without replacement (Sequoia, 2402.12374; RSD, 2402.14160), or
                   independently (SpecInfer, 2305.09781)
    DynamicTree    the most probable paths, another shape in each step (EAGLE-2, 2406.16858)

A chain that ends early is in `early_exit`. The state from which a tree grows belongs to
`ModelRows`.

Letters in tensor names: B batch, N nodes, W frontier, R children of a node, C candidates, K
depths, D tokens of the draft vocabulary, V of the target's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ...heads.base import TargetModules
from ...heads.layers.constants import constants, counting
from ...heads.layers.decoder_layer import at_least_fp32
from ...heads.layers.fused import top_log_probs
from ..trees.sampling import RandomSampler, Sampler
from ..trees.tree import DraftTree
from ..trees.tree_spec import DynamicShape, EarlyExitShape, SampledShape, TreeShape
from ..tuning.tree_search import prune
from .base import BatchDrafter, DraftContext, NoDraft, PrefillChunk
from .model_rows import DraftModel, ModelRows, ModelState
from .round import Round


class HeadDrafter(BatchDrafter):
    """A tree of a head, or of another draft model; a subclass grows it from the model's state."""

    def __init__(
        self,
        head: DraftModel,
        tree: TreeShape | DynamicShape | EarlyExitShape,
        modules: TargetModules,
        budget: int | None = None,
    ) -> None:
        """Hold a head and the shape of its trees.

        `budget` is the number of tokens that one forward of the target should hold: in a batch the
        trees shrink to it, down to the roots alone. With None they are always as large as `tree`.

        Raises:
            ValueError: a tree deeper than the head drafts.
        """
        if tree.depth > head.max_depth:
            raise ValueError(
                f"the tree is {tree.depth} deep, but the head drafts at most {head.max_depth}"
                " tokens"
            )
        self.rows = ModelRows(head, modules, tree.depth, tree.expanded)
        self.shape = tree
        self.budget = budget
        self.feature_layers = head.feature_layers
        self.depth = tree.depth
        self.max_nodes = tree.size
        self._sampler: Sampler = RandomSampler()
        self._draft_probs: Callable[[Tensor], Tensor] | None = None
        self._gumbel: Callable[[int], Tensor] | None = None

    @property
    def head(self) -> DraftModel:
        """The draft model."""
        return self.rows.model

    def __repr__(self) -> str:
        sampled = "" if self.kind == "top_k" else ", sampled"
        return (
            f"{type(self).__name__}({type(self.head).__name__}, {self.max_nodes} nodes, depth"
            f" {self.depth}{sampled})"
        )

    def share(self, rows: ModelRows) -> None:
        """Grow from the state of another tree of the same head."""
        rows.make_room(self.rows.depth, self.rows.expanded)
        self.rows = rows

    def fresh(self) -> Self:
        return self.on(self.rows.fresh())

    def on(self, rows: ModelRows) -> Self:
        """The same tree, grown from another state."""
        other = copy.copy(self)
        other.rows = rows
        return other

    def begin(self, context: DraftContext) -> None:
        self.set_sampling(context)
        self.rows.begin(context)

    def set_sampling(self, context: DraftContext) -> None:
        """Draft at the settings of a generation, whose rows another tree begins."""
        self._sampler = context.sampler
        if self.kind == "top_k":
            self._draft_probs = None
            self._gumbel = context.gumbel
        else:
            self._draft_probs = context.draft_probs
            self._gumbel = None

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        self.set_sampling(context)
        self.rows.resume(context, kept, state, whole)

    def saved_state(self) -> Any:
        return self.rows.saved_state()

    def prefill(self, chunk: PrefillChunk) -> None:
        self.rows.prefill(chunk)

    def observe_ahead(self, finished: Round) -> None:
        self.rows.observe_ahead(finished)

    def take_back(self) -> None:
        self.rows.take_back()

    def observe(self, finished: Round) -> None:
        self.rows.observe(finished)

    def select(self, rows_R: Tensor) -> None:
        self.rows.select(rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self.rows.replace(rows_R, other.rows)

    def gumbel_noise(self, depth: int) -> Tensor | None:
        """Return `DraftContext.gumbel` of the next `depth` positions, [B, depth, D], if known.

        The noise is that of the draft vocabulary. None if it is not known.
        """
        if self._gumbel is None:
            return None
        gumbel_BKV = self._gumbel(depth)
        if self.head.draft_vocab_size == gumbel_BKV.shape[-1]:
            return gumbel_BKV
        return gumbel_BKV[..., self.rows.draft_vocab(gumbel_BKV.device)]

    def sample_children(
        self, logits_BWV: Tensor, frontier: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """Sample `count` children R of each of `frontier` nodes W; logits with W = 1 serve all.

        They are sampled from the draft's own vocabulary: Gumbel-top-k over the target's would take
        longer than the draft. What logits processors leave to other tokens is not sampled from,
        and so not in the distribution either.

        Returns:
            tokens [B, W, R], and the distribution that each node's children were sampled from, [B,
            W, V].
        """
        assert self._draft_probs is not None
        draft_vocab_D = self.rows.draft_vocab(logits_BWV.device)
        whole_BWV = over_target(self.head, at_least_fp32(logits_BWV), draft_vocab_D)
        probs_BWD = self._draft_probs(whole_BWV)[..., draft_vocab_D]
        mass_BW1 = probs_BWD.sum(-1, keepdim=True)
        probs_BWD = torch.where(mass_BW1 > 0, probs_BWD / mass_BW1, 0.0)
        of_node_BWD = probs_BWD.expand(-1, frontier, -1)
        if self.kind == "sampled_independent":
            sampled_BWR = self._sampler.categorical(
                of_node_BWD[:, :, None].expand(-1, -1, count, -1)
            )
        else:
            sampled_BWR = self._sampler.distinct(of_node_BWD, count)
        probs_BWV = over_target(self.head, probs_BWD, draft_vocab_D, 0.0).expand(-1, frontier, -1)
        return self.head.target_tokens(sampled_BWR), probs_BWV


def draft_models(drafter: BatchDrafter) -> list[ModelRows]:
    """The draft models in a drafter, each once."""
    models: list[ModelRows] = []
    for part in drafter.nested():
        if isinstance(part, HeadDrafter) and part.rows not in models:
            models.append(part.rows)
    return models


@dataclass(frozen=True)
class PlannedLevel:
    """One depth of a `TreeShape` on a device; None for all of its nodes in their order."""

    width: int
    picks_C: Tensor | None
    frontier_W: Tensor | None
    parents_1W: Tensor


@dataclass(frozen=True)
class Plan:
    """A `TreeShape` on a device."""

    above_root_11: Tensor
    inner_N: Tensor
    """The nodes that have children."""
    levels: list[PlannedLevel]


@constants
def _plan(shape: TreeShape, device: torch.device) -> Plan:
    levels = []
    frontier = 1
    for level in shape.levels:
        planned = PlannedLevel(
            level.width,
            _unless_all(level.picks, frontier * level.width, device),
            _unless_all(level.frontier, len(level.picks), device),
            torch.tensor([level.parents], dtype=torch.int64, device=device),
        )
        levels.append(planned)
        frontier = len(level.frontier)
    above_root_11 = torch.tensor([[-1]], device=device)
    inner_N = torch.tensor(shape.inner, dtype=torch.int64, device=device)
    return Plan(above_root_11, inner_N, levels)


def _unless_all(chosen: tuple[int, ...], count: int, device: torch.device) -> Tensor | None:
    """Indices of the chosen ones of `count`; None if these are all in their order."""
    if chosen == tuple(range(count)):
        return None
    return torch.tensor(chosen, dtype=torch.int64, device=device)


class StaticTree(HeadDrafter):
    """A tree of a fixed shape, of top-k or of sampled drafts.

    A node's rank is its index among the top-k, or its turn among the sampled siblings.

    Greedy decoding always takes the top-k.
    """

    shape: TreeShape

    def __init__(
        self,
        head: DraftModel,
        tree: TreeShape | SampledShape,
        modules: TargetModules,
        budget: int | None = None,
    ) -> None:
        shape = tree.shape if isinstance(tree, SampledShape) else tree
        widest = max((level.width for level in shape.levels), default=0)
        if widest > head.draft_vocab_size:
            raise ValueError(
                f"the tree asks for {widest} tokens after one node, but the head's draft vocabulary"
                f" has {head.draft_vocab_size}"
            )
        super().__init__(head, shape, modules, budget)
        if isinstance(tree, SampledShape):
            self.kind = tree.kind

    def propose(self, roots_B: Tensor) -> DraftTree:
        batch = len(roots_B)
        shape = self.shape
        if self.budget is not None:
            shape = prune(shape, self.budget // batch)
        if not shape.paths:
            return NoDraft("large_batch" if self.shape.paths else "").propose(roots_B)
        state = self.rows.catch_up()
        plan = _plan(shape, roots_B.device)
        if self._draft_probs is not None:
            return self._sampled(shape, plan, state, roots_B)
        gumbel_BKD = self.gumbel_noise(shape.depth)
        tokens_BN = self.rows.runner(self.draft, (plan,), state, roots_B, gumbel_BKD)
        return DraftTree.of_shape(shape, tokens_BN)

    def draft(
        self, plan: Plan, state: ModelState, roots_B: Tensor, gumbel_BKD: Tensor | None
    ) -> Tensor:
        """Grow a tree of top-k drafts and return its tokens [B, N].

        This function is recorded.
        """
        batch = len(roots_B)
        tokens = [roots_B[:, None]]
        frontier_BW = tokens[0]
        parents_BW = _for_rows(plan.above_root_11, batch)
        for depth, level in enumerate(plan.levels):
            nodes = frontier_BW.shape[1]
            logits_BWV, state = self.rows.expand(state, frontier_BW, parents_BW)
            if gumbel_BKD is not None:
                logits_BWV = logits_BWV + gumbel_BKD[:, depth : depth + 1]
            ranked_BWR = self.head.target_tokens(logits_BWV.topk(level.width, dim=-1).indices)
            if ranked_BWR.shape[1] != nodes:  # the same logits for the whole frontier
                ranked_BWR = ranked_BWR.expand(-1, nodes, -1)
            drafted_BC, frontier_BW = _next_level(level, ranked_BWR)
            tokens.append(drafted_BC)
            parents_BW = _for_rows(level.parents_1W, batch)
        return torch.cat(tokens, dim=1)

    def _sampled(
        self, shape: TreeShape, plan: Plan, state: ModelState, roots_B: Tensor
    ) -> DraftTree:
        """Grow a tree of sampled drafts, with the distribution of each node's children."""
        batch = len(roots_B)
        tokens = [roots_B[:, None]]
        probs = []
        frontier_BW = tokens[0]
        parents_BW = _for_rows(plan.above_root_11, batch)
        for level in plan.levels:
            given = (state, frontier_BW, parents_BW)
            logits_BWV, state = self.rows.runner(self.rows.expand, (), *given)
            ranked_BWR, probs_BWV = self.sample_children(
                logits_BWV, frontier_BW.shape[1], level.width
            )
            probs.append(probs_BWV)
            drafted_BC, frontier_BW = _next_level(level, ranked_BWR)
            tokens.append(drafted_BC)
            parents_BW = _for_rows(level.parents_1W, batch)
        inner_BNV = torch.cat(probs, dim=1)
        probs_BNV = inner_BNV.new_zeros(batch, shape.size, inner_BNV.shape[-1])
        probs_BNV = probs_BNV.index_copy(1, plan.inner_N, inner_BNV)
        return DraftTree.of_shape(shape, torch.cat(tokens, dim=1), self.kind, probs_BNV)


def _for_rows(values_1W: Tensor, batch: int) -> Tensor:
    """The same values [B, W] for each row."""
    return values_1W if batch == 1 else values_1W.expand(batch, -1)


def _next_level(level: PlannedLevel, ranked_BWR: Tensor) -> tuple[Tensor, Tensor]:
    """Return a level's tokens [B, C], chosen from all children, and the next frontier's [B, W]."""
    drafted_BC = ranked_BWR.flatten(1)
    if level.picks_C is not None:
        drafted_BC = drafted_BC[:, level.picks_C]
    if level.frontier_W is None:
        return drafted_BC, drafted_BC
    return drafted_BC, drafted_BC[:, level.frontier_W]


class DynamicTree(HeadDrafter):
    """A tree of the most probable paths (EAGLE-2, arXiv:2406.16858), for any head.

    A node's value is the product of the draft's probabilities on its path. Level by level the
    `width` best nodes are expanded, each to its `width` best children (section 4.1); of all
    candidates the best `size - 1` stay (4.2). Ties go to the shallower node: a child whose
    log-probability rounds to 0 must not push out its parent. Children of a node whose logits hold
    NaN or inf have the value -inf: in sorting, NaN would come before the root.
    """

    def __init__(
        self,
        head: DraftModel,
        tree: DynamicShape,
        modules: TargetModules,
        budget: int | None = None,
    ) -> None:
        self.width = min(tree.width, head.draft_vocab_size)
        candidates = 1 + self.width + (tree.depth - 1) * self.width**2
        size = min(tree.size, candidates)
        shape = dataclasses.replace(tree, size=size, width=self.width)
        super().__init__(head, shape, modules, budget)

    def propose(self, roots_B: Tensor) -> DraftTree:
        size = self.max_nodes
        if self.budget is not None:
            size = min(size, self.budget // len(roots_B))
        if size < 2:
            return NoDraft("large_batch").propose(roots_B)
        depth = min(self.depth, size - 1)
        gumbel_BKD = self.gumbel_noise(depth)
        state = self.rows.catch_up()
        fixed = (size, depth, _root(roots_B.device))
        tokens_BN, parents_BN = self.rows.runner(self.draft, fixed, state, roots_B, gumbel_BKD)
        sizes_B = counting(1, roots_B.device, tokens_BN.shape[1]).expand(len(roots_B))
        return DraftTree(tokens_BN, parents_BN, sizes_B, max_depth=depth, padding=False)

    def draft(
        self,
        size: int,
        depth: int,
        root: tuple[Tensor, ...],
        state: ModelState,
        roots_B: Tensor,
        gumbel_BKD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens and parents [B, N] of the `size` best candidates.

        This function is recorded.

        A parent is worth at least as much as its child and stands before it.
        """
        tokens_BC, parents_BC, values_BC = self.candidates(state, roots_B, depth, gumbel_BKD, root)
        best_first_BC = values_BC.sort(dim=-1, descending=True, stable=True).indices
        chosen_BN = best_first_BC[:, :size].sort(dim=-1).values
        # A candidate's index in the tree is its rank among the chosen ones; the root's parent, -1,
        # precedes them all.
        parents_BN = torch.searchsorted(chosen_BN, parents_BC.gather(1, chosen_BN), right=True) - 1
        return tokens_BC.gather(1, chosen_BN), parents_BN

    def candidates(
        self,
        state: ModelState,
        roots_B: Tensor,
        depth: int,
        gumbel_BKD: Tensor | None = None,
        root: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and values [B, 1 + C] of all nodes that are considered, level by level.

        The root comes first, with parent -1 and value inf.
        """
        batch = len(roots_B)
        if root is None:
            root = _root(roots_B.device)
        parents_BW, number_B1, value_B1 = (_for_rows(values_11, batch) for values_11 in root)
        frontier_BW = roots_B[:, None]
        tokens = [frontier_BW]
        parents = [parents_BW]
        values = [value_B1]
        numbers = [number_B1]
        values_BW1 = None
        first = 1
        for level in range(1, depth + 1):
            logits_BWV, state = self.rows.expand(state, frontier_BW, parents_BW)
            if gumbel_BKD is not None:
                logits_BWV = logits_BWV + gumbel_BKD[:, level - 1 : level]
            values_BWR, indices_BWR = top_log_probs(logits_BWV, self.width)
            if values_BW1 is not None:
                values_BWR = values_BWR + values_BW1
            children_BWR = self.head.target_tokens(indices_BWR)
            # the same logits for the whole frontier
            if children_BWR.shape[1] != values_BWR.shape[1]:
                children_BWR = children_BWR.expand(-1, values_BWR.shape[1], -1)
            values.append(values_BWR.flatten(1))
            tokens.append(children_BWR.flatten(1))
            if level == depth:
                break
            values_BW, chosen_BW = values[-1].topk(self.width, dim=-1)
            frontier_BW = tokens[-1].gather(1, chosen_BW)
            parents_BW = chosen_BW // self.width
            values_BW1 = values_BW[..., None]
            numbers.append(chosen_BW + first)
            first += tokens[-1].shape[1]
        # The first level's nodes are children of the root, and those of each later one of the
        # frontier before.
        parents.append(torch.cat(numbers, 1).repeat_interleave(self.width, dim=1))
        return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(values, 1)


@constants
def _root(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parent, index and value of the root among the candidates, [1, 1] each."""
    return (
        torch.tensor([[-1]], device=device),
        torch.tensor([[0]], device=device),
        torch.tensor([[torch.inf]], dtype=torch.float32, device=device),
    )


def over_target(
    head: DraftModel, values_BWD: Tensor, draft_vocab_D: Tensor, otherwise: float = -torch.inf
) -> Tensor:
    """Scatter values of the draft vocabulary over the target's vocabulary.

    `draft_vocab_D` are the target's tokens for these values. All other tokens get `otherwise`.
    """
    whole_BWV = values_BWD.new_full((*values_BWD.shape[:-1], head.target.vocab_size), otherwise)
    whole_BWV[..., draft_vocab_D] = values_BWD
    return whole_BWV
