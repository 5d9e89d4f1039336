"""Adaptive drafting: plain steps or one of several trees, round by round, by measured tokens per second.

A candidate's speed is what its rounds emit over what they take, and the fastest that was timed leads. Others are looked
at for a few rounds: of each token that is written `LOOK_SHARE` is put by, and what looks lose is paid from it. So the
loss is bounded however dear a look is, and cheap looks are frequent.

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
from typing import Any, Protocol

import torch
from torch import Tensor

from ...heads import TargetModules
from ..tree import DraftTree
from ..tuning.tree_search import chain_length, default_dynamic_tree, default_length
from ..tuning.tree_spec import DynamicShape, TreeKind, TreePolicy, TreeShape, tree_policy
from .base import DraftContext, Drafter, PrefillChunk, StepResult
from .early_exit import EarlyExitChain
from .head_drafter import DraftModel, HeadDrafter, NoDraft
from .tree_drafting import StaticTree, drafter_of

LOOK_SHARE = 0.01
"""Of what is written may be lost to looks at others than the fastest."""
LOOK_ROUNDS = 4
"""Of a look. The first of them are slower than others: a head catches up with plain steps, and its weights come from
memory again."""
MEMORY = 16
"""Rounds over which lengths are averaged, exponentially."""
TIMED_ROUNDS = 5
"""Latest rounds of a candidate whose median is its price: one slow round does not count, three do."""
MARGIN = 0.02
"""By so much drafts must be faster than plain steps to be preferred: near a tie nothing is won by a change."""
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
    length: float
    """Tokens that a round emits."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=TIMED_ROUNDS))
    """Of its latest rounds."""
    rounds: int = 1
    """By which its length is known, at most `MEMORY`."""
    unseen: float = 0.0
    """Tokens written since it ran last."""


class Speeds:
    """The candidates at one number of rows: which one leads, and when another is looked at."""

    def __init__(self, candidates: list[Candidate], plain: int | None, measured: bool) -> None:
        """Begin.

        Args:
            candidates: in the order of their preference, where speeds are equal.
            plain: which one is plain steps; None if there are none.
            measured: whether their costs were measured here; else the first look need not be saved for.
        """
        self.candidates, self.plain = candidates, plain
        self.running = self.leader = max(range(len(candidates)), key=self.speed)
        self.look = 0
        """Rounds that are left of the look that is under way."""
        self.written = self.spent = 0.0
        """Tokens of the look, and its seconds."""
        self.credit = 0.0 if measured else 1.0
        """Tokens that looks may cost."""
        self.behind = 0.0
        """Tokens by which drafts, since they took the lead, are behind what plain steps would have written."""

    def elsewhere(self) -> Speeds:
        """The same as a first guess at another number of rows."""
        other = copy.deepcopy(self)
        for number, candidate in enumerate(other.candidates):
            if candidate.seconds:
                candidate.seconds = deque([self.price(number)] * LOOK_ROUNDS, TIMED_ROUNDS)
        other.running, other.look, other.behind = other.leader, 0, 0.0
        return other

    def price(self, number: int) -> float:
        """Seconds of a candidate's round; before there was one, as expected beside one that is known."""
        candidate = self.candidates[number]
        if candidate.seconds:
            return median_low(candidate.seconds)
        known = [other for other in self.candidates if other.seconds]
        if not known:
            return candidate.cost
        nearest = min(known, key=lambda other: abs(math.log(other.cost / candidate.cost)))
        return median_low(nearest.seconds) * candidate.cost / nearest.cost

    def speed(self, number: int) -> float:
        """Tokens a second and row; those of plain steps with the margin that they have."""
        return self.candidates[number].length * (1 + MARGIN if number == self.plain else 1) / self.price(number)

    def choose(self) -> int:
        """The candidate of the next round."""
        if not self.look:
            self._lead()
            rival = self._rival()
            if rival is not None and self._loss(rival) <= max(self.credit, 0.0):
                self.running, self.look, self.written, self.spent = rival, LOOK_ROUNDS, 0.0, 0.0
                if self.leader == self.plain:  # the text has moved on since drafts were looked at
                    self.candidates[rival].rounds = 1
        return self.running

    def enter(self, seconds: float, tokens: float) -> None:
        """A round of the chosen candidate, which emitted so many tokens a row."""
        ran = self.candidates[self.running]
        ran.seconds.append(max(seconds, 1e-9))  # a clock may stand still
        self.credit += LOOK_SHARE * tokens
        for each in self.candidates:
            each.unseen += tokens
        ran.unseen = 0.0
        if self.running != self.plain:
            ran.rounds = min(ran.rounds + 1, MEMORY)
            before, ran.length = ran.length, ran.length + (tokens - ran.length) / ran.rounds
            for number, other in enumerate(self.candidates):  # what is said of one tree is half said of others
                if number not in (self.running, self.plain):
                    other.length = max(other.length * math.sqrt(ran.length / before), 1.0)
        if self.look:
            self.look, self.written, self.spent = self.look - 1, self.written + tokens, self.spent + seconds
            if not self.look:
                first = len(ran.seconds) == LOOK_ROUNDS  # what is done once in a process is not the look's
                spent = LOOK_ROUNDS * self.price(self.running) if first else self.spent
                self.credit -= max(spent * self.speed(self.leader) - self.written, 0.0)
        elif self.plain is not None and self.running != self.plain:
            self.behind += self.price(self.running) / self.price(self.plain) - tokens

    def _lead(self) -> None:
        """Of those that were timed, and the present leader, the fastest leads."""
        timed = [number for number, each in enumerate(self.candidates) if len(each.seconds) >= LOOK_ROUNDS]
        before, self.leader = self.leader, max({*timed, self.leader}, key=self.speed)
        if self.leader == self.plain != before:
            self.credit -= max(self.behind, 0.0)
        if self.leader != before:
            self.behind = 0.0
        self.running = self.leader

    def _rival(self) -> int | None:
        """Whom the next look is at: who may be faster, and else who was not seen for longest.

        Where plain steps lead, the best tree alone speaks for all.
        """
        others = [number for number in range(len(self.candidates)) if number != self.leader]
        if not others or len(self.candidates[self.leader].seconds) < LOOK_ROUNDS:
            return None
        best = max(others, key=self.speed)
        if self.leader == self.plain or self.speed(best) > self.speed(self.leader):
            return best
        return max(others, key=lambda number: self.candidates[number].unseen)

    def _loss(self, number: int) -> float:
        """What the leader would write in the time of a look, over what is expected of the look."""
        return LOOK_ROUNDS * (self.price(number) * self.speed(self.leader) - self.candidates[number].length)


