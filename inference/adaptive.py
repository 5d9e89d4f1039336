"""Adaptive drafting: plain steps or one of several trees, round by round, by measured tokens per second.

A candidate's speed is what its rounds emit over what they take. The fastest leads. Now and then another one is looked
at, the cheapest first, for a round or two: a look that costs as much as L tokens of the leader is followed by
L / `LOOK_SHARE` tokens without one at it, and by twice as many after each further look in vain, up to `LONGEST_WAIT`.

Nothing but the clock and what was accepted before is looked at, so the output stays exact whatever is chosen.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Protocol

import torch
from torch import Tensor

from ..heads import TargetEnds
from .grow import StaticTree, drafter_of
from .guessing import Guesser, HeadDrafter, RootOnly
from .planning import chain_length, default_dynamic_tree, default_length
from .rounds import Drafter, Passage, Round, Start
from .stopping import StoppingChain
from .tree import DraftTree, DynamicShape, Origin, TreePolicy, tree_policy

LOOK_SHARE = 0.015
"""Of what is written may be lost to looks at others than the fastest."""
LONGEST_WAIT = 128
"""Tokens of a row up to which waits are doubled. Longer ones are for dear looks, once three rounds were timed."""
MEMORY = 16
"""Rounds over which accepted tokens are averaged, exponentially."""
TIMED_ROUNDS = 5
"""Latest rounds of a candidate whose median is its price. A slow one among them (the first, a pause, something
compiled, a head that catches up) does not count; a lasting change does after three."""
MARGIN = 0.04
"""By so much drafts must be faster than plain steps to be preferred: to change costs, and near a tie nothing is won."""
LEAST_GAIN = 0.01
"""Accepted tokens a round, below which no average falls: what is said of one tree is said of others in proportion."""
CANDIDATE_SIZES = (2, 4, 8, 16)
"""Nodes of the trees that are tried where no tree is asked for."""
LARGE_SIZE, LARGE_COST = 32, 2.0
"""One more, where its forward costs less than so many plain steps."""
BEST_RATE = 0.8
"""Acceptance rate at every depth, for which a tree must pay to be offered: a look at a hopeless one is a loss."""


class RoundCosts(Protocol):
    """What rounds cost on this machine, as it was measured before."""

    def seconds(self, nodes: int, depth: int) -> float:
        """Of a draft so deep and a forward of the target over so many tokens; (1, 0) is a plain step."""


@dataclass(frozen=True)
class AssumedCosts:
    """What rounds are taken to cost, in plain steps, until they were measured."""

    node: float
    """Of each token that a forward holds; nothing on an accelerator, which waits for its memory."""
    level: float = 1 / 8
    """Of each depth of a draft."""

    def seconds(self, nodes: int, depth: int) -> float:
        """See `RoundCosts`."""
        return 1 + self.node * (nodes - 1) + self.level * depth

    @classmethod
    def of(cls, device: torch.device) -> AssumedCosts:
        """By the kind of device."""
        return cls(1 / 16 if device.type == "cpu" else 0.0)


@dataclass
class Candidate:
    """What is known of plain steps, or of a tree."""

    cost: float
    """Seconds of a round as they were expected, to compare with those of others."""
    gain: float
    """Drafted tokens that a round accepts."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=TIMED_ROUNDS))
    """Of its latest rounds."""
    wait: float = 0.0
    """Tokens until it is looked at."""
    failed: int = 0
    """Looks in vain since it led."""


