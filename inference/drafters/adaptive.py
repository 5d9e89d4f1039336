"""Adaptive speculation: autoregressive steps, or one of several trees, step by step, by measured tokens per second.

A candidate's speed is the tokens that its steps emit over the time that they take; the fastest that was timed leads.
Others are probed for a few steps: `PROBE_SHARE` of the tokens that are generated goes into a budget, and what probes
lose is paid from it. So the loss is bounded however slow a candidate is, and cheap probes are frequent.

The choice depends on the clock and on past acceptance alone, so the output stays exact whatever is chosen.
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

from torch import Tensor

from ...heads.base import DraftHead
from ..engines.base import Engine
from ..tree import DraftTree
from ..tuning.round_costs import RoundCosts
from ..tuning.tree_search import by_speed, chain_length, default_dynamic_tree, default_length
from ..tuning.tree_spec import DynamicShape, EarlyExitShape, TreePolicy, TreeShape
from .base import DraftContext, Drafter, NoDraft, PrefillChunk, StepResult
from .tree_policies import HeadDrafter

PROBE_SHARE = 0.01
"""Share of the generated tokens that probes may cost."""
PROBE_STEPS = 4
"""Steps of a probe. The first are slow: a head reads what it has missed, and its weights are not in the cache."""
AVERAGED_STEPS = 48
"""Steps over which tokens per step are averaged, exponentially: over fewer, chance decides."""
PRIOR_STEPS = 4
"""As many steps counts what a head's tree is expected to emit: the first ones of a text do not decide alone."""
LEAST_LENGTH = 1.05
"""Tokens per step that a tree is taken to emit even where all its drafts were rejected: it may recover."""
TIMED_STEPS = 7
"""A candidate's latest steps, whose median is its cost: a few slow ones do not count, a probe of them does."""
MARGIN = 0.02
"""Speedup that drafts must have over autoregressive steps: near a tie nothing is gained by a change."""
CANDIDATE_SIZES = (2, 4, 8, 16)
"""Nodes of the trees that are tried where no tree is named."""
LARGE_SIZE, LARGE_COST = 32, 2.0
"""One more, where its forward costs less than `LARGE_COST` autoregressive steps."""
BEST_RATE = 0.8
"""Acceptance rate at every depth at which a tree must pay to be a candidate: to probe a hopeless one is a loss."""


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
        """Begin with candidates, of which `plain` is autoregressive steps; where speeds are equal, the first one leads.

        Where their costs were not `measured`, nothing is known: the first probe need not be saved for, and the first
        steps tell more than what was expected.
        """
        self.candidates, self.plain = candidates, plain
        for candidate in candidates:
            candidate.steps = PRIOR_STEPS if measured else 1
        self.running = self.leader = max(range(len(candidates)), key=self.speed)
        self.probe = 0
        """Steps that are left of the current probe."""
        self.probe_tokens = self.probe_seconds = 0.0
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
        other.running, other.probe, other.deficit = other.leader, 0, 0.0
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
        return self.candidates[number].length * (1 + MARGIN if number == self.plain else 1) / self.cost(number)

    def choose(self) -> int:
        """The candidate of the next step."""
        if self.probe:
            return self.running
        timed = [number for number, each in enumerate(self.candidates) if len(each.seconds) >= PROBE_STEPS]
        before, self.leader = self.leader, max({*timed, self.leader}, key=self.speed)
        if self.leader == self.plain != before:
            self.budget -= max(self.deficit, 0.0)
        if self.leader != before:
            self.deficit = 0.0
        self.running = self.leader
        other = self._to_probe()
        if other is not None:
            self.running, self.probe, self.probe_tokens, self.probe_seconds = other, PROBE_STEPS, 0.0, 0.0
            if self.leader == self.plain:  # the text has moved on since drafts were probed
                self.candidates[other].steps = 1
        return self.running

    def record(self, seconds: float, tokens: float) -> None:
        """Enter a step of the chosen candidate, which emitted `tokens` per row."""
        ran = self.candidates[self.running]
        ran.seconds.append(max(seconds, 1e-9))  # a clock may stand still
        self.budget += PROBE_SHARE * tokens
        for each in self.candidates:
            each.idle += tokens
        ran.idle = 0.0
        if self.running != self.plain:
            ran.steps = min(ran.steps + 1, AVERAGED_STEPS)
            before = max(ran.length, LEAST_LENGTH)
            ran.length = max(before + (tokens - before) / ran.steps, LEAST_LENGTH)
            change = math.sqrt((ran.length - 1) / (before - 1))
            for number, other in enumerate(self.candidates):  # what one tree shows holds by half for the others
                if number not in (self.running, self.plain):
                    other.length = max(1 + (other.length - 1) * change, LEAST_LENGTH)
        if self.probe:
            self.probe, self.probe_tokens = self.probe - 1, self.probe_tokens + tokens
            self.probe_seconds += seconds
            if not self.probe:
                first = len(ran.seconds) == PROBE_STEPS  # work that is done once in a process is not the probe's
                spent = PROBE_STEPS * self.cost(self.running) if first else self.probe_seconds
                self.budget -= max(spent * self.speed(self.leader) - self.probe_tokens, 0.0)
        elif self.plain is not None and self.running != self.plain:
            self.deficit += self.cost(self.running) / self.cost(self.plain) - tokens

    def _to_probe(self) -> int | None:
        """The next candidate to probe, if what it may lose is saved: the best of those that may be faster.

        Else the one that was idle for longest. Each has its own share of what is saved, so that one that is dear to
        probe does not hold up the others. Where autoregressive steps lead, only the best tree is probed.
        """
        others = [number for number in range(len(self.candidates)) if number != self.leader]
        if not others or len(self.candidates[self.leader].seconds) < PROBE_STEPS:
            return None
        saved, best = max(self.budget, 0.0), max(others, key=self.speed)
        if self.leader == self.plain or self.speed(best) > self.speed(self.leader):
            return best if self._lost(best) <= saved else None
        idle = {other: self.candidates[other].idle for other in others}
        paid = [other for other in others if self._lost(other) <= min(saved, PROBE_SHARE * idle[other] / len(others))]
        return max(paid, key=lambda other: idle[other], default=None)

    def _lost(self, number: int) -> float:
        """Tokens that a probe is expected to lose."""
        return PROBE_STEPS * (self.cost(number) * self.speed(self.leader) - self.candidates[number].length)