class AdaptiveDrafter(Drafter):
    """Plain steps, or one of several trees that one drafter grows: whichever has been fastest.

    What was learned stays from one generation to the next. The time of a round is all of it: draft, forward, rule,
    host, and what the drafter learns. Prompts, and tokens of plain rounds, are shown to a head when it is asked next.

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
        if len({tree.kind for tree in trees}) > 1:
            raise ValueError("trees that are picked and trees that are drawn have different rules: choose among either")
        self.trees, self.plain, self.costs, self.clock = list(trees), plain, costs, clock
        self.feature_layers: tuple[int, ...] = trees[0].feature_layers
        self.kind: TreeKind = trees[0].kind
        self.max_nodes = max(tree.max_nodes for tree in trees)
        heads_trees = self._heads_trees()
        for tree in heads_trees:  # they share one state
            tree.room = (max(each.room[0] for each in heads_trees), max(each.room[1] for each in heads_trees))
        self.speeds: dict[tuple[bool, int], Speeds] = {}
        """By whether texts are sampled, where other drafts are right, and by the rows decoded at once."""
        self._samples = False
        self._began: float | None = None

    def __copy__(self) -> AdaptiveDrafter:
        """One for other rows, with the same knowledge."""
        other = AdaptiveDrafter([copy.copy(tree) for tree in self.trees], self.plain, self.costs, self.clock)
        other.speeds = self.speeds
        return other

    def __repr__(self) -> str:
        choices = [*(["plain steps"] if self.plain else []), *map(repr, self.trees)]
        return f"AdaptiveDrafter({' | '.join(choices)})"

    def begin(self, start: DraftContext) -> None:
        """A new stream."""
        self._began, self._samples = None, start.draft_probs is not None
        self._chooses = self.kind == "top_k" or start.draft_probs is None
        for tree in self.trees:
            tree.begin(start)
        self._share()

    def resume(self, start: DraftContext, kept: PrefillChunk, memory: Any, whole: bool) -> None:
        """A stream that goes on."""
        self.begin(start)
        self.trees[0].resume(start, kept, memory, whole)
        self._share()

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """The drafter's."""
        return self.trees[0].cache_bytes(rows, tokens)

    def memory(self) -> Any:
        """Whatever the drafter keeps."""
        return self.trees[0].memory()

    def read(self, passage: PrefillChunk) -> None:
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
        drafter = NoDraft() if self.plain and chosen == 0 else self.trees[chosen - self.plain]
        return drafter.propose(roots_B)

    def asks(self, finished: StepResult) -> Tensor | None:
        """Whatever the drafter does."""
        return self.trees[0].asks(finished)

    def observe(self, finished: StepResult) -> None:
        """Hand on, once for all, and enter the round; of a plain one without what drafts take to follow the text."""
        now = self.clock()
        self.trees[0].observe(finished)
        if self._began is None:  # nothing was chosen, or somebody else decided not to draft
            return
        seconds = (self.clock() if self._drafted else now) - self._began
        self._rows.enter(seconds, sum(map(len, finished.tokens)) / len(finished.tokens))
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

    def _share(self) -> None:
        """All trees of a head have one state, that of the first."""
        for tree in self._heads_trees():
            tree.shared = self._heads_trees()[0].shared
            tree.shared.waits = self.plain and self._chooses

    def _heads_trees(self) -> list[HeadDrafter]:
        return [tree for tree in self.trees if isinstance(tree, HeadDrafter)]

    def _speeds(self, roots_B: Tensor) -> Speeds:
        """What is known at a number of rows, sampling or not; at a new one, as at the nearest that is known."""
        rows = len(roots_B)
        here = (self._samples, rows)
        if here not in self.speeds and self.speeds:
            nearest = min(self.speeds, key=lambda other: (other[0] != here[0], abs(math.log(other[1] / rows))))
            self.speeds[here] = self.speeds[nearest].elsewhere()
        elif here not in self.speeds:
            costs = self.costs or AssumedCosts.of(roots_B.device)
            candidates = [Candidate(costs.seconds(1, 0), 1.0)] if self.plain else []
            for tree in self.trees:
                cost = costs.seconds(tree.max_nodes, getattr(tree, "depth", 0))
                candidates.append(Candidate(cost, default_length(_policy(tree))))
            plain = next((number for number, each in enumerate(candidates) if each.length == 1), None)
            self.speeds[here] = Speeds(candidates, plain, self.costs is not None)
        return self.speeds[here]


