"""Whether an engine is lossless, judged by reference scores of its output from the same target.

Greedy. The reference reads an engine's own answer in one forward and says at every position how far
the engine's token lies below its best one: the margin, 0 where the token is the best. Rounding may
exchange two tokens that are nearly equally good. By how much it changes the gap between two tokens
is measured: the same weights read the same answer token by token in the engine's dtype, and e is
the largest change found. A margin above e is not a matter of rounding. Neither are many small ones,
where one-token forwards hardly ever choose another token than the reference. For example, with
e = 0.03:

    margins 0 0 0       identical
    margins 0 0.01 0    identical up to ties
    margins 0 0.4 0     not lossless

Sampling. An engine draws short continuations of fixed prompts. Given the tokens before it, the
token at a position has the reference's distribution, so that counts of tokens after the same path
are compared with it by Pearson's chi-square:

    X² = Σ_bins (observed - n p)² / (n p)

A bin is a token, or all the unlikely ones together. An engine that rounds has a distribution that
differs by a little, p' instead of p. So X² is compared with a noncentral chi-square distribution,
whose noncentrality is that of twice the difference measured in the engine's dtype: n Σ (2 (p' -
p))² / p. Of all distributions at a total variation t from p, those of the least noncentrality have
4 n t²: from this follows the smallest t that is detected with a given power.

What bins do not see, the surprise does: the sum of -log p over all draws of a position has the sum
of the entropies as its mean, and a known variance. Its distribution is nearly normal, and is
corrected for its skewness.

Letters in tensor names: T positions of an answer, V vocabulary, K best tokens that are kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

ALPHA = 0.01
"""Probability that an exact engine is called "not lossless", for the greedy part and for the
sampling part each."""
POWER = 0.9
"""Probability with which the stated smallest difference would have been detected."""
EXPECTED = 10.0
"""Least expected count of a bin, for which chi-square's distribution is close at the levels that
are used."""
ENOUGH = 100
"""Least number of draws for a test of their surprise."""
KEPT = 64
"""Best tokens of each position that are kept of the scores in the engine's dtype."""
CONTENDERS = 20
"""Best tokens of each position whose distance from the best one says what rounding changes."""
TOLERATED = 2.0
"""Factor of the measured rounding that is still called rounding: another engine adds up in another
order."""

GreedyVerdict = Literal["identical", "identical up to ties", "not lossless"]
TokenPath = tuple[int, ...]
"""Tokens between a prompt and a position."""


def chi_square_tail(statistic: float, freedom: int, noncentrality: float = 0.0) -> float:
    """Return P(X > statistic) of a central or noncentral chi-square variable.

    The noncentral distribution is a Poisson mixture of central ones.
    """
    # P(X > x) = sum over m of Poisson(m; noncentrality / 2) P(chi-square of freedom + 2 m > x).
    # Terms more than 12 standard deviations beyond the mean are left out.
    half = noncentrality / 2
    last = int(half + 12 * math.sqrt(half) + 40) if half > 0 else 0
    mixed_M = torch.arange(last + 1, dtype=torch.float64)
    log_weights_M = torch.zeros(1, dtype=torch.float64)
    if half > 0:
        log_weights_M = mixed_M * math.log(half) - half - torch.lgamma(mixed_M + 1)
    x_M = torch.full_like(mixed_M, max(statistic, 0.0) / 2)
    tails_M = torch.special.gammaincc(freedom / 2 + mixed_M, x_M)
    return min(1.0, float((log_weights_M.exp() * tails_M).sum()))


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """P(X >= successes) of a binomial variable with 0 < chance < 1."""
    # In logarithms, as the binomial coefficients would overflow.
    counts = torch.arange(successes, trials + 1, dtype=torch.float64)
    ways = math.lgamma(trials + 1) - torch.lgamma(counts + 1) - torch.lgamma(trials - counts + 1)
    logs = ways + counts * math.log(chance) + (trials - counts) * math.log1p(-chance)
    return min(1.0, float(logs.exp().sum()))


