"""Adaptive speculation: autoregressive steps, or one of several trees, step by step, by measured tokens per second.

A candidate's speed is the tokens that its steps emit over the time that they take; the fastest
that was timed leads. Others are probed for a few steps: `PROBE_SHARE` of the tokens that are
generated goes into a budget, and what probes lose is paid from it. So the loss is bounded however
slow a candidate is, and cheap probes are frequent.

The choice depends on the clock and on past acceptance alone, so the output stays exact whatever is
chosen.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Self

import torch
from torch import Tensor

from ...heads.base import DraftHead
from ..tree import DraftTree
from ..tuning.round_costs import RoundCosts
from ..tuning.tree_search import by_speed, chain_length, default_dynamic_tree, default_length
from ..tuning.tree_spec import DynamicShape, EarlyExitShape, TreePolicy, TreeShape
from .base import BatchDrafter, DraftContext, NoDraft, PrefillChunk, StepResult
from .tree_policies import HeadDrafter

PROBE_SHARE = 0.01
"""Share of the generated tokens that probes may cost."""
PROBE_STEPS = 4
"""Steps of a probe. The first are slow: a head reads what it has missed, and its weights are not in the cache."""
AVERAGED_STEPS = 48
"""Steps over which tokens per step are averaged, exponentially: over fewer, chance decides."""
PRIOR_STEPS = 4
"""Steps as which the expected length of a head's tree counts, so that the first of a text do not decide alone."""
LEAST_LENGTH = 1.05
"""Least tokens per step that a tree is taken to emit: even one whose drafts were all rejected may recover."""
TIMED_STEPS = 7
"""A candidate's latest steps, whose median is its cost: a few slow ones do not count, a whole probe does."""
MARGIN = 0.02
"""Speedup over autoregressive steps that drafts must have: near a tie a change gains nothing."""
CANDIDATE_SIZES = (2, 4, 8, 16)
"""Nodes of the trees that are tried where no tree is named."""
CANDIDATE_LENGTHS = (1, 2, 3, 5, 7)
"""Tokens of the chains that are tried where trees do not pay."""
LARGE_SIZE = 32
"""Nodes of one more, where its forward costs less than `LARGE_COST` autoregressive steps."""
LARGE_COST = 2.0
BEST_RATE = 0.8
"""Acceptance rate at every depth at which a candidate must pay: probing a hopeless one is a loss."""