def _policy(drafter: Drafter) -> TreePolicy:
    """What tree a drafter grows, or one of its size."""
    if isinstance(drafter, StaticTree | EarlyExitChain):
        return drafter.shape
    return DynamicShape(max(drafter.max_nodes, 2), max(getattr(drafter, "depth", drafter.max_nodes - 1), 1))


def candidate_trees(head: DraftModel, hint: TreePolicy | None, costs: RoundCosts) -> list[TreePolicy]:
    """The trees to choose from where none is asked for, the most promising first: a token, and dynamic trees.

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

    def worth(tree: DynamicShape | TreeShape) -> float:
        return default_length(tree) / costs.seconds(tree.size, tree.depth)

    def can_pay(tree: DynamicShape | TreeShape) -> bool:
        return chain_length([BEST_RATE], tree.depth) * costs.seconds(1, 0) > costs.seconds(tree.size, tree.depth)

    # twice as large, a level deeper
    trees = [
        TreeShape.chain(1) if size == 2 else default_dynamic_tree(min(head.max_depth, size.bit_length()), size)
        for size in sizes
    ]
    paying: list[TreePolicy] = [*sorted(filter(can_pay, trees), key=worth, reverse=True)]
    return paying or [trees[0]]


def chosen_from(
    guesser: DraftModel,
    tree: str | Sequence[Sequence[int]] | TreePolicy,
    modules: TargetModules,
    budget: int | None = None,
) -> HeadDrafter | AdaptiveDrafter:
    """A guesser with a tree, or with several of which each round takes one.

    Args:
        guesser: a head, or what is asked like one.
        tree: what `tree_policy` takes, or several such words with | between them.
        modules: see `drafter_of`.
        budget: see `drafter_of`.

    Raises:
        ValueError: no tree, or trees that do not go together.
    """
    if isinstance(tree, str) and "|" in tree:
        trees = [drafter_of(guesser, tree_policy(word), modules, budget) for word in tree.split("|")]
        return AdaptiveDrafter(trees, plain=False)
    return drafter_of(guesser, tree_policy(tree), modules, budget)


def adaptive(drafter: Drafter) -> AdaptiveDrafter:
    """A drafter, or each of the trees that one chooses from, with plain steps as another candidate."""
    if isinstance(drafter, AdaptiveDrafter):
        return drafter if drafter.plain else AdaptiveDrafter(drafter.trees, True, drafter.costs, drafter.clock)
    return AdaptiveDrafter([drafter])
