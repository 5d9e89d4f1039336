"""Tree policies: how a draft tree grows, depth by depth, from a head or from anything that gives next-token logits.

    StaticTree     a fixed shape: top-k children (Medusa, arXiv:2401.10774, section 2.1.2), or sampled ones: without
                   replacement (Sequoia, 2402.12374; RSD, 2402.14160), or independently (SpecInfer, 2305.09781)
    DynamicTree    the most probable paths, another shape in each step (EAGLE-2, 2406.16858)

A chain that ends early is in `early_exit`. `HeadDrafter` keeps the head's state in step with the text.

Letters in tensor names: B batch, T time, A accepted, N nodes, W frontier, R children of a node, C candidates,
K depths, D tokens of the draft vocabulary, V of the target's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from ...heads.base import DraftHead, DraftState, TargetModules
from ...heads.layers.constants import constants, counting
from ...heads.layers.decoder_layer import at_least_fp32
from ...heads.layers.draft_cache import STEP, DraftCache
from ..engines.base import Engine, Runner
from ..target import Target
from ..tree import DraftTree
from ..tuning.tree_search import prune
from ..tuning.tree_spec import DynamicShape, EarlyExitShape, SampledShape, TreeShape
from .base import DraftContext, Drafter, NoDraft, PrefillChunk, StepResult
from .draft_model import AssistantModel
from .ngram_model import NgramModel

CHUNK_TOKENS = 512
"""Tokens that a head reads at once: its attention mask has as many rows."""
PENDING_TOKENS = 8192
"""Tokens of each row whose features are kept, at most, for a head that has not read them yet."""


ModelState = Any
"""State of a draft model: a `heads.DraftState`, or a dataclass of the model's own with `select` and `replace`."""
DraftModel = DraftHead | AssistantModel | NgramModel
"""Next-token logits, depth by depth: a head, or a model with the part of its interface that drafting needs."""