@dataclass
class Candidate:
    """Autoregressive steps, or a tree, as measured so far."""

    cost: float
    """Expected seconds of a step, to compare with those of others."""
    length: float
    """Tokens per step."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=TIMED_STEPS))
    """Of its latest steps."""
    steps: int = 1
    """Steps that `length` averages, at most `AVERAGED_STEPS`."""
    idle: float = math.inf
    """Tokens generated since it ran last."""


class Speeds:
    """The candidates at one number of rows: which one leads, and when another is probed."""

    def __init__(self, candidates: list[Candidate], plain: int | None, measured: bool) -> None:
        """Begin with candidates, of which number `plain` is autoregressive steps; among equals the first one leads.

        Where their costs were not `measured`, nothing is known: the first probe need not be saved
        for, and the first steps tell more than what was expected.
        """
        self.candidates = candidates
        self.plain = plain
        for candidate in candidates:
            candidate.steps = PRIOR_STEPS if measured else 1
        self.leader = max(range(len(candidates)), key=self.speed)
        self.running = self.leader
        self.probe = 0
        """Steps that are left of the current probe."""
        self.probe_tokens = 0.0
        self.probe_seconds = 0.0
        self.budget = 0.0 if measured else 1.5
        """Tokens that probes may lose."""
        self.deficit = 0.0
        """Tokens lost to autoregressive steps since drafts took the lead."""

    def elsewhere(self) -> Speeds:
        """A first estimate for another number of rows."""
        other = copy.deepcopy(self)
        for number, candidate in enumerate(other.candidates):
            if candidate.seconds:
                candidate.seconds = deque([self.cost(number)] * PROBE_STEPS, TIMED_STEPS)
        other.running = other.leader
        other.probe = 0
        other.deficit = 0.0
        return other

    def cost(self, number: int) -> float:
        """Seconds of a candidate's step; before there was one, as expected relative to one that was timed."""
        candidate = self.candidates[number]
        if candidate.seconds:
            return median_low(candidate.seconds)
        timed = [other for other in self.candidates if other.seconds]
        if not timed:
            return candidate.cost
        nearest = min(timed, key=lambda other: abs(math.log(other.cost / candidate.cost)))
        return median_low(nearest.seconds) * candidate.cost / nearest.cost

    def speed(self, number: int) -> float:
        """Tokens a second and row, with `MARGIN` in favour of autoregressive steps."""
        speed = self.candidates[number].length / self.cost(number)
        return speed * (1 + MARGIN) if number == self.plain else speed

    def choose(self) -> int:
        """The candidate of the next step."""
        if self.probe:
            return self.running
        known = {self.leader}
        for number, candidate in enumerate(self.candidates):
            if len(candidate.seconds) >= PROBE_STEPS:
                known.add(number)
        before = self.leader
        self.leader = max(known, key=self.speed)
        if self.leader == self.plain != before:
            self.budget -= max(self.deficit, 0.0)
        if self.leader != before:
            self.deficit = 0.0
        self.running = self.leader
        other = self._to_probe()
        if other is not None:
            self.running = other
            self.probe = PROBE_STEPS
            self.probe_tokens = 0.0
            self.probe_seconds = 0.0
            if self.leader == self.plain:  # the text has moved on since drafts were probed
                self.candidates[other].steps = 1
        return self.running

    def record(self, seconds: float, tokens: float) -> None:
        """Enter a step of the chosen candidate, which emitted `tokens` per row."""
        ran = self.candidates[self.running]
        ran.seconds.append(max(seconds, 1e-9))  # a clock may stand still
        self.budget += PROBE_SHARE * tokens
        for candidate in self.candidates:
            candidate.idle += tokens
        ran.idle = 0.0
        if self.running != self.plain:
            ran.steps = min(ran.steps + 1, AVERAGED_STEPS)
            before = max(ran.length, LEAST_LENGTH)
            ran.length = max(before + (tokens - before) / ran.steps, LEAST_LENGTH)
            # What one tree shows holds by half for the others.
            change = math.sqrt((ran.length - 1) / (before - 1))
            for number, other in enumerate(self.candidates):
                if number not in (self.running, self.plain):
                    other.length = max(1 + (other.length - 1) * change, LEAST_LENGTH)
        if self.probe:
            self.probe -= 1
            self.probe_tokens += tokens
            self.probe_seconds += seconds
            if self.probe == 0:
                spent = self.probe_seconds
                if len(ran.seconds) == PROBE_STEPS:
                    # Its first: work that is done once in a process does not count.
                    spent = PROBE_STEPS * self.cost(self.running)
                self.budget -= max(spent * self.speed(self.leader) - self.probe_tokens, 0.0)
        elif self.plain is not None and self.running != self.plain:
            self.deficit += self.cost(self.running) / self.cost(self.plain) - tokens

    def _to_probe(self) -> int | None:
        """The next candidate to probe, if what it may lose is saved.

        That is the best of those that may be faster, or else the one that was idle for longest.
        Each has its own share of what is saved, so that one that is expensive to probe does not
        hold up the others. Where autoregressive steps lead, only the best tree is probed.
        """
        others = [number for number in range(len(self.candidates)) if number != self.leader]
        if not others or len(self.candidates[self.leader].seconds) < PROBE_STEPS:
            return None
        saved = max(self.budget, 0.0)
        best = max(others, key=self.speed)
        if self.leader == self.plain or self.speed(best) > self.speed(self.leader):
            return best if self._lost(best) <= saved else None
        chosen = None
        longest_idle = -1.0
        for other in others:
            idle = self.candidates[other].idle
            share = min(saved, PROBE_SHARE * idle / len(others))
            if idle > longest_idle and self._lost(other) <= share:
                chosen = other
                longest_idle = idle
        return chosen

    def _lost(self, number: int) -> float:
        """Tokens that a probe is expected to lose."""
        tokens_of_leader = self.cost(number) * self.speed(self.leader)
        return PROBE_STEPS * (tokens_of_leader - self.candidates[number].length)


