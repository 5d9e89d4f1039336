"""Drafters that decide, round by round, by measured time: whether to guess at all, and with which tree.

Neither looks at anything but the clock and what was accepted before, so whatever they choose, the output stays exact.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

from ..heads import TargetEnds
from .grow import drafter_of
from .guessing import Guesser, HeadDrafter, RootOnly
from .rounds import Drafter, Passage, Round, Start
from .tree import DraftTree, Origin, TreePolicy, tree_policy

PLAIN_ROUNDS = 5
"""Latest plain rounds whose median is the price of a token without guesses."""
ASKED_ROUNDS = 3
"""Plain rounds by which a price is asked, at first and again; the first of all may compile something."""
DOUBTED, TRUSTED = 8, 64
"""Rounds with guesses after which the price is asked again, for the machine's speed drifts: of guesses that are seldom
right, to which plain rounds are no loss, and of others."""
SELDOM_RIGHT = 1.5
"""Tokens a round, fewer than which guesses are doubted."""
ODD_ROUND, ODD_ROUNDS = 20.0, 3
"""A round that takes so many plain steps compiled something; so many of them are excused."""
LOSS_SHARE = 0.01
"""Of all time may be lost to guesses that do not pay; what is gained is lent again."""
STEPS_LENT = 1.0
"""Plain steps that may be lost before anything was gained or waited for."""
STEPS_KEPT = 2.0
"""Plain steps that are remembered of a gain: after so much more loss a stream goes plain."""
DEAREST = STEPS_KEPT + STEPS_LENT
"""Plain steps that one round is held to lose at most: what takes longer is a pause of the machine's."""
EXPLORATION = 0.2
"""Of a bandit: how much an arm's rate may be underestimated after few rounds, relative to the best rate."""
ROUNDS_KEPT = 8
"""Rounds by which an arm's rate is remembered from one stream to the next."""


@dataclass
class Account:
    """What guesses cost and saved, over all streams, so that short ones lose no more than their share either."""

    plain_seconds: dict[int, deque[float]] = field(default_factory=dict)
    """Of plain rounds, by the number of rows."""
    lost: float = 0.0
    """Plain steps that rounds with guesses took beyond what their tokens would have cost in such, less what was lent
    since."""
    asking: int = 0
    """Plain rounds that are still to come to ask a price again."""
    rounds: int = 0
    """With guesses, since a price was asked."""
    tokens: float = 0.0
    """Of these."""


class Fallback:
    """A drafter that is left out where it does not pay, and tried again later.

    It keeps an account: what rounds with guesses took beyond what their tokens would have cost in plain ones. It
    guesses as long as the loss is within `STEPS_LENT`; a guess that pays makes room for more, and so does time, by
    its `LOSS_SHARE`.
    """

    def __init__(self, drafter: Drafter) -> None:
        """Watch a drafter."""
        self.drafter = drafter
        self.feature_layers, self.max_nodes = drafter.feature_layers, drafter.max_nodes
        self.origin: Origin = drafter.origin
        self.fallbacks = 0
        """How often a stream went plain."""
        self.account = Account()
        self._excused = 0
        self._guessing = True
        self._told = False

    def __copy__(self) -> Fallback:
        """One for other rows, with the same account."""
        other = Fallback(copy.copy(self.drafter))
        other.account = self.account
        return other

    def begin(self, start: Start) -> None:
        """A new stream."""
        self.drafter.begin(start)
        self._guessing = True

    def read(self, passage: Passage) -> None:
        """The prompts."""
        self.drafter.read(passage)

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Guesses, or the roots alone."""
        self._prices = self.account.plain_seconds.setdefault(len(roots_B), deque(maxlen=PLAIN_ROUNDS))
        priced = len(self._prices) >= ASKED_ROUNDS and self.account.asking == 0
        pays = priced and self._pays()
        if self._guessing and not pays and priced:
            self.fallbacks += 1
            if not self._told:
                warnings.warn("speculation does not pay here: some tokens are decoded plainly", stacklevel=2)
                self._told = True
        self._guessing, self._round_began = pays, time.perf_counter()
        if not pays:
            return RootOnly().propose(roots_B)
        return self.drafter.propose(roots_B)

    def observe(self, finished: Round) -> None:
        """Hand on, and enter the round."""
        self.drafter.observe(finished)
        lengths = finished.verdict.lengths_B.tolist()  # sync: the loop has just waited for them
        self._enter(time.perf_counter() - self._round_began, sum(lengths) / len(lengths))

    def compile(self) -> None:
        """The drafter."""
        self.drafter.compile()

    def select(self, rows_R: Tensor) -> None:
        """These rows only."""
        self.drafter.select(rows_R)

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Take over rows of another one."""
        assert isinstance(other, Fallback)
        self.drafter.replace(rows_R, other.drafter)

    def _enter(self, seconds: float, tokens: float) -> None:
        """A round, which emitted so many tokens a row."""
        account = self.account
        if not self._guessing:
            self._prices.append(seconds)
            if account.asking == 1:
                account.lost = max(account.lost, 0.0)  # what seemed a gain may have been the machine's
            account.asking, account.rounds, account.tokens = max(0, account.asking - 1), 0, 0.0
            account.lost -= LOSS_SHARE
            return
        steps = seconds / median(self._prices)
        if steps > ODD_ROUND and self._excused < ODD_ROUNDS:
            self._excused += 1
            return
        account.lost = max(account.lost + min((1 - LOSS_SHARE) * steps - tokens, DEAREST), -STEPS_KEPT)
        account.rounds, account.tokens = account.rounds + 1, account.tokens + tokens
        if account.rounds >= (DOUBTED if account.tokens < SELDOM_RIGHT * account.rounds else TRUSTED):
            account.asking = ASKED_ROUNDS

    def _pays(self) -> bool:
        """Whether a loss is still allowed."""
        return self.account.lost < STEPS_LENT