def holm(p_values: Sequence[float], level: float = ALPHA) -> list[bool]:
    """Which hypotheses are rejected at a family-wise level (Holm 1979)."""
    # The least of m p-values is compared with level / m, the next one with level / (m - 1), and so
    # on up to the first that is larger.
    rejected = [False] * len(p_values)
    by_p_value = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for rank, index in enumerate(by_p_value):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def detectable_noncentrality(freedom: int, allowance: float, level: float) -> float:
    """Noncentrality that a test at this level detects with probability POWER."""
    # The statistic from which the test rejects, and then the noncentrality that reaches it.
    critical = _bisected(lambda x: chi_square_tail(x, freedom, allowance) <= level)
    return _bisected(
        lambda noncentrality: chi_square_tail(critical, freedom, noncentrality) >= POWER
    )


def _bisected(holds: Callable[[float], bool]) -> float:
    """The least positive number for which a monotone condition holds, to a thousandth of it."""
    low = 0.0
    high = 1.0
    while not holds(high):
        low = high
        high *= 2
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True)
class BestScores:
    """The best tokens at each position of an answer with their scores, best first."""

    tokens_TK: Tensor
    scores_TK: Tensor

    @classmethod
    def of(cls, scores_TV: Tensor) -> BestScores:
        """Keep the `KEPT` best of all scores."""
        best = scores_TV.topk(min(KEPT, scores_TV.shape[-1]), dim=-1)
        return cls(best.indices.cpu(), best.values.cpu())


@dataclass(frozen=True)
class JudgedAnswer:
    """A greedy answer, position by position."""

    tokens: list[int]
    best: list[int]
    """The reference's best token after the engine's own text."""
    margins: list[float]
    """By how much the engine's token scores below the best one; 0 where it is the best, or as
    good."""
    unprocessed: list[float]
    """The same by the logits, before the logits processors."""
    changes: list[float]
    """By how much rounding changed the distance of a good token from the best one, at most."""
    rounded_margins: list[float]
    """Margins of the tokens that one-token forwards in the engine's dtype choose."""
    wrong_end: str = ""
    """What is wrong with the answer's length; empty if it ends where it should."""


def judge_answer(
    tokens: Sequence[int],
    scores_TV: Tensor,
    logits_TV: Tensor,
    rounded: BestScores,
    end_tokens: frozenset[int],
    new_tokens: int,
) -> JudgedAnswer:
    """Compare an answer with the reference's scores at its positions.

    Args:
        tokens: the T tokens that the engine generated.
        scores_TV: the reference's scores before each of them, after all logits processors.
        logits_TV: the same before them.
        rounded: scores at the same positions by one-token forwards in the engine's dtype.
        end_tokens: tokens that end an answer.
        new_tokens: longest answer that the engine was asked for.
    """
    chosen_T1 = torch.tensor(tokens, device=scores_TV.device)[:, None]
    best_T = scores_TV.argmax(-1)
    margins_T = _margins(scores_TV, chosen_T1)
    rounded_tokens_TK = rounded.tokens_TK.to(scores_TV.device)
    return JudgedAnswer(
        tokens=list(tokens),
        best=best_T.tolist(),
        margins=margins_T.tolist(),
        unprocessed=_margins(logits_TV, chosen_T1).tolist(),
        changes=_gap_changes(scores_TV, rounded).tolist(),
        rounded_margins=_margins(scores_TV, rounded_tokens_TK[:, :1]).tolist(),
        wrong_end=_wrong_end(tokens, end_tokens, new_tokens),
    )


def _margins(scores_TV: Tensor, tokens_T1: Tensor) -> Tensor:
    """Distance of a token's score from the best one at each position, [T]."""
    return (scores_TV.amax(-1, keepdim=True) - scores_TV.gather(1, tokens_T1))[:, 0]


