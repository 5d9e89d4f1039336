"""Tree policies: how a draft tree grows, depth by depth, from a head or other next-token logits.

    StaticTree     a fixed shape: top-k children (Medusa, arXiv:2401.10774, section 2.1.2), or
                   sampled ones: without replacement (Sequoia, 2402.12374; RSD, 2402.14160), or
                   independently (SpecInfer, 2305.09781)
    DynamicTree    the most probable paths, another shape in each step (EAGLE-2, 2406.16858)
    EarlyExitChain a chain that ends where the draft is no longer confident

The state from which a tree grows belongs to `DraftModelState`.

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

from ...heads.base import DraftHead
from ...heads.layers.constants import constants, counting
from ...heads.layers.decoder_layer import at_least_fp32
from ...heads.layers.fused import top_log_probs
from ..trees.sampling import RandomSampler
from ..trees.tree import DraftTree
from ..trees.tree_spec import DynamicShape, EarlyExitShape, SampledShape, TreeKind, TreeShape
from ..tuning.tree_search import prune
from .base import BatchDrafter, DraftContext, NoDraft, PrefillChunk
from .draft_model_state import DraftModel, DraftModelState, ExpandState
from .round import Round


class HeadDrafter(BatchDrafter):
    """A tree of a head, or of another draft model; a subclass grows it from the model's state."""

    def __init__(
        self,
        state: DraftModelState,
        tree: TreeShape | DynamicShape | EarlyExitShape,
        budget: int | None = None,
    ) -> None:
        """Hold a draft model with its state, which other trees may share, and the trees' shape.

        `budget` is the number of tokens that one forward of the target should hold: in a batch the
        trees shrink to it, down to the roots alone. With None they are always as large as `tree`.

        Raises:
            ValueError: a tree deeper than the head drafts.
        """
        most = state.model.max_depth
        if tree.depth > most:
            raise ValueError(
                f"the tree is {tree.depth} deep, but the head drafts at most {most} tokens"
            )
        state.make_room(tree.depth, tree.expanded)
        self.model_state = state
        self.shape = tree
        self.budget = budget
        self.feature_layers = state.model.feature_layers
        self.depth = tree.depth
        self.max_nodes = tree.size
        self._sampler: RandomSampler = RandomSampler()
        self._draft_probs: Callable[[Tensor], Tensor] | None = None
        self._gumbel: Callable[[int], Tensor] | None = None

    @property
    def head(self) -> DraftModel:
        """The draft model."""
        return self.model_state.model

    def __repr__(self) -> str:
        sampled = "" if self.kind == "top_k" else ", sampled"
        return (
            f"{type(self).__name__}({type(self.head).__name__}, {self.max_nodes} nodes, depth"
            f" {self.depth}{sampled})"
        )

    def fresh(self) -> Self:
        return self.on(self.model_state.fresh())

    def on(self, state: DraftModelState) -> Self:
        """The same tree, grown from another state."""
        other = copy.copy(self)
        other.model_state = state
        return other

    def begin(self, context: DraftContext) -> None:
        self.set_sampling(context)
        self.model_state.begin(context)

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
        self.model_state.resume(context, kept, state, whole)

    def saved_state(self) -> Any:
        return self.model_state.saved_state()

    def prefill(self, chunk: PrefillChunk) -> None:
        self.model_state.prefill(chunk)

    def observe_ahead(self, finished: Round) -> None:
        self.model_state.observe_ahead(finished)

    def shrinks_to_root(self, batch: int) -> bool:
        """Whether so many rows leave each no more of the budget than its root."""
        return self.budget is not None and self.budget // batch < 2

    def propose_ahead(self, roots_B: Tensor) -> DraftTree | None:
        if self.shrinks_to_root(len(roots_B)):
            return self.propose(roots_B)
        # Samples, and the target's noise of the next positions, follow when the host has read; so
        # do the pairs of a plain step.
        samples = self._draft_probs is not None or self._gumbel is not None
        late = self.model_state.progress.noted is not None
        if samples or late or not isinstance(self.head, DraftHead):
            return None
        return self.propose(roots_B)

    def take_back(self) -> None:
        self.model_state.take_back()

    def observe(self, finished: Round) -> None:
        self.model_state.observe(finished)

    def select(self, rows_R: Tensor) -> None:
        self.model_state.select(rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self.model_state.replace(rows_R, other.model_state)

    def gumbel_noise(self, depth: int) -> Tensor | None:
        """Return `DraftContext.gumbel` of the next `depth` positions, [B, depth, D], if known.

        The noise is that of the draft vocabulary. None if it is not known.
        """
        if self._gumbel is None:
            return None
        gumbel_BKV = self._gumbel(depth)
        # The target's noise for a token goes to the same token of the draft vocabulary.
        if self.head.draft_vocab_size == gumbel_BKV.shape[-1]:
            return gumbel_BKV
        return gumbel_BKV[..., self.model_state.draft_vocab(gumbel_BKV.device)]

    def sample_children(
        self, logits_BWV: Tensor, frontier: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """Sample `count` children R of each of `frontier` nodes W; logits with W = 1 serve all.

        They are sampled from the draft's own vocabulary: Gumbel-top-k over the target's would take
        longer than the draft. A logits processor may give probability to a token outside of it.
        That token is never sampled, so the returned distribution gives it 0.

        Returns:
            tokens [B, W, R], and the distribution that each node's children were sampled from, [B,
            W, V].
        """
        assert self._draft_probs is not None
        # 1. The user's settings (temperature, top-p ...) are defined on the target's vocabulary.
        #    Where they leave nothing to the draft's, the probabilities are 0, not 0 / 0.
        draft_vocab_D = self.model_state.draft_vocab(logits_BWV.device)
        whole_BWV = over_target(self.head, at_least_fp32(logits_BWV), draft_vocab_D)
        probs_BWD = self._draft_probs(whole_BWV)[..., draft_vocab_D]
        mass_BW1 = probs_BWD.sum(-1, keepdim=True)
        probs_BWD = torch.where(mass_BW1 > 0, probs_BWD / mass_BW1, 0.0)
        # 2. Draw: independently, where twins may occur, or without replacement.
        of_node_BWD = probs_BWD.expand(-1, frontier, -1)
        if self.kind == "sampled_independent":
            of_child_BWRD = of_node_BWD[:, :, None].expand(-1, -1, count, -1)
            sampled_BWR = self._sampler.categorical(of_child_BWRD)
        else:
            sampled_BWR = self._sampler.distinct(of_node_BWD, count)
        # 3. The distribution over the target's vocabulary, for the acceptance rule.
        probs_BWV = over_target(self.head, probs_BWD, draft_vocab_D, 0.0).expand(-1, frontier, -1)
        return self.head.target_tokens(sampled_BWR), probs_BWV


def model_states(drafter: BatchDrafter) -> list[DraftModelState]:
    """The draft models in a drafter, each once."""
    models: list[DraftModelState] = []
    for part in drafter.nested():
        if isinstance(part, HeadDrafter) and part.model_state not in models:
            models.append(part.model_state)
    return models


@dataclass(frozen=True)
class PlannedLevel:
    """One depth of a `TreeShape` on a device.

    For example, two nodes A and B are expanded to their 2 best children each, A1 A2 B1 B2. The tree
    takes A1, A2 and B1 and goes on after A1 and B1:

        width         2
        picks_C       [0, 1, 2]     of A1 A2 B1 B2
        frontier_W    [0, 2]        of A1 A2 B1
        parents_1W    [[0, 1]]      A1 is a child of frontier node 0, A; B1 of 1, B
    """

    width: int
    """Children of each node of the frontier, the best or the sampled ones."""
    picks_C: Tensor | None
    """The children that are in the tree; None for all in their order."""
    frontier_W: Tensor | None
    """Those that are expanded next; None for all in their order."""
    parents_1W: Tensor
    """The index of each one's parent in the frontier before."""


@dataclass(frozen=True)
class Plan:
    """A `TreeShape` on a device."""

    above_root_11: Tensor
    """The root's parent, -1."""
    inner_N: Tensor
    """The nodes that have children."""
    levels: list[PlannedLevel]


# Made once for each shape and device, since it is read in every draft.
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
        self, state: DraftModelState, tree: TreeShape | SampledShape, budget: int | None = None
    ) -> None:
        shape = tree.shape if isinstance(tree, SampledShape) else tree
        widest = max((level.width for level in shape.levels), default=0)
        known = state.model.draft_vocab_size
        if widest > known:
            raise ValueError(
                f"the tree asks for {widest} tokens after one node, but the head's draft vocabulary"
                f" has {known}"
            )
        super().__init__(state, shape, budget)
        if isinstance(tree, SampledShape):
            self.kind = tree.kind

    def propose(self, roots_B: Tensor) -> DraftTree:
        batch = len(roots_B)
        # 1. In a batch the rows share the budget: with 64 nodes, 8 rows get trees of 8.
        shape = self.shape
        if self.budget is not None:
            shape = prune(shape, self.budget // batch)
        if not shape.paths:
            return NoDraft("large_batch" if self.shape.paths else "").propose(roots_B)
        # 2. Grow it, from sampled or from the best tokens.
        state = self.model_state.catch_up()
        plan = _plan(shape, roots_B.device)
        if self._draft_probs is not None:
            return self._sampled(shape, plan, state, roots_B)
        gumbel_BKD = self.gumbel_noise(shape.depth)
        tokens_BN = self.model_state.runner(self.draft, (plan,), state, roots_B, gumbel_BKD)
        return DraftTree.of_shape(shape, tokens_BN)

    def draft(
        self, plan: Plan, state: ExpandState, roots_B: Tensor, gumbel_BKD: Tensor | None
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
            # W nodes at once; a head with independent depths returns W = 1 for all of them.
            logits_BWV, state = self.model_state.expand(state, frontier_BW, parents_BW)
            # With the noise of the target's next draw, the best token is the one it may draw.
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
        self, shape: TreeShape, plan: Plan, state: ExpandState, roots_B: Tensor
    ) -> DraftTree:
        """Grow a tree of sampled drafts, with the distribution of each node's children."""
        batch = len(roots_B)
        tokens = [roots_B[:, None]]
        probs = []
        frontier_BW = tokens[0]
        parents_BW = _for_rows(plan.above_root_11, batch)
        for level in plan.levels:
            # Each expansion is recorded by itself: the samples between them are drawn anew.
            inputs = (state, frontier_BW, parents_BW)
            logits_BWV, state = self.model_state.runner(self.model_state.expand, (), *inputs)
            ranked_BWR, probs_BWV = self.sample_children(
                logits_BWV, frontier_BW.shape[1], level.width
            )
            probs.append(probs_BWV)
            drafted_BC, frontier_BW = _next_level(level, ranked_BWR)
            tokens.append(drafted_BC)
            parents_BW = _for_rows(level.parents_1W, batch)
        # The expanded nodes' distributions go to their places among all nodes; leaves have none.
        inner_BNV = torch.cat(probs, dim=1)
        probs_BNV = inner_BNV.new_zeros(batch, shape.size, inner_BNV.shape[-1])
        probs_BNV = probs_BNV.index_copy(1, plan.inner_N, inner_BNV)
        return DraftTree.of_shape(shape, torch.cat(tokens, dim=1), self.kind, probs_BNV)


def _for_rows(values_1W: Tensor, batch: int) -> Tensor:
    """The same values [B, W] for each row."""
    return values_1W if batch == 1 else values_1W.expand(batch, -1)


def _next_level(level: PlannedLevel, ranked_BWR: Tensor) -> tuple[Tensor, Tensor]:
    """Return a level's tokens [B, C], chosen from all children, and the next frontier's [B, W]."""
    drafted_BC = ranked_BWR.flatten(1)  # child r of frontier node w is number w x R + r
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
        self, state: DraftModelState, tree: DynamicShape, budget: int | None = None
    ) -> None:
        self.width = min(tree.width, state.model.draft_vocab_size)
        # The root, its `width` children, and `width` children of `width` nodes at each later depth.
        candidates = 1 + self.width + (tree.depth - 1) * self.width**2
        size = min(tree.size, candidates)
        shape = dataclasses.replace(tree, size=size, width=self.width)
        super().__init__(state, shape, budget)

    def propose(self, roots_B: Tensor) -> DraftTree:
        size = self.max_nodes
        if self.budget is not None:
            size = min(size, self.budget // len(roots_B))
        if size < 2:
            return NoDraft("large_batch").propose(roots_B)
        depth = min(self.depth, size - 1)  # a deeper node could not be in the tree
        gumbel_BKD = self.gumbel_noise(depth)
        state = self.model_state.catch_up()
        fixed = (size, depth)
        tokens_BN, parents_BN = self.model_state.runner(
            self.draft, fixed, state, roots_B, gumbel_BKD
        )
        sizes_B = counting(1, roots_B.device, tokens_BN.shape[1]).expand(len(roots_B))
        return DraftTree(tokens_BN, parents_BN, sizes_B, max_depth=depth, padding=False)

    def draft(
        self,
        size: int,
        depth: int,
        state: ExpandState,
        roots_B: Tensor,
        gumbel_BKD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens and parents [B, N] of the `size` best candidates.

        This function is recorded. A parent is worth at least as much as its child and stands before
        it, so the best candidates are a tree.

        For example, with width 2, depth 2 and size 4:

            candidate    0 root   1 A   2 B   3 A1   4 A2   5 B1   6 B2
            parent           -1     0     0      1      1      2      2
            value           inf  -0.2  -1.9   -0.5   -3.0   -2.0   -4.0
            chosen            0     1     2      3
            its parent       -1     0     0      1
        """
        tokens_BC, parents_BC, values_BC = self.candidates(state, roots_B, depth, gumbel_BKD)
        # 1. The best ones, put back into the order of the candidates. The sort is stable, so of
        #    equal values the shallower node comes first.
        best_first_BC = values_BC.sort(dim=-1, descending=True, stable=True).indices
        chosen_BN = best_first_BC[:, :size].sort(dim=-1).values
        # 2. Number the parents in the tree: a candidate's index there is its rank among the chosen
        #    ones. With [0, 1, 3, 4] chosen, a parent 3 becomes 2; the root's parent, -1, precedes
        #    them all and stays -1.
        parents_BN = torch.searchsorted(chosen_BN, parents_BC.gather(1, chosen_BN), right=True) - 1
        return tokens_BC.gather(1, chosen_BN), parents_BN

    def candidates(
        self,
        state: ExpandState,
        roots_B: Tensor,
        depth: int,
        gumbel_BKD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and values [B, 1 + C] of all nodes that are considered, level by level.

        The root comes first, with parent -1 and value inf. `draft` shows an example.
        """
        batch = len(roots_B)
        root = _root(roots_B.device)
        parents_BW, number_B1, value_B1 = (_for_rows(values_11, batch) for values_11 in root)
        # The frontier: the nodes that are expanded next, their tokens, their parents' indices in
        # the frontier before, and (`values_BW1`) their log-probabilities.
        frontier_BW = roots_B[:, None]
        tokens = [frontier_BW]
        parents = [parents_BW]
        values = [value_B1]
        numbers = [number_B1]  # of the frontiers' nodes among all candidates
        values_BW1 = None
        first = 1  # the number of the level's first candidate
        for level in range(1, depth + 1):
            # 1. The `width` best children of each node of the frontier, and the log-probability of
            #    the path to each: its own and its parent's, added.
            logits_BWV, state = self.model_state.expand(state, frontier_BW, parents_BW)
            if gumbel_BKD is not None:
                logits_BWV = logits_BWV + gumbel_BKD[:, level - 1 : level]
            values_BWR, indices_BWR = top_log_probs(logits_BWV, self.width)
            if values_BW1 is not None:
                values_BWR = values_BWR + values_BW1
            children_BWR = self.head.target_tokens(indices_BWR)
            # A head with independent depths has the same logits for the whole frontier.
            if children_BWR.shape[1] != values_BWR.shape[1]:
                children_BWR = children_BWR.expand(-1, values_BWR.shape[1], -1)
            values.append(values_BWR.flatten(1))
            tokens.append(children_BWR.flatten(1))
            if level == depth:
                break
            # 2. The `width` best of all W x R children are expanded next. Child w x R + r belongs
            #    to node w of the old frontier, and is candidate number `first` + w x R + r.
            values_BW, chosen_BW = values[-1].topk(self.width, dim=-1)
            frontier_BW = tokens[-1].gather(1, chosen_BW)
            parents_BW = chosen_BW // self.width
            values_BW1 = values_BW[..., None]
            numbers.append(chosen_BW + first)
            first += tokens[-1].shape[1]
        # 3. Every frontier node has `width` children, which follow one another: frontiers [0] and
        #    [1, 2] of width 2 give the parents [0, 0, 1, 1, 2, 2].
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


class EarlyExitChain(HeadDrafter):
    """A chain that is continued while any row of the batch is confident enough.

    Whether the next token is drafted is decided from the draft's own distribution before that token
    is chosen or sampled: from the chain so far, and never from the target. So every acceptance rule
    stays exact; a token that was sampled is never taken back, which would favour confident ones.

    On a CPU the decision is made after each token. On an accelerator, where that would be a
    synchronization, the whole chain is drafted, and the tokens after its end are padding of the
    tree.
    """

    shape: EarlyExitShape

    def __init__(
        self, state: DraftModelState, tree: EarlyExitShape, budget: int | None = None
    ) -> None:
        super().__init__(state, tree, budget)
        self.kind = "sampled_chain" if tree.sampled else "top_k"

    def propose(self, roots_B: Tensor) -> DraftTree:
        # 1. The longest chain that fits the budget: the root takes one node of each row's share.
        on_cpu = roots_B.device.type == "cpu"
        longest = self.depth
        if self.budget is not None:
            longest = min(longest, self.budget // len(roots_B) - 1)
        gumbel_BKD = self.gumbel_noise(longest) if longest > 0 else None

        # 2. Draft token by token. `size` and `goes_on` are scalars on the device, so that an
        #    accelerator need not tell the host where the chain ends.
        state = self.model_state.catch_up()
        parents_B1 = torch.full_like(roots_B[:, None], -1)
        tokens = [roots_B]
        probs = []
        size = torch.ones_like(roots_B[0])
        goes_on = torch.ones_like(size, dtype=torch.bool)
        for depth in range(longest):
            inputs = (state, tokens[-1][:, None], parents_B1)
            logits_B1V, state = self.model_state.runner(self.model_state.expand, (), *inputs)
            if gumbel_BKD is not None:
                logits_B1V = logits_B1V + gumbel_BKD[:, depth : depth + 1]
            estimate_BW = getattr(state, "confidence_BW", None)  # not every model's state has one
            estimate_B = None if estimate_BW is None else estimate_BW[:, 0]
            confidence_B = confidence(logits_B1V[:, 0], estimate_B)
            # Once False it stays False: a chain has no gaps.
            goes_on = goes_on & (confidence_B >= self.shape.threshold).any()
            if on_cpu and not goes_on:
                break
            size = size + goes_on
            if self._draft_probs is None:
                tokens.append(self.head.target_tokens(logits_B1V[:, 0].argmax(-1)))
            else:
                sampled_B11, probs_B1V = self.sample_children(logits_B1V, 1, 1)
                tokens.append(sampled_B11[:, 0, 0])
                # After the end nothing counts as sampled: the distribution is 0 there.
                probs.append(torch.where(goes_on, probs_B1V, 0.0))
            parents_B1 = torch.zeros_like(parents_B1)  # from now on the frontier's only node

        # 3. The tree: all drafted tokens; those after the first `size` are padding.
        if len(tokens) == 1:
            return NoDraft().propose(roots_B)
        shape = TreeShape.chain(len(tokens) - 1)
        tokens_BN = torch.stack(tokens, dim=1)
        kind: TreeKind = "top_k"
        probs_BNV = None
        if probs:
            kind = self.kind
            # Nothing was sampled after the last node.
            probs_BNV = torch.cat([*probs, torch.zeros_like(probs[0])], dim=1)
        tree = DraftTree.of_shape(shape, tokens_BN, kind, probs_BNV)
        return dataclasses.replace(tree, sizes_B=size.expand(len(roots_B)), padding=True)


def confidence(logits_BV: Tensor, estimate_B: Tensor | None = None) -> Tensor:
    """Probability that a draft's next token is accepted, [B].

    It is the head's own estimate if it makes one (`estimate_B`, its logits), else the probability
    of the draft's best token.
    """
    if estimate_B is not None:
        return at_least_fp32(estimate_B).sigmoid()
    return at_least_fp32(logits_BV).softmax(-1).amax(-1)


def over_target(
    head: DraftModel, values_BWD: Tensor, draft_vocab_D: Tensor, otherwise: float = -torch.inf
) -> Tensor:
    """Scatter values of the draft vocabulary over the target's vocabulary.

    `draft_vocab_D` are the target's tokens for these values. All other tokens get `otherwise`.
    """
    # Values [1, 2] of the draft vocabulary [4, 0], in a vocabulary of 5: [2, -inf, -inf, -inf, 1].
    whole_BWV = values_BWD.new_full((*values_BWD.shape[:-1], head.target.vocab_size), otherwise)
    whole_BWV[..., draft_vocab_D] = values_BWD
    return whole_BWV