@dataclass
class Arm:
    """What is known of one tree."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def forget(self) -> None:
        """Keep the rate, and of the rounds no more than `ROUNDS_KEPT`."""
        share = min(1.0, ROUNDS_KEPT / self.rounds) if self.rounds else 1.0
        self.rounds, self.tokens, self.seconds = share * self.rounds, share * self.tokens, share * self.seconds


class Bandit:
    """Several trees of one head, of which each round takes the one that seems fastest (UCB1, Auer et al. 2002).

    An arm is worth its tokens per second, and more the less often it was tried. What was learned fades from one
    stream to the next.
    """

    def __init__(self, arms: Sequence[HeadDrafter]) -> None:
        """Put trees together.

        Args:
            arms: of the same head.

        Raises:
            ValueError: fewer than two, of different heads, or made in different ways, for which no one rule is exact.
        """
        if len(arms) < 2 or any(arm.head is not arms[0].head for arm in arms):
            raise ValueError("a choice of trees needs two or more, of the same head")
        if len({arm.origin for arm in arms}) > 1:
            raise ValueError("trees that are picked and trees that are drawn have different rules: choose among either")
        self.arms, self.rates = list(arms), [Arm() for _ in arms]
        self.feature_layers, self.origin = arms[0].feature_layers, arms[0].origin
        self.max_nodes = max(arm.max_nodes for arm in arms)
        depth, expanded = (max(arm.room[i] for arm in arms) for i in range(2))
        for arm in arms:
            arm.room = (depth, expanded)
        self._chosen = 0

    def __copy__(self) -> Bandit:
        """One for other rows, that learns the same rates."""
        other = Bandit([copy.copy(arm) for arm in self.arms])
        other.rates = self.rates
        return other

    def begin(self, start: Start) -> None:
        """A new stream."""
        self._round_began: float | None = None
        for arm in self.arms:
            arm.begin(start)
            arm.shared = self.arms[0].shared
        for rate in self.rates:
            rate.forget()

    def read(self, passage: Passage) -> None:
        """The prompts, once for all."""
        self.arms[0].read(passage)

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Choose, guess."""
        self._chosen, self._round_began = self.choose(), time.perf_counter()
        return self.arms[self._chosen].propose(roots_B)

    def choose(self) -> int:
        """The arm with the largest upper bound; each must have been tried."""
        untried = [number for number, arm in enumerate(self.rates) if arm.rounds == 0]
        if untried:
            return untried[0]
        rates = [arm.tokens / arm.seconds for arm in self.rates]
        tries = math.log(1 + sum(arm.rounds for arm in self.rates))
        bounds = [
            rate + EXPLORATION * max(rates) * math.sqrt(tries / arm.rounds)
            for rate, arm in zip(rates, self.rates, strict=True)
        ]
        return bounds.index(max(bounds))

    def observe(self, finished: Round) -> None:
        """Once for all arms, which share the head's state; and enter the round."""
        self.arms[0].observe(finished)
        if self._round_began is None:  # somebody decided not to guess in this round
            return
        lengths = finished.verdict.lengths_B.tolist()  # sync: the loop has just waited for them
        rate = self.rates[self._chosen]
        rate.rounds, rate.tokens = rate.rounds + 1, rate.tokens + sum(lengths) / len(lengths)
        rate.seconds += time.perf_counter() - self._round_began
        self._round_began = None

    def compile(self) -> None:
        """All arms."""
        for arm in self.arms:
            arm.compile()

    def select(self, rows_R: Tensor) -> None:
        """These rows only."""
        self.arms[0].select(rows_R)

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Take over rows of another one."""
        assert isinstance(other, Bandit)
        self.arms[0].replace(rows_R, other.arms[0])


def chosen_from(
    guesser: Guesser, tree: str | Sequence[Sequence[int]] | TreePolicy, ends: TargetEnds, budget: int | None = None
) -> HeadDrafter | Bandit:
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
        return Bandit([drafter_of(guesser, tree_policy(word), ends, budget) for word in tree.split("|")])
    return drafter_of(guesser, tree_policy(tree), ends, budget)