def _gap_changes(scores_TV: Tensor, rounded: BestScores) -> Tensor:
    """Return rounding's largest change of a top token's gap to the reference's best token, [T].

    For example, the reference scores a token 3.0 and its best one 3.5, a gap of 0.5. With rounding
    they have 3.1 and 3.4, a gap of 0.3: the change is 0.2.
    """
    tokens_TK = rounded.tokens_TK[:, :CONTENDERS].to(scores_TV.device)
    all_tokens_TK = rounded.tokens_TK.to(scores_TV.device)
    rounded_TK = rounded.scores_TK.to(scores_TV.device, scores_TV.dtype)
    best_T1 = scores_TV.argmax(-1, keepdim=True)
    is_best_TK = all_tokens_TK == best_T1
    # The rounded score of the reference's best token. If it is not among the kept ones, it is at
    # most that of the last of them.
    rounded_best_T = torch.where(
        is_best_TK.any(-1),
        torch.where(is_best_TK, rounded_TK, -torch.inf).amax(-1),
        rounded_TK[:, -1],
    )
    gaps_TK = scores_TV.gather(1, best_T1) - scores_TV.gather(1, tokens_TK)
    rounded_gaps_TK = rounded_best_T[:, None] - rounded_TK[:, :CONTENDERS]
    changes_TK = (gaps_TK - rounded_gaps_TK).abs()
    # A token that the processors exclude has the score -inf, and no gap.
    return torch.where(changes_TK.isfinite(), changes_TK, 0.0).amax(-1)


def _wrong_end(tokens: Sequence[int], end_tokens: frozenset[int], new_tokens: int) -> str:
    """Say what is wrong with an answer's length; empty if nothing is."""
    ends = [position for position, token in enumerate(tokens) if token in end_tokens]
    if ends and ends[0] < len(tokens) - 1:
        return f"goes on after its end token, token {ends[0] + 1}"
    if len(tokens) > new_tokens:
        return f"has {len(tokens)} tokens instead of {new_tokens} at most"
    if len(tokens) < new_tokens and not ends:
        return f"stops after {len(tokens)} tokens without an end token"
    return ""


@dataclass(frozen=True)
class Divergence:
    """A token of a greedy answer that is not the reference's best one."""

    answer: int
    position: int
    token: int
    best: int
    margin: float


@dataclass(frozen=True)
class GreedyResult:
    """All greedy answers of an engine, judged."""

    verdict: GreedyVerdict
    answers: int
    tokens: int
    exact_answers: int
    """Answers whose every token is the reference's best one."""
    divergences: list[Divergence]
    """Every token that is not the best one; after the first in an answer the reference goes on from
    the engine's text."""
    tie: float
    """e: the largest change of a gap by rounding."""
    rounding: dict[str, Any]
    """What one-token forwards in the engine's dtype change and choose, for the report: quantiles of
    the change of a gap, positions where they choose another token than the reference and the
    largest margin of those, positions where the engine alone does and where they alone do, and the
    probability of so many of the engine's if it rounded twice as much."""
    unexplained: list[Divergence]
    """Divergences whose margin exceeds e."""
    reasons: list[str]
    """Why the engine is not lossless; empty if it is."""

    @property
    def first_divergences(self) -> list[Divergence]:
        """The first one of each answer that has one."""
        firsts: dict[int, Divergence] = {}
        for divergence in self.divergences:
            firsts.setdefault(divergence.answer, divergence)
        return list(firsts.values())