class Speeds:
    """The candidates at one number of rows: which one leads, and when another is looked at."""

    def __init__(self, candidates: list[Candidate], plain: int | None, measured: bool) -> None:
        """Begin.

        Args:
            candidates: in the order of their preference, where speeds are equal.
            plain: which one is plain steps; None if there are none.
            measured: whether their costs were measured here; else each is looked at first.
        """
        self.candidates, self.plain = candidates, plain
        self.rounds = 1
        """By which the gains are known, at most `MEMORY`."""
        self.leader = self._fastest(range(len(candidates)))
        self.look: int | None = None
        """Rounds of the look that is under way."""
        self.running = self.leader
        self.led = 0
        """Rounds since the leader took the lead."""
        self.lost = 0.0
        """Tokens by which drafts, since they were last taken up, are behind what would have been written without."""
        for number in range(len(candidates)) if measured else ():
            if number != self.leader:
                self._postpone(number)

    def elsewhere(self) -> Speeds:
        """The same as a first guess at another number of rows."""
        other = copy.deepcopy(self)
        for candidate in other.candidates:
            if candidate.seconds:
                candidate.seconds = deque([median_low(candidate.seconds)], TIMED_ROUNDS)
        other.running, other.look, other.lost = other.leader, None, 0.0
        return other

    def price(self, number: int) -> float:
        """Seconds of a candidate's round; before there was one, as expected beside one that is known."""
        seconds = self.candidates[number].seconds
        if seconds:
            return median_low(seconds)
        known = [other for other in self.candidates if other.seconds]
        if not known:
            return self.candidates[number].cost
        nearest = min(known, key=lambda other: abs(math.log(other.cost / self.candidates[number].cost)))
        return median_low(nearest.seconds) * self.candidates[number].cost / nearest.cost

    def speed(self, number: int) -> float:
        """Tokens a second and row."""
        return (1 + self.candidates[number].gain) / self.price(number)

    def choose(self) -> int:
        """The candidate of the next round."""
        if self.look is None and len(self.candidates[self.leader].seconds) != 1:
            self._lead(self._fastest(range(len(self.candidates))))
            if len(self.candidates[self.leader].seconds) > 1:
                due = [number for number in self._rivals() if self.candidates[number].wait <= 0]
                if due:
                    self.look, self.lost = 0, 0.0
                    self.running = min(due, key=self.price)
                    if self.leader == self.plain:  # the text has moved on since drafts were looked at
                        self.rounds = 1
        return self.running

    def enter(self, seconds: float, tokens: float) -> None:
        """A round of the chosen candidate, which emitted so many tokens a row."""
        ran = self.candidates[self.running]
        # A head catches up with plain rounds in its first one: that says no more than what a round takes at most.
        catches_up = self.look == 0 and self.leader == self.plain
        if not (catches_up and ran.seconds and seconds > self.price(self.running)):
            ran.seconds.append(max(seconds, 1e-9))  # a clock may stand still
        self.led += 1
        base = self.leader if self.look is not None else self.plain
        if base is not None and base != self.running and len(ran.seconds) > 1:  # the first may be slow
            self.lost = max(0.0, self.lost + min(seconds, 4 * self.price(self.running)) * self.speed(base) - tokens)
        if self.running != self.plain:
            self.rounds = min(self.rounds + 1, MEMORY)
            before, ran.gain = ran.gain, max(ran.gain + (tokens - 1 - ran.gain) / self.rounds, LEAST_GAIN)
            for number, other in enumerate(self.candidates):
                if number not in (self.running, self.plain):
                    other.gain *= math.sqrt(ran.gain / before)
        for other in self.candidates:
            other.wait -= tokens
        if self.look is not None:
            self.look += 1
            if self.look >= self._look_rounds(self.running):
                self.look = None
                if self._fastest((self.leader, self.running)) == self.leader:
                    self._postpone(self.running)
                    self.running = self.leader

    def _fastest(self, numbers: Sequence[int]) -> int:
        return max(numbers, key=lambda number: self.speed(number) * (1 + MARGIN if number == self.plain else 1))

    def _rivals(self) -> list[int]:
        """Whom a look may be at: where plain steps lead, the best tree alone speaks for all."""
        others = [number for number in range(len(self.candidates)) if number != self.leader]
        return [self._fastest(others)] if self.leader == self.plain and others else others

    def _look_rounds(self, number: int) -> int:
        """The first of two rounds with drafts may have to catch up with plain ones."""
        return 1 if number == self.plain and len(self.candidates[number].seconds) > 1 else 2

    def _lead(self, number: int) -> None:
        """The leader of the next round."""
        if number != self.leader:
            before, self.leader = self.leader, number
            if self.led > MEMORY:
                self.candidates[before].failed = 0
            self.led = 0
            self._postpone(before)
        self.running = number

    def _postpone(self, number: int) -> None:
        """Set how long a candidate is not looked at, by what a look at it costs beside the leader's rounds."""
        candidate = self.candidates[number]
        look = self.price(number) * self.speed(self.leader) - (1 + candidate.gain)
        wait = max(look * self._look_rounds(number), self.lost, 0.0) * len(self._rivals()) / LOOK_SHARE
        longest = max(wait, LONGEST_WAIT) if len(candidate.seconds) > 2 else LONGEST_WAIT
        candidate.wait = min(wait * 2**candidate.failed, longest)
        candidate.failed = min(candidate.failed + 1, 16)
        self.lost = 0.0
        if self.leader == self.plain:
            for other in self.candidates:
                if other is not self.candidates[self.leader]:
                    other.wait, other.failed = candidate.wait, candidate.failed