@dataclass
class Progress:
    """A head's state, and the part of the text that it has not read yet; several trees of one head share it."""

    state: ModelState = None
    empty: bool = True
    """Whether the head has read nothing yet."""
    lazy: bool = False
    """Whether prompts are read only when drafts are needed, which may be never, or when other rows join the batch."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    """Prompts to read."""
    steps: list[PrefillChunk] = field(default_factory=list)
    """Tokens of steps without drafts, one a row each, to read at once."""
    pending: int = 0
    """Tokens of a row in both."""
    longest: int = 0
    """Tokens that the head has read of any row, at most."""


Watcher = Callable[[Tensor, Tensor, Tensor], None]
"""Shown an expansion: tokens_BW, parents_BW, and the logits_BWV of the children."""


class HeadDrafter(Drafter):
    """A head, or another draft model, whose state follows the text; a subclass grows a tree from it."""

    def __init__(
        self,
        head: DraftModel,
        tree: TreeShape | DynamicShape | EarlyExitShape,
        modules: TargetModules,
        budget: int | None = None,
    ) -> None:
        """Hold a head and the shape of its trees.

        `budget` is the number of tokens that one forward of the target should hold: in a batch the trees shrink to it,
        down to the roots alone. With None they are always as large as `tree`.

        Raises:
            ValueError: a tree deeper than the head drafts.
        """
        if tree.depth > head.max_depth:
            raise ValueError(f"the tree is {tree.depth} deep, but the head drafts at most {head.max_depth} tokens")
        self.head, self.shape, self.modules, self.budget = head, tree, modules, budget
        self.feature_layers = head.feature_layers
        self.depth, self.max_nodes = tree.depth, tree.size
        self.room = (tree.depth, tree.expanded)
        """Expansions of a step, and nodes that they expand, for which a state has room."""
        self.shared = Progress()
        self.engine: Engine | None = None
        """The target's, which says how a head drafts there; None for a draft that runs as it is."""
        self.runner = Runner()
        self.watcher: Watcher | None = None
        """Shown every expansion, see `watch`."""
        self._caches: dict[Any, DraftCache] = {}
        """By shape, caches of earlier generations, to be used again where they lie."""
        self._gumbel: Callable[[int], Tensor] | None = None
        self._own_D: Tensor | None = None
        """The draft vocabulary, as the target's tokens."""

    def __repr__(self) -> str:
        sampled = "" if self.kind == "top_k" else ", sampled"
        return f"{type(self).__name__}({type(self.head).__name__}, {self.max_nodes} nodes, depth {self.depth}{sampled})"

    def begin(self, context: DraftContext) -> None:
        capacity = self.runner.rounded_capacity(context.capacity)
        state = self.head.begin(self.modules, context.batch_size, capacity, *self.room)
        self.shared = Progress(self._in_a_known_cache(state))
        self._gumbel = context.gumbel if self.kind == "top_k" else None
        self._draft_probs = None if self.kind == "top_k" else context.draft_probs
        self._sampler = context.sampler

    def _in_a_known_cache(self, state: ModelState) -> ModelState:
        """The state with the cache of an earlier generation, if one fits: recorded functions read it where it lies."""
        if not self.runner.replays or not isinstance(state, DraftState) or state.cache is None:
            return state
        shape = (state.cache.nodes, *(states.shape for states in state.cache.keys))
        cache = self._caches.setdefault(shape, state.cache)
        cache.attended = None
        return dataclasses.replace(state, cache=cache)

    def fresh(self) -> Self:
        other = super().fresh()
        other._caches = {}
        return other

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        self.begin(context)
        if state is None:
            self.prefill(kept)
            return
        assert isinstance(state, Progress)
        self.shared = state
        if not whole:
            self.catch_up()
        tokens = kept.tokens_BT.shape[1] + self.head.reads_from_start
        cropped = None if self.shared.pending else tokens  # what is pending lies behind all that was read
        self.shared.state = self.shared.state.resume(cropped, context.capacity)
        self.shared.longest = tokens if cropped is not None else self.shared.longest

    def saved_state(self) -> Progress | None:
        self._caches = {}  # the next generation must not write to this state's
        return self.shared if hasattr(self.shared.state, "resume") else None

    def cache_bytes(self, rows: int, tokens: int) -> int:
        holder = self.head.model if isinstance(self.head, AssistantModel) else self.head
        return holder.cache_bytes(rows, tokens) if isinstance(holder, DraftHead | Target) else 0

    def prefill(self, chunk: PrefillChunk) -> None:
        self.shared.chunks.append(chunk)
        self.shared.pending += chunk.tokens_BT.shape[1]
        if not self.shared.lazy or self.shared.pending > PENDING_TOKENS:
            self.catch_up()

    def catch_up(self) -> ModelState:
        """The head's state after it has read all that is pending."""
        chunks, steps = self.shared.chunks, self.shared.steps
        if chunks or steps:
            self.shared.chunks, self.shared.steps, self.shared.pending = [], [], 0
            for chunk in chunks:
                self._read(chunk)
            if len(steps) > 1:  # all but the newest at once, and that one as after any step
                parts = [(step.tokens_BT, step.next_tokens_BT, step.features_BTF) for step in steps[:-1]]
                tokens_BT, next_BT, features_BTF = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
                count_B = torch.full((len(tokens_BT),), tokens_BT.shape[1], device=tokens_BT.device)
                self._read(PrefillChunk(tokens_BT, next_BT, features_BTF, count_B))
            if steps:
                self._read(steps[-1])
        return self.shared.state

    def _read(self, chunk: PrefillChunk) -> None:
        tokens_BT, lengths_B = chunk.next_tokens_BT, chunk.lengths_B
        if self.shared.empty and self.head.reads_from_start:
            tokens_BT, lengths_B = torch.cat([chunk.tokens_BT[:, :1], tokens_BT], dim=1), lengths_B + 1
        for start in range(0, tokens_BT.shape[1], CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            count_B = (lengths_B - start).clamp(0, CHUNK_TOKENS)
            self._extend(len(tokens_BT[0, part]))
            given = (self.shared.state, chunk.features_BTF[:, part], tokens_BT[:, part], count_B)
            self.shared.state = self.runner.run_unrecorded(self.head.observe, *given)
        self.shared.empty = False

    def _extend(self, tokens: int) -> None:
        """Let the head attend to `tokens` more slots of its cache."""
        self.shared.longest += tokens
        cache = getattr(self.shared.state, "cache", None)
        if not isinstance(cache, DraftCache):
            return
        attended = -(-self.shared.longest // STEP) * STEP
        if self.runner.replays:
            attended = self.runner.rounded_capacity(attended) + 1
        cache.attended = cache.nodes + attended

    def use(self, engine: Engine) -> None:
        self.engine = engine
        if isinstance(self.head, DraftHead):
            self.head = engine.draft_head(self.head)
            self.runner = engine.runner if self.watcher is None else Runner()
        elif isinstance(self.head, AssistantModel):
            self.head.model.compile(engine.mode)

    def watch(self, watcher: Watcher | None) -> None:
        """Show the logits of every expansion to `watcher` from now on; None ends that.

        Meanwhile drafts run as they are: one that is replayed shows nothing.
        """
        self.watcher = watcher
        self.runner = Runner()
        if watcher is None and self.engine is not None and isinstance(self.head, DraftHead):
            self.runner = self.engine.runner

    def show(self, tokens_BW: Tensor, parents_BW: Tensor, logits_BWV: Tensor) -> None:
        """Show an expansion to whoever watches."""
        if self.watcher is not None:
            self.watcher(tokens_BW, parents_BW, logits_BWV)

    def renew(self, force: bool = False) -> None:
        if isinstance(self.head, AssistantModel):
            if force:
                self.head.model.refresh()
        elif isinstance(self.head, DraftHead) and self.engine is not None:
            self.engine.renew_head(self.head, force)

    def gumbel_noise(self, depth: int) -> Tensor:
        """`DraftContext.gumbel` for the next `depth` positions, over the draft vocabulary."""
        assert self._gumbel is not None
        gumbel_BKV = self._gumbel(depth)
        if self.head.draft_vocab_size == gumbel_BKV.shape[-1]:
            return gumbel_BKV
        if self._own_D is None or self._own_D.device != gumbel_BKV.device:
            self._own_D = self.head.target_tokens(torch.arange(self.head.draft_vocab_size, device=gumbel_BKV.device))
        return gumbel_BKV[..., self._own_D]

    def sample_children(self, logits_BWV: Tensor, frontier: int, count: int) -> tuple[Tensor, Tensor]:
        """Sample `count` children R of each of `frontier` nodes W; in the logits W is 1 if they are the same for all.

        They are sampled from the draft's own vocabulary: Gumbel-top-k over the target's would take longer than the
        draft. What logits processors leave to other tokens is not sampled from, and so not in the distribution either.

        Returns:
            tokens [B, W, R], and the distribution that each node's children were sampled from, [B, W, V].
        """
        assert self._draft_probs is not None
        own_D = self.head.target_tokens(torch.arange(self.head.draft_vocab_size, device=logits_BWV.device))
        probs_BWD = self._draft_probs(over_target(self.head, at_least_fp32(logits_BWV), own_D))[..., own_D]
        mass_BW1 = probs_BWD.sum(-1, keepdim=True)
        probs_BWD = torch.where(mass_BW1 > 0, probs_BWD / mass_BW1, 0.0)
        of_node_BWD = probs_BWD.expand(-1, frontier, -1)
        if self.kind == "sampled_independent":
            sampled_BWR = self._sampler.categorical(of_node_BWD[:, :, None].expand(-1, -1, count, -1))
        else:
            sampled_BWR = self._sampler.distinct(of_node_BWD, count)
        probs_BWV = over_target(self.head, probs_BWD, own_D, 0.0).expand(-1, frontier, -1)
        return self.head.target_tokens(sampled_BWR), probs_BWV

    def observe(self, step: StepResult) -> None:
        if step.tree.max_depth == 0:
            read = (step.tree.tokens_BN, step.emitted_BA, step.features_BAF, step.lengths_B)
            self.shared.steps.append(PrefillChunk(*map(self.runner.keep, read)))
            self.shared.pending += 1
            if self.shared.pending > PENDING_TOKENS:
                self.catch_up()
            return
        accepted, state = step.emitted_BA.shape[1], self.catch_up()
        self._extend(accepted)
        given = (state, step.features_BAF, step.emitted_BA, step.lengths_B)
        self.shared.state = self.runner(self.head.observe, (), *given)
        self.shared.longest -= accepted - max(map(len, step.tokens), default=accepted)

    def select(self, rows_R: Tensor) -> None:
        shared = self.shared
        if shared.chunks and len(rows_R) > len(shared.chunks[0].lengths_B):
            self.catch_up()  # else the head would read the prompts of copies that others are about to replace
        shared.state = shared.state.select(rows_R)
        shared.chunks, shared.steps = (
            [PrefillChunk(*(tensor[rows_R] for tensor in vars(chunk).values())) for chunk in chunks]
            for chunks in (shared.chunks, shared.steps)
        )

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        assert isinstance(other, HeadDrafter)
        self.shared.state = self.catch_up().replace(rows_R, other.catch_up())
        self.shared.longest = max(self.shared.longest, other.shared.longest)
        self._extend(0)


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
    indices = partial(torch.tensor, dtype=torch.int64, device=device)
    levels, nodes = [], 1
    for level in shape.levels:
        picks, frontier = (
            None if chosen == tuple(range(count)) else indices(chosen)
            for chosen, count in ((level.picks, nodes * level.width), (level.frontier, len(level.picks)))
        )
        levels.append(PlannedLevel(level.width, picks, frontier, indices([level.parents])))
        nodes = len(level.frontier)
    return Plan(indices([[-1]]), indices(shape.inner), levels)


class StaticTree(HeadDrafter):
    """A tree of a fixed shape: a node's rank is its place among the top-k, or its turn among the sampled siblings.

    Greedy decoding always takes the top-k.
    """

    shape: TreeShape

    def __init__(
        self, head: DraftModel, tree: TreeShape | SampledShape, modules: TargetModules, budget: int | None = None
    ) -> None:
        shape = tree.shape if isinstance(tree, SampledShape) else tree
        widest = max((level.width for level in shape.levels), default=0)
        if widest > head.draft_vocab_size:
            raise ValueError(
                f"the tree asks for {widest} tokens after one node, but the head's draft vocabulary has "
                f"{head.draft_vocab_size}"
            )
        super().__init__(head, shape, modules, budget)
        self.kind = tree.kind if isinstance(tree, SampledShape) else "top_k"

    def propose(self, roots_B: Tensor) -> DraftTree:
        batch = len(roots_B)
        shape = self.shape if self.budget is None else prune(self.shape, self.budget // batch)
        if not shape.paths:
            return NoDraft("large_batch" if self.shape.paths else "").propose(roots_B)
        state, plan = self.catch_up(), _plan(shape, roots_B.device)
        if self._draft_probs is None:
            gumbel_BKD = None if self._gumbel is None else self.gumbel_noise(shape.depth)
            tokens_BN = self.runner(self.draft, (plan,), state, roots_B, gumbel_BKD)
            return DraftTree.of_shape(shape, tokens_BN)
        probs: list[Tensor] = []
        tokens_BN = self.draft(plan, state, roots_B, None, probs)
        inner = torch.cat(probs, dim=1)
        probs_BNV = inner.new_zeros(batch, shape.size, inner.shape[-1]).index_copy(1, plan.inner_N, inner)
        return DraftTree.of_shape(shape, tokens_BN, self.kind, probs_BNV)

    def draft(
        self,
        plan: Plan,
        state: ModelState,
        roots_B: Tensor,
        gumbel_BKD: Tensor | None,
        probs: list[Tensor] | None = None,
    ) -> Tensor:
        """Grow the tree level by level: the tokens [B, N] of its nodes. Without `probs` this function is recorded.

        With `probs`, children are sampled, and their distributions are added to it.
        """
        batch, above_root_11 = len(roots_B), plan.above_root_11
        tokens = [roots_B[:, None]]
        frontier_BW, parents_BW = tokens[0], above_root_11 if batch == 1 else above_root_11.expand(batch, -1)
        for depth, level in enumerate(plan.levels):
            nodes = frontier_BW.shape[1]
            if probs is None:
                logits_BWV, state = self.head.expand(state, frontier_BW, parents_BW)
                self.show(frontier_BW, parents_BW, logits_BWV)
                if gumbel_BKD is not None:
                    logits_BWV = logits_BWV + gumbel_BKD[:, depth : depth + 1]
                ranked_BWR = self.head.target_tokens(logits_BWV.topk(level.width, dim=-1).indices)
                if ranked_BWR.shape[1] != nodes:  # the same logits for the whole frontier
                    ranked_BWR = ranked_BWR.expand(-1, nodes, -1)
            else:
                logits_BWV, state = self.runner(self.head.expand, (), state, frontier_BW, parents_BW)
                self.show(frontier_BW, parents_BW, logits_BWV)
                ranked_BWR, probs_BWV = self.sample_children(logits_BWV, nodes, level.width)
                probs.append(probs_BWV)
            children_BC = ranked_BWR.flatten(1)
            tokens.append(children_BC if level.picks_C is None else children_BC[:, level.picks_C])
            frontier_BW = tokens[-1] if level.frontier_W is None else tokens[-1][:, level.frontier_W]
            parents_BW = level.parents_1W if batch == 1 else level.parents_1W.expand(batch, -1)
        return torch.cat(tokens, dim=1)


class DynamicTree(HeadDrafter):
    """A tree of the most probable paths (EAGLE-2, arXiv:2406.16858), for any head.

    A node's value is the product of the draft's probabilities on its path. Level by level the `width` best nodes are
    expanded, each to its `width` best children (section 4.1); of all candidates the best `size - 1` stay (4.2). Ties
    go to the shallower node: a child whose log-probability rounds to 0 must not push out its parent. Children of a node
    whose logits hold NaN or inf have the value -inf: in sorting, NaN would come before the root.
    """

    def __init__(self, head: DraftModel, tree: DynamicShape, modules: TargetModules, budget: int | None = None) -> None:
        self.width = min(tree.width, head.draft_vocab_size)
        size = min(tree.size, self.width + (tree.depth - 1) * self.width**2 + 1)
        super().__init__(head, dataclasses.replace(tree, size=size, width=self.width), modules, budget)

    def propose(self, roots_B: Tensor) -> DraftTree:
        size = self.max_nodes if self.budget is None else min(self.max_nodes, self.budget // len(roots_B))
        if size < 2:
            return NoDraft("large_batch").propose(roots_B)
        depth = min(self.depth, size - 1)
        gumbel_BKD = None if self._gumbel is None else self.gumbel_noise(depth)
        fixed = (size, depth, _root(roots_B.device))
        tokens_BN, parents_BN = self.runner(self.draft, fixed, self.catch_up(), roots_B, gumbel_BKD)
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
        """Tokens and parents [B, N] of the best `size` of all candidates; this function is recorded.

        A parent is worth at least as much as its child and stands before it.
        """
        tokens_BC, parents_BC, values_BC = self.candidates(state, roots_B, depth, gumbel_BKD, root)
        chosen_BN = values_BC.sort(dim=-1, descending=True, stable=True).indices[:, :size].sort(dim=-1).values
        # A candidate's index in the tree is its rank among the chosen ones; the root's parent, -1, precedes them all.
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
        root, batch = root or _root(roots_B.device), len(roots_B)
        parents_BW, number_B1, value_B1 = (each if batch == 1 else each.expand(batch, -1) for each in root)
        frontier_BW, values_BW1, first = roots_B[:, None], None, 1
        tokens, parents, values, numbers = [frontier_BW], [parents_BW], [value_B1], [number_B1]
        for level in range(1, depth + 1):
            logits_BWV, state = self.head.expand(state, frontier_BW, parents_BW)
            self.show(frontier_BW, parents_BW, logits_BWV)
            if gumbel_BKD is not None:
                logits_BWV = logits_BWV + gumbel_BKD[:, level - 1 : level]
            at_least_fp32 = torch.promote_types(logits_BWV.dtype, torch.float32)
            best = logits_BWV.to(at_least_fp32).log_softmax(-1).topk(self.width, dim=-1)
            values_BWR = best.values.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
            values_BWR = values_BWR if values_BW1 is None else values_BWR + values_BW1
            children_BWR = self.head.target_tokens(best.indices)
            if children_BWR.shape[1] != values_BWR.shape[1]:  # the same logits for the whole frontier
                children_BWR = children_BWR.expand(-1, values_BWR.shape[1], -1)
            values.append(values_BWR.flatten(1))
            tokens.append(children_BWR.flatten(1))
            if level == depth:
                break
            values_BW, chosen_BW = values[-1].topk(self.width, dim=-1)
            frontier_BW, parents_BW = tokens[-1].gather(1, chosen_BW), chosen_BW // self.width
            values_BW1 = values_BW[..., None]
            numbers.append(chosen_BW + first)
            first += tokens[-1].shape[1]
        # The first level's nodes are children of the root, and those of each later one of the frontier before.
        parents.append(torch.cat(numbers, 1).repeat_interleave(self.width, dim=1))
        return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(values, 1)


@constants
def _root(device: torch.device) -> tuple[Tensor, ...]:
    """Parent, index and value of the root among the candidates, [1, 1] each."""
    return tuple(torch.tensor([[number]], device=device) for number in (-1, 0, torch.inf))


def over_target(head: DraftModel, values_BWD: Tensor, own_D: Tensor, otherwise: float = -torch.inf) -> Tensor:
    """Values of the draft vocabulary, which are the target's tokens `own_D`, over the target's vocabulary."""
    whole_BWV = values_BWD.new_full((*values_BWD.shape[:-1], head.target.vocab_size), otherwise)
    whole_BWV[..., own_D] = values_BWD
    return whole_BWV