def judge_greedy(answers: Sequence[JudgedAnswer]) -> GreedyResult:
    """Verdict on all greedy answers of an engine."""
    # 1. What rounding does: e, and at how many positions it alone chooses another token.
    changes = torch.tensor(
        [change for answer in answers for change in answer.changes], dtype=torch.float64
    )
    tie = float(changes.max()) if len(changes) else 0.0
    divergences = []
    rounded_only = 0
    engine_only = 0
    for number, answer in enumerate(answers):
        rows = zip(answer.tokens, answer.best, answer.margins, answer.rounded_margins, strict=True)
        for position, (token, best, margin, rounded_margin) in enumerate(rows):
            if margin > 0:
                divergences.append(Divergence(number, position, token, best, margin))
            engine_only += margin > 0 and rounded_margin == 0
            rounded_only += margin == 0 and rounded_margin > 0
    # 2. A sign test. Of the positions where only one of the two differs, an engine that rounds
    #    TOLERATED times as much has 2 of 3.
    chance = TOLERATED / (1 + TOLERATED)
    p_more = binomial_tail(engine_only, engine_only + rounded_only, chance)
    unexplained = [divergence for divergence in divergences if divergence.margin > tie]
    # 3. Reasons against the engine: wrong ends, margins above e, too many small ones.
    reasons = []
    for number, answer in enumerate(answers, 1):
        if answer.wrong_end:
            reasons.append(f"answer {number} {answer.wrong_end}")
    if unexplained:
        worst = max(unexplained, key=lambda divergence: divergence.margin)
        reasons.append(
            f"{len(unexplained)} of {len(changes)} tokens lie further below the best one than"
            f" rounding explains, which changes gaps by {tie:.2g} at most; the worst by"
            f" {worst.margin:.3g}, token {worst.position + 1} of answer {worst.answer + 1}"
        )
        without_processors = [
            answers[divergence.answer].unprocessed[divergence.position] <= tie
            for divergence in unexplained
        ]
        if all(without_processors):
            reasons.append(
                "each of these tokens is the best one without the logits processors: they were not"
                " applied"
            )
    if p_more < ALPHA:
        reasons.append(
            f"{engine_only + rounded_only} tokens differ from the reference's in the engine or in"
            f" one-token forwards of its dtype alone, {engine_only} of them in the engine: more"
            f" than rounding explains (p = {p_more:.1g})"
        )
    # 4. The verdict.
    verdict: GreedyVerdict = "identical"
    if reasons:
        verdict = "not lossless"
    elif divergences:
        verdict = "identical up to ties"
    shares = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "largest": 1.0}
    quantiles = {}
    if len(changes):
        quantiles = {name: float(changes.quantile(share)) for name, share in shares.items()}
    rounded_margins = [margin for answer in answers for margin in answer.rounded_margins]
    rounding = {
        "change_of_a_gap": quantiles,
        "one_token_forwards_not_best": sum(margin > 0 for margin in rounded_margins),
        "one_token_forwards_largest_margin": max(rounded_margins, default=0.0),
        "engine_alone": engine_only,
        "one_token_forwards_alone": rounded_only,
        "p_more_than_rounding": p_more,
    }
    return GreedyResult(
        verdict=verdict,
        answers=len(answers),
        tokens=len(changes),
        exact_answers=sum(not any(answer.margins) and not answer.wrong_end for answer in answers),
        divergences=divergences,
        tie=tie,
        rounding=rounding,
        unexplained=unexplained,
        reasons=reasons,
    )


@dataclass(frozen=True)
class NextToken:
    """The distribution of the token after a path."""

    tokens: list[int]
    """The likeliest ones, best first."""
    probs: list[float]
    """Their probabilities."""
    entropy: float
    """In nats."""
    variance: float
    """Of -log p of a token drawn from it."""
    third_moment: float
    """Of -log p, about its mean."""
    drawn: dict[int, float]
    """Probabilities of the tokens that the engine drew."""
    first_excluded: int | None = None
    """The likeliest token that the logits processors exclude: rounding may move the limit by one
    token."""

    @classmethod
    def after_paths(
        cls, scores_NV: Tensor, logits_NV: Tensor, drawn: Sequence[Sequence[int]], keep: int
    ) -> list[NextToken]:
        """The distributions after N paths.

        Args:
            scores_NV: scores after the logits processors.
            logits_NV: scores before them.
            drawn: the tokens that the engine drew after each path.
            keep: likeliest tokens that are kept of each.
        """
        # 1. Moments of the surprise, -log p, of a token drawn from p; 0 log 0 counts as 0.
        log_p_NV = scores_NV.double().log_softmax(-1)
        p_NV = log_p_NV.exp()
        surprise_NV = torch.where(p_NV > 0, -log_p_NV, 0.0)
        entropy_N = (p_NV * surprise_NV).sum(-1)
        centred_NV = surprise_NV - entropy_N[:, None]
        variance_N = (p_NV * centred_NV.square()).sum(-1)
        third_moment_N = (p_NV * centred_NV.pow(3)).sum(-1)
        best = p_NV.topk(min(keep, p_NV.shape[-1]), dim=-1)
        # 2. Of the tokens that top-k or top-p cut off, the one with the highest logit.
        excluded_NV = p_NV == 0
        excluded_logits_NV = torch.where(excluded_NV, logits_NV.double(), -torch.inf)
        first_excluded = excluded_logits_NV.argmax(-1).tolist()
        any_excluded = excluded_NV.any(-1).tolist()
        # 3. One record a path.
        distributions = []
        for index, tokens in enumerate(drawn):
            of_drawn = p_NV[index, list(tokens)].tolist()
            distributions.append(
                cls(
                    tokens=best.indices[index].tolist(),
                    probs=best.values[index].tolist(),
                    entropy=float(entropy_N[index]),
                    variance=float(variance_N[index]),
                    third_moment=float(third_moment_N[index]),
                    drawn=dict(zip(tokens, of_drawn, strict=True)),
                    first_excluded=first_excluded[index] if any_excluded[index] else None,
                )
            )
        return distributions