class AdaptiveDrafter:
    """Plain steps, or one of several trees that one drafter grows: whichever has been fastest.

    What was learned stays from one generation to the next. The time of a round is all of it: draft, forward, rule,
    host, and what the drafter learns, also of plain rounds, whose tokens a head is shown when it is asked again.

    Where drawn trees are sampled with, another tree would give a seed another text: nothing is chosen then, and the
    first tree is taken each round.
    """

    def __init__(
        self,
        trees: Sequence[Drafter],
        plain: bool = True,
        costs: RoundCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Put candidates together.

        Args:
            trees: one drafter of any kind, or several trees of one head.
            plain: whether plain steps are a candidate.
            costs: of rounds on this machine, for the first choices; None if they were not measured.
            clock: in seconds.

        Raises:
            ValueError: no tree, trees of different heads, or made in different ways, for which no one rule is exact.
        """
        if not trees:
            raise ValueError("adaptive drafting needs a drafter")
        heads = {id(tree.head) if isinstance(tree, HeadDrafter) else id(tree) for tree in trees}
        if len(heads) > 1:
            raise ValueError("several trees to choose from must be of the same head")
        if len({tree.origin for tree in trees}) > 1:
            raise ValueError("trees that are picked and trees that are drawn have different rules: choose among either")
        self.trees, self.plain, self.costs, self.clock = list(trees), plain, costs, clock
        self.feature_layers: tuple[int, ...] = trees[0].feature_layers
        self.origin: Origin = trees[0].origin
        self.max_nodes = max(tree.max_nodes for tree in trees)
        heads_trees = self._heads_trees()
        for tree in heads_trees:  # they share one state
            tree.room = (max(each.room[0] for each in heads_trees), max(each.room[1] for each in heads_trees))
        self.speeds: dict[int, Speeds] = {}
        """By the number of rows."""
        self._began: float | None = None

    def __copy__(self) -> AdaptiveDrafter:
        """One for other rows, with the same knowledge."""
        other = AdaptiveDrafter([copy.copy(tree) for tree in self.trees], self.plain, self.costs, self.clock)
        other.speeds = self.speeds
        return other

    def begin(self, start: Start) -> None:
        """A new stream."""
        self._began = None
        self._chooses = self.origin == "picked" or start.draft_probs is None
        for tree in self.trees:
            tree.begin(start)
        for tree in self._heads_trees():
            tree.shared = self._heads_trees()[0].shared

    def read(self, passage: Passage) -> None:
        """The prompts, once for all."""
        self.trees[0].read(passage)

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Choose, and draft."""
        if not self._chooses:
            return self.trees[0].propose(roots_B)
        self._rows = self._speeds(roots_B)
        self._began = self.clock()
        chosen = self._rows.choose()
        self._drafted = chosen != self._rows.plain
        drafter = self.trees[chosen - self.plain] if self._drafted else RootOnly()
        return drafter.propose(roots_B)

    def observe(self, finished: Round) -> None:
        """Hand on, once for all, and enter the round; of a plain one without what drafts take to follow the text."""
        now = self.clock()
        self.trees[0].observe(finished)
        if self._began is None:  # nothing was chosen, or somebody else decided not to draft
            return
        seconds = (self.clock() if self._drafted else now) - self._began
        lengths = finished.verdict.lengths_B.tolist()  # sync: the loop has just waited for them
        self._rows.enter(seconds, sum(lengths) / len(lengths))
        self._began = None

    def compile(self) -> None:
        """All trees."""
        for tree in self.trees:
            tree.compile()

    def select(self, rows_R: Tensor) -> None:
        """These rows only."""
        self.trees[0].select(rows_R)

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Take over rows of another one."""
        assert isinstance(other, AdaptiveDrafter)
        self.trees[0].replace(rows_R, other.trees[0])

    def _heads_trees(self) -> list[HeadDrafter]:
        return [tree for tree in self.trees if isinstance(tree, HeadDrafter)]

    def _speeds(self, roots_B: Tensor) -> Speeds:
        """What is known at a number of rows; at a new one, as at the nearest that is known."""
        rows = len(roots_B)
        if rows not in self.speeds and self.speeds:
            nearest = min(self.speeds, key=lambda other: abs(math.log(other / rows)))
            self.speeds[rows] = self.speeds[nearest].elsewhere()
        elif rows not in self.speeds:
            costs = self.costs or AssumedCosts.of(roots_B.device)
            candidates = [Candidate(costs.seconds(1, 0), 0.0)] if self.plain else []
            for tree in self.trees:
                gain = max(default_length(_policy(tree)) - 1, LEAST_GAIN)
                candidates.append(Candidate(costs.seconds(tree.max_nodes, getattr(tree, "depth", 0)), gain))
            self.speeds[rows] = Speeds(candidates, 0 if self.plain else None, self.costs is not None)
        return self.speeds[rows]


def _policy(drafter: Drafter) -> TreePolicy:
    """What tree a drafter grows, or one of its size."""
    if isinstance(drafter, StaticTree | StoppingChain):
        return drafter.shape
    return DynamicShape(max(drafter.max_nodes, 2), max(getattr(drafter, "depth", drafter.max_nodes - 1), 1))


def candidate_trees(head: Guesser, hint: TreePolicy | None, costs: RoundCosts) -> list[TreePolicy]:
    """The trees to choose from where none is asked for, the most promising first: dynamic ones of a few sizes.

    Args:
        head: whose trees.
        hint: a tree that was good somewhere, of which the size is taken in place of the nearest.
        costs: of rounds on this machine.
    """
    sizes = [*CANDIDATE_SIZES]
    if costs.seconds(LARGE_SIZE, 0) < LARGE_COST * costs.seconds(1, 0):
        sizes.append(LARGE_SIZE)
    if hint is not None and 2 <= hint.size <= LARGE_SIZE:
        nearest = min(sizes, key=lambda size: abs(math.log(size / hint.size)))
        sizes[sizes.index(nearest)] = hint.size

    def worth(tree: DynamicShape) -> float:
        return default_length(tree) / costs.seconds(tree.size, tree.depth)

    def can_pay(tree: DynamicShape) -> bool:
        return chain_length([BEST_RATE], tree.depth) * costs.seconds(1, 0) > costs.seconds(tree.size, tree.depth)

    # twice as large, a level deeper
    trees = [default_dynamic_tree(min(head.max_depth, size.bit_length(), size - 1), size) for size in sizes]
    paying: list[TreePolicy] = [*sorted(filter(can_pay, trees), key=worth, reverse=True)]
    return paying or [trees[0]]


def chosen_from(
    guesser: Guesser, tree: str | Sequence[Sequence[int]] | TreePolicy, ends: TargetEnds, budget: int | None = None
) -> HeadDrafter | AdaptiveDrafter:
    """A guesser with a tree, or with several of which each round takes one.

    Args:
        guesser: a head, or what is asked like one.
        tree: what `tree_policy` takes, or several such words with | between them.
        ends: see `drafter_of`.
        budget: see `drafter_of`.

    Raises:
        ValueError: no tree, or trees that do not go together.
    """
    if isinstance(tree, str) and "|" in tree:
        trees = [drafter_of(guesser, tree_policy(word), ends, budget) for word in tree.split("|")]
        return AdaptiveDrafter(trees, plain=False)
    return drafter_of(guesser, tree_policy(tree), ends, budget)


def adaptive(drafter: Drafter) -> AdaptiveDrafter:
    """A drafter, or each of the trees that one chooses from, with plain steps as another candidate."""
    if isinstance(drafter, AdaptiveDrafter):
        return drafter if drafter.plain else AdaptiveDrafter(drafter.trees, True, drafter.costs, drafter.clock)
    return AdaptiveDrafter([drafter])
