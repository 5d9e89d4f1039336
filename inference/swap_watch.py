"""A head that took another's place, compared with it on live answers, so that it gives way again if it accepts less.

The two heads have not answered the same prompts, and adaptive drafting gave them other trees. So rounds are compared
with rounds that are like them: of answers to the same kind of prompt, sampled alike, with trees of the same size. A
round without drafts says nothing about a head. But trees are chosen by the speed that a head has reached, and a better
one drafts large trees in harder texts, too: it can look worse in every size. Therefore the tokens of all rounds, those
without drafts included, must have fallen as well. No clock decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..heads.base import DraftHead
from .stats import Stats

WATCHED = 100
"""Answers of each head that are compared, by default."""
KEPT = 1000
"""Newest answers whose rounds are kept: the longest window."""

Group = tuple[str, float, str, int]
"""Rounds that can be compared: kind of the prompt, temperature, acceptance rule, nodes of the tree."""
AnswerRounds = dict[Group, tuple[int, int]]
"""Rounds of one answer, and the tokens that they returned, by group."""


def rounds_of(stats: Stats, kind: str, temperature: float, rule: str) -> list[AnswerRounds]:
    """The rounds of each answer of a generation; answers without a round are left out."""
    answers = []
    for row in stats.rows:
        counts: AnswerRounds = {}
        for record in row:
            group = (kind, temperature, rule, record.nodes)
            rounds, tokens = counts.get(group, (0, 0))
            counts[group] = (rounds + 1, tokens + record.returned)
        if counts:
            answers.append(counts)
    return answers


@dataclass(frozen=True)
class Difference:
    """A difference of acceptance lengths, with its 95 % confidence interval."""

    estimate: float
    low: float
    high: float


UNKNOWN = Difference(math.nan, math.nan, math.nan)


def difference(new: Sequence[AnswerRounds], old: Sequence[AnswerRounds]) -> Difference:
    """Acceptance length of the new head's answers less that of the old one's, group by group.

    The mean over the groups that both have, weighted by n m / (n + m) for n and m rounds. Answers are the clusters of a
    ratio estimate in each group, as in `Stats.acceptance_length_interval`, and the two sides are independent. NaN with
    fewer than two comparable answers of either head.
    """
    new_totals = _totals(new)
    old_totals = _totals(old)
    weights = {}
    for group, (rounds, _) in new_totals.items():
        if group in old_totals:
            others = old_totals[group][0]
            weights[group] = rounds * others / (rounds + others)
    total = sum(weights.values())
    estimate = 0.0
    variance = 0.0
    for answers, totals, sign in ((new, new_totals, 1), (old, old_totals, -1)):
        residuals = []
        for answer in answers:
            common = [group for group in answer if group in weights]
            if not common:
                continue
            residual = 0.0
            for group in common:
                rounds, tokens = answer[group]
                all_rounds, all_tokens = totals[group]
                share = weights[group] / total
                residual += share * (tokens - all_tokens / all_rounds * rounds) / all_rounds
            residuals.append(residual)
        count = len(residuals)
        if count < 2:
            return UNKNOWN
        variance += sum(residual**2 for residual in residuals) * count / (count - 1)
        for group, weight in weights.items():
            rounds, tokens = totals[group]
            estimate += sign * weight / total * tokens / rounds
    half = 1.96 * math.sqrt(variance)
    return Difference(estimate, estimate - half, estimate + half)


def fallen(new: Sequence[AnswerRounds], old: Sequence[AnswerRounds]) -> Difference | None:
    """Difference of acceptance lengths, where a new head accepts less than the old one beyond chance; else None."""
    drafted = difference(_drafted(new), _drafted(old))
    whole = difference(_whatever_the_tree(new), _whatever_the_tree(old))
    return drafted if drafted.high < 0 and whole.estimate < 0 else None


@dataclass(frozen=True)
class SwapWatch:
    """The comparison of a head with the one whose place it took."""

    old: DraftHead
    """The head before."""
    before: list[AnswerRounds]
    """Its newest answers."""
    answers: int
    """Answers of the new head after which is decided."""
    on_return: Callable[[str], None] | None = None
    """Called with the reason when the old head drafts again."""


def _totals(answers: Sequence[AnswerRounds]) -> AnswerRounds:
    totals: AnswerRounds = {}
    for answer in answers:
        for group, (rounds, tokens) in answer.items():
            all_rounds, all_tokens = totals.get(group, (0, 0))
            totals[group] = (all_rounds + rounds, all_tokens + tokens)
    return totals


def _drafted(answers: Sequence[AnswerRounds]) -> list[AnswerRounds]:
    """The rounds with drafts."""
    found = []
    for answer in answers:
        found.append({group: counts for group, counts in answer.items() if group[3] > 1})
    return found


def _whatever_the_tree(answers: Sequence[AnswerRounds]) -> list[AnswerRounds]:
    """All rounds, those of trees of any size together."""
    return [_totals([{(*group[:3], 0): counts} for group, counts in answer.items()]) for answer in answers]