@dataclass(frozen=True)
class SamplingTest:
    """A test of the tokens at one position, after one prompt or after all of them."""

    kind: Literal["tokens", "surprise"]
    """Pearson's chi-square of their counts, or how likely they are."""
    prompt: int | None
    """None for all prompts together."""
    position: int
    """From 0 for the first new token, which comes from reading the prompt and not from a draft."""
    draws: int
    statistic: float
    freedom: int
    allowance: float
    """Noncentrality that rounding explains."""
    rejected: bool = False

    @property
    def p_value(self) -> float:
        """Probability of a statistic this large or larger if the engine is exact up to rounding."""
        return chi_square_tail(self.statistic, self.freedom, self.allowance)

    def detectable(self, level: float) -> float:
        """Return the smallest total variation that a test at this level detects.

        It is detected with probability POWER, whatever the form of the difference.
        """
        # A total variation t has a noncentrality of at least 4 n t^2.
        noncentrality = detectable_noncentrality(self.freedom, self.allowance, level)
        return math.sqrt(noncentrality / (4 * self.draws))


@dataclass(frozen=True)
class Impossible:
    """Draws of a token to which the reference, after the logits processors, gives probability 0."""

    prompt: int
    path: TokenPath
    token: int
    draws: int


@dataclass
class ExcessSum:
    """A sum over draws at a position less its mean for an exact engine, with its moments."""

    draws: int = 0
    excess: float = 0.0
    variance: float = 0.0
    third_moment: float = 0.0
    change: float = 0.0
    """Sum of the changes of the means by rounding."""

    @property
    def mean(self) -> float:
        """The excess of a draw."""
        return self.excess / max(self.draws, 1)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, for an exact engine."""
        return math.sqrt(self.variance) / max(self.draws, 1)

    def add_surprise(
        self, counts: Mapping[int, int], reference: NextToken, rounded: NextToken
    ) -> None:
        """Add -log p of the tokens after a path, in nats, less the entropy.

        Tokens with probability 0 are reported separately.
        """
        for token, draws in counts.items():
            p = reference.drawn[token]
            if p > 0:
                self.draws += draws
                self.excess += draws * (-math.log(p) - reference.entropy)
                self.variance += draws * reference.variance
                self.third_moment += draws * reference.third_moment
                self.change += draws * abs(rounded.entropy - reference.entropy)

    def add_likeliest(
        self, counts: Mapping[int, int], reference: NextToken, rounded: NextToken
    ) -> None:
        """Add how often the likeliest token came after a path with too few draws for bins."""
        draws = sum(counts.values())
        likeliest = reference.tokens[0]
        p = reference.probs[0]
        changed = dict(zip(rounded.tokens, rounded.probs, strict=True)).get(likeliest, 0.0)
        self.draws += draws
        self.excess += counts.get(likeliest, 0) - draws * p
        self.variance += draws * p * (1 - p)
        self.change += draws * abs(changed - p)

    def test(self, kind: Literal["tokens", "surprise"], position: int) -> SamplingTest | None:
        """A test of the sum; None where its variance is too small for a nearly normal one."""
        if self.variance < EXPECTED:
            return None
        deviation = math.sqrt(self.variance)
        skewness = self.third_moment / deviation**3
        z = self.excess / deviation
        # Cornish and Fisher (1938) correct for the skewness. Beyond 3 / skewness their parabola
        # would turn back.
        if skewness > 0:
            z = min(z, 3 / skewness)
        normal = z - skewness / 6 * (z**2 - 1)
        # The square of a normal variable is chi-square with one degree of freedom.
        allowance = (TOLERATED * self.change) ** 2 / self.variance
        return SamplingTest(kind, None, position, self.draws, normal**2, 1, allowance)


@dataclass(frozen=True)
class SamplingResult:
    """All draws of an engine, tested."""

    draws: int
    """Continuations, over all prompts."""
    tests: list[SamplingTest]
    impossible: list[Impossible]
    surprise: list[ExcessSum]
    """Of -log p, by position: negative where the engine's tokens are too likely."""
    reasons: list[str] = field(default_factory=list)

    @property
    def lossless(self) -> bool:
        """Whether no test rejects it; `detectable_everywhere` says how much that means."""
        return not self.reasons

    def of_tokens(self, position: int) -> list[SamplingTest]:
        """Pearson's tests of a position."""
        return [test for test in self.tests if test.position == position and test.kind == "tokens"]

    def detectable_everywhere(self, position: int) -> float | None:
        """Return the smallest detectable total variation of a difference common to all prompts.

        It is detected with probability POWER. None where there are too few draws for a test.
        """
        tests = [test for test in self.of_tokens(position) if test.prompt is None]
        return tests[0].detectable(ALPHA / len(self.tests)) if tests else None

    def detectable_at_one_prompt(self, position: int) -> float | None:
        """Return the smallest detectable total variation after one prompt, in the worst case.

        The prompt is the least sensitive of those that have a test; None if there is none. The
        difference is detected with probability POWER.
        """
        tests = [test for test in self.of_tokens(position) if test.prompt is not None]
        return max((test.detectable(ALPHA / len(self.tests)) for test in tests), default=None)