class AdaptiveDrafter(Drafter):
    """Autoregressive steps, or one of several trees of one head: whichever has been fastest.

    Measurements are kept from one generation to the next. A step's time is all of it: draft, forward, verification,
    host, and what the drafter reads. Prompts, and tokens of autoregressive steps, are read by a head when it drafts
    again, or when other rows join the batch.

    With sampled trees and sampling, another tree would give another text for the same seed: then there is no choice,
    and each step takes the first tree.
    """

    def __init__(
        self,
        trees: Sequence[Drafter],
        plain: bool = True,
        costs: RoundCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Wrap one drafter of any kind, or several trees of one head; `plain` adds autoregressive steps.

        `costs` of steps on this machine serve for the first choices; None if they were not measured.
        """
        if not trees:
            raise ValueError("adaptive drafting needs a drafter")
        if len({id(tree.head) if isinstance(tree, HeadDrafter) else id(tree) for tree in trees}) > 1:
            raise ValueError("several trees to choose from must be of the same head")
        if len({tree.kind for tree in trees}) > 1:
            raise ValueError("top-k trees and sampled trees have different rules: choose among either")
        super().__init__(trees[0])
        self.trees, self.plain, self.costs, self.clock = list(trees), plain, costs, clock
        self.max_nodes = max(tree.max_nodes for tree in trees)
        heads = [tree for tree in trees if isinstance(tree, HeadDrafter)]
        for tree in heads:  # they share one state
            tree.room = (max(each.room[0] for each in heads), max(each.room[1] for each in heads))
        self.speeds: dict[tuple[bool, int], Speeds] = {}
        """By whether texts are sampled, where other drafts are accepted, and by the rows decoded together."""
        self._sampling = False
        self._started: float | None = None

    def __repr__(self) -> str:
        choices = [*(["plain steps"] if self.plain else []), *map(repr, self.trees)]
        return f"AdaptiveDrafter({' | '.join(choices)})"

    def fresh(self) -> Self:
        other = copy.copy(self)
        other.trees = [tree.fresh() for tree in self.trees]
        other.parts = (other.trees[0],)
        return other

    def begin(self, context: DraftContext) -> None:
        self._started, self._sampling = None, context.draft_probs is not None
        self._chooses = self.kind == "top_k" or context.draft_probs is None
        for tree in self.trees:
            tree.begin(context)
        self._share_state()

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        self.begin(context)
        self.trees[0].resume(context, kept, None if state is None else state[0], whole)
        self._share_state()

    def propose(self, roots_B: Tensor) -> DraftTree:
        if not self._chooses:
            return self.trees[0].propose(roots_B)
        self._rows = self._speeds(roots_B)
        self._started = self.clock()
        chosen = self._rows.choose()
        self._drafted = chosen != self._rows.plain
        drafter = NoDraft("slower") if self.plain and chosen == 0 else self.trees[chosen - self.plain]
        return drafter.propose(roots_B)

    def observe(self, step: StepResult) -> None:
        now = self.clock()
        self.trees[0].observe(step)
        if self._started is None:  # nothing was chosen, or another drafter decided not to draft
            return
        # An autoregressive step does not pay for what drafts take to follow the text.
        seconds = (self.clock() if self._drafted else now) - self._started
        self._rows.record(seconds, sum(map(len, step.tokens)) / len(step.tokens))
        self._started = None

    def use(self, engine: Engine) -> None:
        for tree in self.trees:
            tree.use(engine)

    def renew(self, force: bool = False) -> None:
        for tree in self.trees:
            tree.renew(force)

    def _share_state(self) -> None:
        """Give all trees of a head the state of the first."""
        heads = [tree for tree in self.trees if isinstance(tree, HeadDrafter)]
        for tree in heads:
            tree.shared = heads[0].shared
            tree.shared.lazy = self.plain and self._chooses

    def _speeds(self, roots_B: Tensor) -> Speeds:
        """The candidates at this number of rows; at a new one, as at the nearest that is known."""
        rows = len(roots_B)
        here = (self._sampling, rows)
        if here not in self.speeds and self.speeds:
            nearest = min(self.speeds, key=lambda other: (other[0] != here[0], abs(math.log(other[1] / rows))))
            self.speeds[here] = self.speeds[nearest].elsewhere()
        elif here not in self.speeds:
            costs = self.costs or RoundCosts.assumed(roots_B.device)
            candidates = [Candidate(costs.seconds(1, 0), 1.0)] if self.plain else []
            for tree in self.trees:
                cost = costs.seconds(tree.max_nodes, getattr(tree, "depth", 0))
                unknown = DynamicShape(max(tree.max_nodes, 2), max(tree.max_nodes - 1, 1))
                shape = tree.shape if isinstance(tree, HeadDrafter) else unknown
                candidates.append(Candidate(cost, default_length(shape)))
            plain = next((number for number, each in enumerate(candidates) if each.length == 1), None)
            self.speeds[here] = Speeds(candidates, plain, self.costs is not None)
        return self.speeds[here]


def candidate_trees(head: DraftHead, hint: TreePolicy | None, costs: RoundCosts) -> list[TreePolicy]:
    """The trees to choose from where none is named, the most promising first: one token, and dynamic trees.

    The size of `hint`, a tree that was fast on another machine, replaces the nearest. A head that estimates its
    acceptance rate also offers a chain that ends, or a round without drafts, where one token more is less likely to be
    accepted than the share of a plain step that it costs.
    """
    sizes = [*CANDIDATE_SIZES]
    if costs.seconds(LARGE_SIZE, 0) < LARGE_COST * costs.seconds(1, 0):
        sizes.append(LARGE_SIZE)
    if hint is not None and 2 <= hint.size <= LARGE_SIZE:
        nearest = min(sizes, key=lambda size: abs(math.log(size / hint.size)))
        sizes[sizes.index(nearest)] = hint.size

    # twice as large, a level deeper
    trees: list[TreePolicy] = [
        TreeShape.chain(1) if size == 2 else default_dynamic_tree(min(head.max_depth, size.bit_length()), size)
        for size in sizes
    ]
    if head.estimates_acceptance and head.max_depth > 1:
        longest = head.max_depth
        share = (costs.seconds(longest + 1, longest) - costs.seconds(2, 1)) / (longest - 1) / costs.seconds(1, 0)
        trees.append(EarlyExitShape(longest, min(max(share, 0.0), 1.0)))
    lengths = {
        tree: default_length(tree)
        for tree in trees
        if costs.rate(tree, chain_length([BEST_RATE], tree.depth)) * costs.plain > 1
    }
    return by_speed(lengths, costs) or [trees[0]]