class AdaptiveDrafter(BatchDrafter):
    """Autoregressive steps, or one of several trees of one head: whichever has been fastest.

    Measurements are kept from one generation to the next. A step's time is all of it: draft,
    forward, verification, host, and what the drafter reads. Prompts, and tokens of autoregressive
    steps, are read by a head when it drafts again, or when other rows join the batch.

    When sampling from sampled trees, it always uses the first tree, so that a seed fixes the text.
    """

    def __init__(
        self,
        trees: Sequence[BatchDrafter],
        plain: bool = True,
        costs: RoundCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Wrap one drafter of any kind, or several trees of one head; `plain` adds autoregressive steps.

        `costs` of steps on this machine serve for the first choices; None if they were not
        measured.
        """
        if not trees:
            raise ValueError("adaptive drafting needs a drafter")
        if len({tree.kind for tree in trees}) > 1:
            raise ValueError("top-k trees and sampled trees have different rules: choose among either")
        self.trees = _of_one_head(trees)
        self.reader = self.trees[0]
        """The tree that reads the text; the others share its head's state."""
        self.parts = self.trees
        self.plain = plain
        self.costs = costs
        self.clock = clock
        self.feature_layers = self.reader.feature_layers
        self.kind = self.reader.kind
        self.max_nodes = max(tree.max_nodes for tree in trees)
        if plain and isinstance(self.reader, HeadDrafter):
            self.reader.rows.read_when_needed()
        self.speeds: dict[tuple[bool, int], Speeds] = {}
        """By whether texts are sampled, where other drafts are accepted, and by the rows decoded together."""
        self._sampling = False
        self._running: Speeds | None = None
        """Where the current step is entered; None if nothing was chosen for it."""
        self._started = 0.0
        self._drafted = False

    def __repr__(self) -> str:
        choices = ["plain steps"] if self.plain else []
        choices += map(repr, self.trees)
        return f"AdaptiveDrafter({' | '.join(choices)})"

    def fresh(self) -> Self:
        other = copy.copy(self)
        other.reader = self.reader.fresh()
        other.trees = [other.reader]
        for tree in self.trees[1:]:
            assert isinstance(tree, HeadDrafter) and isinstance(other.reader, HeadDrafter)
            other.trees.append(tree.on(other.reader.rows))
        other.parts = other.trees
        other._running = None
        return other

    def begin(self, context: DraftContext) -> None:
        self._set_sampling(context)
        self.reader.begin(context)

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        self._set_sampling(context)
        self.reader.resume(context, kept, state, whole)

    def _set_sampling(self, context: DraftContext) -> None:
        self._running = None
        self._sampling = context.draft_probs is not None
        for tree in self.trees[1:]:
            assert isinstance(tree, HeadDrafter)
            tree.set_sampling(context)

    def saved_state(self) -> Any:
        return self.reader.saved_state()

    def prefill(self, chunk: PrefillChunk) -> None:
        self.reader.prefill(chunk)

    def propose(self, roots_B: Tensor) -> DraftTree:
        if self._sampling and self.kind != "top_k":
            return self.reader.propose(roots_B)
        speeds = self._speeds(len(roots_B), roots_B.device)
        self._running = speeds
        self._started = self.clock()
        chosen = speeds.choose()
        self._drafted = chosen != speeds.plain
        if self.plain and chosen == 0:
            return NoDraft("slower").propose(roots_B)
        return self.trees[chosen - self.plain].propose(roots_B)

    def host_values(self, step: StepResult) -> Tensor | None:
        return self.reader.host_values(step)

    def observe(self, step: StepResult) -> None:
        now = self.clock()
        self.reader.observe(step)
        if self._running is None:  # nothing was chosen, or another drafter decided not to draft
            return
        if self._drafted:  # autoregressive steps do not pay for a head that follows the text
            now = self.clock()
        emitted = sum(len(tokens) for tokens in step.tokens)
        self._running.record(now - self._started, emitted / len(step.tokens))
        self._running = None

    def select(self, rows_R: Tensor) -> None:
        self.reader.select(rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self.reader.replace(rows_R, other.reader)

    def _speeds(self, rows: int, device: torch.device) -> Speeds:
        """The candidates at this number of rows; at a new one, as at the nearest that is known."""
        here = (self._sampling, rows)

        def distance(other: tuple[bool, int]) -> tuple[bool, float]:
            sampling, other_rows = other
            return sampling != self._sampling, abs(math.log(other_rows / rows))

        if here not in self.speeds:
            if self.speeds:
                nearest = min(self.speeds, key=distance)
                self.speeds[here] = self.speeds[nearest].elsewhere()
            else:
                self.speeds[here] = self._expected_speeds(device)
        return self.speeds[here]

    def _expected_speeds(self, device: torch.device) -> Speeds:
        """The candidates before any step was timed."""
        costs = self.costs or RoundCosts.assumed(device)
        candidates = []
        if self.plain:
            candidates.append(Candidate(costs.seconds(1, 0), 1.0))
        for tree in self.trees:
            depth = 0
            shape: TreePolicy = DynamicShape(max(tree.max_nodes, 2), max(tree.max_nodes - 1, 1))
            if isinstance(tree, HeadDrafter):
                depth = tree.depth
                shape = tree.shape
            seconds = costs.seconds(tree.max_nodes, depth)
            candidates.append(Candidate(seconds, default_length(shape)))
        lengths = [candidate.length for candidate in candidates]
        plain = lengths.index(1) if 1 in lengths else None
        return Speeds(candidates, plain, self.costs is not None)


def _of_one_head(trees: Sequence[BatchDrafter]) -> list[BatchDrafter]:
    """The trees, of which all share the state of the first one's head."""
    first = trees[0]
    if len(trees) == 1:
        return [first]
    heads = [tree.head if isinstance(tree, HeadDrafter) else tree for tree in trees]
    if any(head is not heads[0] for head in heads):
        raise ValueError("several trees to choose from must be of the same head")
    for tree in trees[1:]:
        assert isinstance(tree, HeadDrafter) and isinstance(first, HeadDrafter)
        tree.share(first.rows)
    return list(trees)


def candidate_trees(head: DraftHead, hint: TreePolicy | None, costs: RoundCosts) -> list[TreePolicy]:
    """The trees to choose from where none is named, the most promising first: one token, and dynamic trees.

    The size of `hint`, a tree that was fast on another machine, replaces the nearest. A head that
    estimates its acceptance rate also offers a chain that ends, or a round without drafts, where
    one token more is less likely to be accepted than the share of a plain step that it costs.
    """
    sizes = list(CANDIDATE_SIZES)
    if costs.seconds(LARGE_SIZE, 0) < LARGE_COST * costs.seconds(1, 0):
        sizes.append(LARGE_SIZE)
    if hint is not None and 2 <= hint.size <= LARGE_SIZE:
        nearest = min(sizes, key=lambda size: abs(math.log(size / hint.size)))
        sizes[sizes.index(nearest)] = hint.size

    trees: list[TreePolicy] = []
    for size in sizes:
        if size == 2:
            trees.append(TreeShape.chain(1))
        else:
            depth = min(head.max_depth, size.bit_length())  # twice as large, a level deeper
            trees.append(default_dynamic_tree(depth, size))
    if head.estimates_acceptance and head.max_depth > 1:
        longest = head.max_depth
        more_seconds = costs.seconds(longest + 1, longest) - costs.seconds(2, 1)
        seconds_per_token = more_seconds / (longest - 1)
        share = seconds_per_token / costs.seconds(1, 0)
        trees.append(EarlyExitShape(longest, min(max(share, 0.0), 1.0)))
    return _promising(trees, costs)


def candidate_chains(head: DraftHead, costs: RoundCosts) -> list[TreePolicy]:
    """The chains to choose from where no tree is named and trees do not pay, the most promising first."""
    lengths = sorted({min(length, head.max_depth) for length in CANDIDATE_LENGTHS})
    return _promising([TreeShape.chain(length) for length in lengths], costs)


def _promising(trees: Sequence[TreePolicy], costs: RoundCosts) -> list[TreePolicy]:
    """Those trees that pay where nearly all is accepted, or else the first one; by their expected speed."""
    lengths = {}
    for tree in trees:
        best_length = chain_length([BEST_RATE], tree.depth)
        if costs.rate(tree, best_length) * costs.plain > 1:
            lengths[tree] = default_length(tree)
    return by_speed(lengths, costs) or [trees[0]]