def judge_sampling(
    rows: Sequence[Sequence[TokenPath]],
    reference: Sequence[Mapping[TokenPath, NextToken]],
    rounded: Sequence[Mapping[TokenPath, NextToken]],
    positions: int,
) -> SamplingResult:
    """Test the continuations of each prompt.

    Args:
        rows: for each prompt the continuations that were drawn, shorter ones ended.
        reference: for each prompt the distribution after every path in its continuations.
        rounded: the same in the engine's dtype.
        positions: tokens of a whole continuation.
    """
    by_prompt: list[SamplingTest] = []
    pooled: list[SamplingTest] = []
    impossible: list[Impossible] = []
    surprises: list[ExcessSum] = []
    for position in range(positions):
        parts: list[SamplingTest] = []
        too_rare = ExcessSum()
        surprise = ExcessSum()
        # 1. Chi-square of each prompt: the sum over the paths that were drawn before the position.
        for prompt, continuations in enumerate(rows):
            of_paths = []
            for path, counts in counts_by_path(continuations, position).items():
                exact = reference[prompt][path]
                other = rounded[prompt][path]
                impossible += _impossible(prompt, path, counts, exact, other)
                surprise.add_surprise(counts, exact, other)
                test_of_path = path_test(counts, exact, other)
                if test_of_path is None:
                    too_rare.add_likeliest(counts, exact, other)
                else:
                    of_paths.append(test_of_path)
            if of_paths:
                parts.append(_together(of_paths, prompt, position))
        # 2. Over all prompts: the surprise, and all chi-squares with the paths that were too rare.
        by_prompt += parts
        surprises.append(surprise)
        surprise_test = surprise.test("surprise", position) if surprise.draws >= ENOUGH else None
        if surprise_test is not None:
            pooled.append(surprise_test)
        rest = too_rare.test("tokens", position)
        everything = [*parts, rest] if rest is not None else parts
        if everything:
            pooled.append(_together(everything, None, position))
    # 3. Reject at one level for all tests.
    unjudged = [*pooled, *by_prompt]
    rejected = holm([test.p_value for test in unjudged])
    tests = []
    for test, verdict in zip(unjudged, rejected, strict=True):
        tests.append(replace(test, rejected=verdict))
    result = SamplingResult(
        draws=sum(map(len, rows)),
        tests=tests,
        impossible=impossible,
        surprise=surprises,
    )
    result.reasons.extend(_sampling_reasons(result, rows, reference))
    return result


def counts_by_path(
    continuations: Sequence[TokenPath], position: int
) -> dict[TokenPath, Counter[int]]:
    """How often each token was drawn at a position, by the tokens before it.

    For example, the continuations (5, 7), (5, 8), (5, 7), (6, 7) have {(5,): {7: 2, 8: 1}, (6,):
    {7: 1}} at position 1.
    """
    counts: dict[TokenPath, Counter[int]] = {}
    for row in continuations:
        if len(row) > position:
            counts.setdefault(row[:position], Counter())[row[position]] += 1
    return counts


