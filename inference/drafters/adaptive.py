"""Adaptive speculation: autoregressive steps or one of several trees, by measured speed.

The choice is made step by step. Speed is measured in tokens per second.

A candidate's speed is the tokens that its steps emit over the time that they take; the fastest
that was timed leads. Others are probed for a few steps: `PROBE_SHARE` of the tokens that are
generated goes into a budget, and what probes lose is paid from it. So the loss is bounded however
slow a candidate is, and cheap probes are frequent.

Before a head drafts it must read the text so far. Where it has not, drafts lead only if they are
expected to save more on the tokens to come than the reading takes; and a probe pays for it.

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
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ...heads.base import DraftHead
from ..trees.tree import DraftTree
from ..trees.tree_spec import DynamicShape, EarlyExitShape, TreePolicy, TreeShape
from ..tuning.round_costs import RoundCosts
from ..tuning.tree_search import by_speed, chain_length, default_dynamic_tree, default_length
from .answer_lengths import AnswerLengths
from .base import (
    BatchDrafter,
    DraftContext,
    NoDraft,
    PrefillChunk,
    replaced_rows,
    selected_places,
    selected_rows,
)
from .round import Round
from .tree_policies import HeadDrafter

PROBE_SHARE = 0.01
"""Share of the generated tokens that probes may cost."""
PROBE_STEPS = 4
"""Steps of a probe. The first are slow: a head reads what it has missed, and its weights are not in
the cache."""
TIMED_READING = 16
"""Tokens that a head reads at once at least, where that is timed."""
PRIOR_STEPS = 4
"""Steps as which an expected length counts, so that the first of a text do not decide alone."""
AVERAGED_STEPS = 48
"""Steps over which tokens per step are averaged, exponentially: over fewer, chance decides."""
LEAST_LENGTH = 1.05
"""Least tokens per step that a tree is taken to emit: even one whose drafts were all rejected may
recover."""
TIMED_STEPS = 7
"""A candidate's latest steps, whose median is its cost: a few slow ones do not count, a whole probe
does."""
MARGIN = 0.02
"""Speedup over autoregressive steps that drafts must have: near a tie a change gains nothing."""
CANDIDATE_SIZES = (2, 4, 8, 16)
"""Nodes of the trees that are tried where no tree is named."""
CANDIDATE_LENGTHS = (1, 2, 3, 5, 7)
"""Tokens of the chains that are tried where trees do not pay."""
LARGE_SIZES = (32, 60)
"""Nodes of more of them, where their forward costs less than `LARGE_COST` autoregressive steps."""
LARGE_COST = 2.0
BEST_RATE = 0.8
"""Acceptance rate at every depth at which a candidate must pay: probing a hopeless one is a
loss."""


class Expected(NamedTuple):
    """A candidate's tokens per step, as far as they are known for prompts of one size."""

    length: float
    steps: int
    """Steps that it is known from, at most `AVERAGED_STEPS`."""


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
        """Begin with candidates, where index `plain` is that of autoregressive steps.

        `plain` is None if there are no such steps. Among equals the first candidate leads.

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
        self.reading = 0.0
        """Seconds that a tree would take now, before its first step, for what its head has not
        read."""
        self.remaining = math.inf
        """Tokens that are expected to come in each row."""
        self.compared = self.leader
        """The candidate that would run in place of the current probe."""
        self.size: int | None = None
        """Size of the prompts, see `prompt_size`, on which the lengths depend; None before the
        first."""
        self.lengths: dict[int | None, list[Expected]] = {}
        """Lengths for prompts of other sizes."""
        self.expected = [Expected(candidate.length, candidate.steps) for candidate in candidates]
        """Lengths for prompts of sizes that were not tried."""

    def turn_to(self, size: int) -> None:
        """Go on with prompts of another size."""
        lengths = self.lengths.pop(size, self.expected)
        self.lengths[self.size] = [
            Expected(candidate.length, candidate.steps) for candidate in self.candidates
        ]
        for number, (candidate, expected) in enumerate(zip(self.candidates, lengths, strict=True)):
            if number != self.plain:
                candidate.length = max(expected.length, LEAST_LENGTH)
                candidate.steps = expected.steps
        self.size = size
        self.probe = 0
        if not any(candidate.seconds for candidate in self.candidates):
            self.leader = max(range(len(self.candidates)), key=self.speed)

    def elsewhere(self, same_texts: bool) -> Speeds:
        """Return a first estimate for other row counts, or for sampled instead of greedy texts."""
        other = copy.deepcopy(self)
        if not same_texts:
            other.lengths = {}
        for number, candidate in enumerate(other.candidates):
            if candidate.seconds:
                candidate.seconds = deque([self.cost(number)] * PROBE_STEPS, TIMED_STEPS)
        other.running = other.leader
        other.probe = 0
        other.deficit = 0.0
        return other

    def cost(self, number: int) -> float:
        """Return the seconds of a candidate's step.

        Before its first step this is an expectation, scaled by a candidate that was timed.
        """
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

    def choose(self, reading: float = 0.0, remaining: float = math.inf) -> int:
        """The candidate of the next step.

        Args:
            reading: seconds that any tree would take before its first step, for what its head has
                not read.
            remaining: tokens that are expected to come in each row.
        """
        self.reading = reading
        self.remaining = remaining
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
        if self.plain is not None and not self._earns_reading():
            self.running = self.plain
        other = self._to_probe()
        if other is not None:
            self.compared = self.running
            self.running = other
            self.probe = PROBE_STEPS
            self.probe_tokens = 0.0
            self.probe_seconds = 0.0
            if self.compared == self.plain:  # the text has moved on since drafts were probed
                self.candidates[other].steps = 1
        return self.running

    def _earns_reading(self) -> bool:
        """Whether the leader saves more time on the tokens to come than its reading takes.

        Its head must first read what it has not read yet.
        """
        if self.leader == self.plain or self.reading == 0:
            return True
        assert self.plain is not None
        saved_by_token = 1 / self.speed(self.plain) - 1 / self.speed(self.leader)
        return self.remaining * saved_by_token > self.reading

    def record(self, seconds: float, tokens: float, reading: float = 0.0) -> None:
        """Enter a step of the chosen candidate, which emitted `tokens` per row.

        `reading` are the seconds besides that its head took before to read what it had not read.
        """
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
            self.budget -= reading * self.speed(self.compared)
            if self.probe == 0:
                spent = self.probe_seconds
                if len(ran.seconds) == PROBE_STEPS:
                    # Its first: work that is done once in a process does not count.
                    spent = PROBE_STEPS * self.cost(self.running)
                self.budget -= max(spent * self.speed(self.compared) - self.probe_tokens, 0.0)
        elif self.plain is not None and self.running != self.plain:
            self.deficit += (self.cost(self.running) + reading) / self.cost(self.plain) - tokens

    def _to_probe(self) -> int | None:
        """The next candidate to probe, if what it may lose is saved.

        That is the best of those that may be faster, or else the one that was idle for longest.
        Each has its own share of what is saved, so that one that is expensive to probe does not
        hold up the others. Where autoregressive steps run, only the best tree is probed.
        """
        others = [number for number in range(len(self.candidates)) if number != self.running]
        if not others or len(self.candidates[self.running].seconds) < PROBE_STEPS:
            return None
        # not even drafts that cost nothing would earn it
        if self.reading * self.speed(self.running) > self.remaining:
            return None
        saved = max(self.budget, 0.0)
        best = max(others, key=self.speed)
        if self.running == self.plain or self.speed(best) > self.speed(self.running):
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
        """Tokens that a probe is expected to lose to the candidate that would run."""
        speed = self.speed(self.running)
        lost = PROBE_STEPS * (self.cost(number) * speed - self.candidates[number].length)
        return lost if number == self.plain else lost + self.reading * speed


class AdaptiveDrafter(BatchDrafter):
    """Autoregressive steps, or one of several trees of one head: whichever has been fastest.

    Measurements are kept from one generation to the next: times of steps for each number of rows,
    tokens per step for each size of prompts too. A step's time is all of it: draft, forward,
    verification, host, and what the drafter reads of the step. Prompts, and tokens of
    autoregressive steps, are read by a head when it drafts again, which is weighed, or when other
    rows join the batch, which is not.

    When sampling from sampled trees, it always uses the first tree, so that a seed fixes the text.
    """

    def __init__(
        self,
        trees: Sequence[BatchDrafter],
        plain: bool = True,
        costs: RoundCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Wrap one drafter of any kind, or several trees of one head.

        `plain` adds autoregressive steps.

        `costs` of steps on this machine serve for the first choices, None if they were not
        measured.
        """
        if not trees:
            raise ValueError("adaptive drafting needs a drafter")
        if len({tree.kind for tree in trees}) > 1:
            raise ValueError(
                "top-k trees and sampled trees have different rules: choose among either"
            )
        self.trees = _of_one_head(trees)
        self.reader = self.trees[0]
        """The tree that reads the text; the others share its head's state."""
        self.parts = self.trees
        self.plain = plain
        self.costs = costs
        self.clock = clock
        self.feature_layers = self.reader.feature_layers
        self.reads_best_tokens = self.reader.reads_best_tokens
        self.kind = self.reader.kind
        self.max_nodes = max(tree.max_nodes for tree in trees)
        if plain and isinstance(self.reader, HeadDrafter):
            self.reader.rows.read_when_needed()
        self.speeds: dict[tuple[bool, int], Speeds] = {}
        """By whether texts are sampled, where other drafts are accepted, and by the rows decoded
        together."""
        self.answers = AnswerLengths()
        self._sampling = False
        self._size = 0
        """Size of the longest prompt, see `prompt_size`."""
        self._limit = math.inf
        """Tokens that each row may get in steps."""
        self._written: list[int] = []
        """Tokens that each row has got in steps."""
        self._idle: set[int] = set()
        """Places of rows that have ended and got no token in the latest step."""
        self._read_seconds: float | None = None
        """What the head took to read a token of a prompt, the last time that was timed."""
        self._reading = 0.0
        """Seconds of that in the current step."""
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
        other._written = []
        other._idle = set()
        other._running = None
        return other

    def begin(self, context: DraftContext) -> None:
        self._begin(context)
        self.reader.begin(context)

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        self._begin(context)
        self.reader.resume(context, kept, state, whole)

    def _begin(self, context: DraftContext) -> None:
        self._running = None
        self._answers_ended(self._written)
        # one came with the prompt
        self._limit = math.inf if context.new_tokens is None else context.new_tokens - 1
        self._written = [0] * context.batch_size
        self._idle = set()
        self._size = prompt_size(context.prompt_tokens)
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
        batch = len(roots_B)
        speeds = self._speeds(batch, roots_B.device)
        self._running = speeds
        self._reading = 0.0
        self._started = self.clock()
        rows = self.reader.rows if self.plain and isinstance(self.reader, HeadDrafter) else None
        unread = 0 if rows is None else batch * rows.unread
        if unread == 0:
            chosen = speeds.choose()
        else:
            seconds = unread * self._seconds_to_read(speeds, roots_B.device)
            chosen = speeds.choose(seconds, self._remaining())
        self._drafted = chosen != speeds.plain
        if self.plain and chosen == 0:
            return NoDraft("slower").propose(roots_B)
        tree = self.trees[chosen - self.plain]
        # An accelerator would have to be waited for: there, reading is part of the step.
        if unread >= batch * TIMED_READING and roots_B.device.type == "cpu":
            self._read(tree, unread, batch)
        return tree.propose(roots_B)

    def _read(self, tree: BatchDrafter, unread: int, batch: int) -> None:
        """Let the head read so many tokens for a tree, and time it."""
        assert isinstance(tree, HeadDrafter)
        if tree.budget is not None and tree.budget // batch < 2:  # it shrinks to its root
            return
        tree.rows.catch_up()
        now = self.clock()
        self._reading = now - self._started
        self._read_seconds = self._reading / unread
        self._started = now

    def _seconds_to_read(self, speeds: Speeds, device: torch.device) -> float:
        """Expected seconds in which the head reads a token of a prompt."""
        if self._read_seconds is not None:
            return self._read_seconds
        costs = self.costs or RoundCosts.assumed(device)
        assert speeds.plain is not None
        return costs.reading / costs.seconds(1, 0) * speeds.cost(speeds.plain)

    def _remaining(self) -> float:
        """Tokens that are expected to come in each row."""
        written = [count for row, count in enumerate(self._written) if row not in self._idle]
        mean = sum(written) / len(written)
        return self.answers.expected(max(self._limit - mean, 0.0))

    def _answers_ended(self, lengths: Sequence[int]) -> None:
        """Note the lengths of answers that are decoded no more."""
        for length in lengths:
            self.answers.add(length, self._limit)

    def observe_ahead(self, finished: Round) -> None:
        self.reader.observe_ahead(finished)

    def take_back(self) -> None:
        self.reader.take_back()

    def observe(self, finished: Round) -> None:
        now = self.clock()
        self.reader.observe(finished)
        emitted = [len(tokens) for tokens in finished.tokens]
        self._written = [
            before + count for before, count in zip(self._written, emitted, strict=True)
        ]
        self._idle = finished.idle
        if self._running is None:  # nothing was chosen, or another drafter decided not to draft
            return
        if self._drafted:  # autoregressive steps do not pay for a head that follows the text
            now = self.clock()
        decoded = len(emitted) - len(self._idle)
        self._running.record(now - self._started, sum(emitted) / decoded, self._reading)
        self._running = None

    def select(self, rows_R: Tensor) -> None:
        rows = rows_R.tolist()  # sync: when rows have ended
        self._answers_ended([length for row, length in enumerate(self._written) if row not in rows])
        self._written = selected_rows(self._written, rows_R)
        self._idle = selected_places(self._idle, rows)
        self.reader.select(rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self._answers_ended(selected_rows(self._written, rows_R))
        self._written = replaced_rows(self._written, rows_R, other._written)
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
                same_texts = nearest[0] == self._sampling
                self.speeds[here] = self.speeds[nearest].elsewhere(same_texts)
            else:
                self.speeds[here] = self._expected_speeds(device)
        speeds = self.speeds[here]
        if speeds.size != self._size:
            speeds.turn_to(self._size)
        return speeds

    def _expected_speeds(self, device: torch.device) -> Speeds:
        """The candidates before any step was timed."""
        costs = self.costs or RoundCosts.assumed(device)
        candidates = []
        if self.plain:
            candidates.append(Candidate(costs.seconds(1, 0), 1.0))
        for tree in self.trees:
            depth = tree.depth if isinstance(tree, HeadDrafter) else 0
            seconds = costs.seconds(tree.max_nodes, depth)
            candidates.append(Candidate(seconds, default_length(_shape(tree))))
        lengths = [candidate.length for candidate in candidates]
        plain = lengths.index(1) if 1 in lengths else None
        return Speeds(candidates, plain, self.costs is not None)


def prompt_size(tokens: int) -> int:
    """The size n of a prompt with fewer than 4^n tokens, and no fewer than a quarter of that."""
    return (tokens.bit_length() + 1) // 2


def _shape(tree: BatchDrafter) -> TreePolicy:
    """The shape of a drafter's trees, or one as large."""
    if isinstance(tree, HeadDrafter):
        return tree.shape
    return DynamicShape(max(tree.max_nodes, 2), max(tree.max_nodes - 1, 1))


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


def candidate_trees(
    head: DraftHead, hint: TreePolicy | None, costs: RoundCosts
) -> list[TreePolicy]:
    """Return the trees to choose from where none is named, the most promising first.

    They are a chain of one token, and dynamic trees.

    The size of `hint`, a tree that was fast on another machine, replaces the nearest. A head that
    estimates its acceptance rate also offers a chain that ends, or a round without drafts, where
    one token more is less likely to be accepted than the share of a plain step that it costs.
    """
    sizes = list(CANDIDATE_SIZES)
    for size in LARGE_SIZES:
        if costs.seconds(size, 0) < LARGE_COST * costs.seconds(1, 0):
            sizes.append(size)
    if hint is not None and 2 <= hint.size <= LARGE_SIZES[-1]:
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
    """Return the chains to choose from where trees do not pay, the most promising first.

    They are used where no tree is named.
    """
    lengths = sorted({min(length, head.max_depth) for length in CANDIDATE_LENGTHS})
    return _promising([TreeShape.chain(length) for length in lengths], costs)


def _promising(trees: Sequence[TreePolicy], costs: RoundCosts) -> list[TreePolicy]:
    """Return the trees that pay where nearly all is accepted, or else the first one.

    The one with the highest expected speed comes first.
    """
    lengths = {}
    for tree in trees:
        best_length = chain_length([BEST_RATE], tree.depth)
        if costs.rate(tree, best_length) * costs.plain > 1:
            lengths[tree] = default_length(tree)
    return by_speed(lengths, costs) or [trees[0]]