def path_test(
    counts: Mapping[int, int], reference: NextToken, rounded: NextToken
) -> SamplingTest | None:
    """Return Pearson's test of the tokens after one path.

    None where fewer than two bins can be expected to fill.
    """
    # 1. The bins: tokens that are expected often enough, and the rest in one. A rest that would not
    #    fill its bin takes more tokens. A rest of at most 1e-9 is rounding.
    draws = sum(counts.values())
    alone = sum(draws * p >= EXPECTED for p in reference.probs)
    while alone and 1e-9 < 1 - sum(reference.probs[:alone]) < EXPECTED / draws:
        alone -= 1
    rest = max(0.0, 1 - sum(reference.probs[:alone]))
    bins = alone + (rest > 1e-9)
    if bins < 2:
        return None
    # 2. Probabilities by the reference and with rounding, and counts, bin by bin.
    rounded_p = dict(zip(rounded.tokens, rounded.probs, strict=True))
    expected = reference.probs[:alone]
    changed = [rounded_p.get(token, 0.0) for token in reference.tokens[:alone]]
    observed = [counts.get(token, 0) for token in reference.tokens[:alone]]
    if rest > 1e-9:
        expected = [*expected, rest]
        changed.append(1 - sum(changed))
        observed.append(draws - sum(observed))
    # 3. Pearson's statistic, and the noncentrality of TOLERATED times the rounding.
    statistic = 0.0
    allowance = 0.0
    for seen, p, other in zip(observed, expected, changed, strict=True):
        statistic += (seen - draws * p) ** 2 / (draws * p)
        allowance += draws * (TOLERATED * (other - p)) ** 2 / p
    return SamplingTest("tokens", None, 0, draws, statistic, bins - 1, allowance)


def _together(tests: Sequence[SamplingTest], prompt: int | None, position: int) -> SamplingTest:
    """Independent tests of a position as one: chi-squares add up, like their freedoms."""
    return SamplingTest(
        kind="tokens",
        prompt=prompt,
        position=position,
        draws=sum(test.draws for test in tests),
        statistic=sum(test.statistic for test in tests),
        freedom=sum(test.freedom for test in tests),
        allowance=sum(test.allowance for test in tests),
    )


def _impossible(
    prompt: int,
    path: TokenPath,
    counts: Mapping[int, int],
    reference: NextToken,
    rounded: NextToken,
) -> list[Impossible]:
    """Draws of tokens that the processors exclude, in the reference and with rounding."""
    impossible = []
    for token, draws in counts.items():
        # Rounding may move the limit of top-k or top-p by one token.
        at_the_limit = token == reference.first_excluded or rounded.drawn[token] > 0
        if reference.drawn[token] == 0 and not at_the_limit:
            impossible.append(Impossible(prompt, path, token, draws))
    return impossible


def _sampling_reasons(
    result: SamplingResult,
    rows: Sequence[Sequence[TokenPath]],
    reference: Sequence[Mapping[TokenPath, NextToken]],
) -> list[str]:
    reasons = []
    if result.impossible:
        draws = sum(drawn.draws for drawn in result.impossible)
        reasons.append(
            f"{draws} draws are tokens to which the target, after the logits processors, gives"
            " probability 0"
        )
    rejected = [test for test in result.tests if test.rejected]
    if rejected:
        worst = min(rejected, key=lambda test: test.p_value)
        where = "all prompts together" if worst.prompt is None else f"prompt {worst.prompt + 1}"
        reasons.append(
            f"{len(rejected)} of {len(result.tests)} tests reject the target's distribution;"
            f" clearest at token {worst.position + 1} after {where}: chi-square"
            f" {worst.statistic:.4g} of the {worst.kind} with {worst.freedom} degrees of freedom, p"
            f" = {worst.p_value:.1g}"
        )
    # Several equal draws where the target is not certain of its first token.
    single = all(len(row) > 1 and len(set(row)) == 1 for row in rows)
    if reasons and single and any(distributions[()].entropy > 0.1 for distributions in reference):
        reasons.append(
            "every prompt has a single continuation, whatever the seed: the rule draws nothing"
        )
    return reasons
