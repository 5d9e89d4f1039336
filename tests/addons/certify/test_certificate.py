"""The maths of a certificate: exact engines pass at the stated rate, rounding is told from wrong
rules, power holds."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from headstart.addons.certify.certificate import (
    ALPHA,
    POWER,
    BestScores,
    NextToken,
    binomial_tail,
    chi_square_tail,
    counts_by_path,
    detectable_noncentrality,
    holm,
    judge_answer,
    judge_greedy,
    judge_sampling,
    path_test,
)

END = 9
V = 10


def test_tails_are_those_of_tables():
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, abs=1e-6)
    assert chi_square_tail(18.307038, 10) == pytest.approx(0.05, abs=1e-6)
    assert chi_square_tail(0.0, 3, 4.0) == pytest.approx(1.0)
    exact = sum(math.comb(12, k) * 0.3**k * 0.7 ** (12 - k) for k in range(7, 13))
    assert binomial_tail(7, 12, 0.3) == pytest.approx(exact)
    assert binomial_tail(0, 0, 0.5) == 1.0


def test_holm_rejects_in_steps():
    assert holm([0.004, 0.2, 0.006, 0.009], 0.02) == [True, False, True, True]
    assert holm([0.006, 0.2, 0.006, 0.009], 0.02) == [False] * 4


def rounded(scores_TV, noise, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return scores_TV + noise * torch.randn(scores_TV.shape, generator=generator)


def random_scores(positions, seed=0):
    return 2 * torch.randn(positions, V, generator=torch.Generator().manual_seed(seed))


def judged(tokens, scores, noise=0.05, seed=1, logits=None, new_tokens=None):
    kept = BestScores.of(rounded(scores, noise, seed))
    return judge_answer(
        tokens,
        scores,
        scores if logits is None else logits,
        kept,
        frozenset(),
        new_tokens or len(tokens),
    )


def test_exact_ties_are_identical_whichever_is_taken():
    scores = torch.zeros(3, V)
    assert judge_greedy([judged([4, 2, 7], scores, noise=0.0)]).verdict == "identical"


def test_rounding_alone_is_a_tie():
    verdicts = Counter()
    for seed in range(40):
        scores = random_scores(400, seed)
        engine = rounded(scores, 0.05, seed + 1000).argmax(-1).tolist()
        verdicts[judge_greedy([judged(engine, scores, seed=seed + 2000)]).verdict] += 1
    assert verdicts["not lossless"] <= 2 and verdicts["identical up to ties"] > 30, verdicts


def test_one_wrong_token_is_found_whatever_rounds():
    scores = random_scores(200)
    tokens = scores.argmax(-1).tolist()
    tokens[120] = int(scores[120].argmin())
    result = judge_greedy([judged(tokens, scores)])
    assert result.verdict == "not lossless"
    (wrong,) = result.unexplained
    assert (wrong.answer, wrong.position, wrong.token) == (0, 120, tokens[120])
    assert wrong.margin == pytest.approx(float(scores[120].max() - scores[120].min()))
    assert "token 121 of answer 1" in result.reasons[0]


def test_many_small_margins_are_more_than_rounding():
    """An engine that takes any token within e of the best one: no margin tells, their number
    does."""
    scores = random_scores(3000)
    scores[:, 0] = (
        scores[:, 1:].amax(-1)
        - 0.01
        - 0.1 * torch.rand(3000, generator=torch.Generator().manual_seed(5))
    )
    result = judge_greedy([judged([0] * 3000, scores)])
    assert not result.unexplained
    assert result.verdict == "not lossless"
    assert "more than rounding explains" in result.reasons[0]


@pytest.mark.parametrize(
    ("tokens", "new_tokens", "wrong"),
    [
        ([1, 2, 3], 3, ""),
        ([1, 2, END], 3, ""),
        ([1, END], 3, ""),
        ([1, 2], 3, "stops after 2 tokens without an end token"),
        ([END, 2, 3], 3, "goes on after its end token, token 1"),
        ([1, 2, 3], 2, "has 3 tokens instead of 2 at most"),
    ],
)
def test_answers_must_end_where_they_should(tokens, new_tokens, wrong):
    scores = torch.full((len(tokens), V), -1.0)
    scores[torch.arange(len(tokens)), torch.tensor(tokens)] = 1.0
    answer = judge_answer(
        tokens, scores, scores, BestScores.of(scores), frozenset({END}), new_tokens
    )
    assert answer.wrong_end == wrong
    result = judge_greedy([answer])
    assert result.verdict == ("not lossless" if wrong else "identical")
    assert result.exact_answers == (not wrong)


# Sampling: a first-order chain, whose distributions depend on the last token of the path.


def chain(seed=0, noise=0.0, vocabulary=V, sharpness=1.5):
    logits = sharpness * torch.randn(
        vocabulary + 1, vocabulary, generator=torch.Generator().manual_seed(seed)
    )
    logits = logits + noise * torch.randn(
        logits.shape, generator=torch.Generator().manual_seed(seed + 77)
    )
    return logits.double()


def distributions(logits, rows, positions):
    """What the reference says after every path."""
    found = {}
    by_last = NextToken.after_paths(logits, logits, [range(V)] * len(logits), keep=V)
    for position in range(positions):
        for path in counts_by_path(rows, position):
            found[path] = by_last[path[-1] if path else -1]
    return found


def drawn(logits, count, positions, seed):
    generator = torch.Generator().manual_seed(seed)
    probs = logits.softmax(-1)
    at_C = torch.full((count,), len(logits) - 1)
    columns = []
    for _ in range(positions):
        at_C = torch.multinomial(probs[at_C], 1, generator=generator)[:, 0]
        columns.append(at_C.tolist())
    return list(zip(*columns, strict=True))


def certificate(
    engine, reference, rounded_reference=None, prompts=3, count=150, positions=3, seed=0
):
    rows, exact, other = [], [], []
    for prompt in range(prompts):
        continuations = drawn(engine, count, positions, 1000 * seed + prompt)
        rows.append(continuations)
        exact.append(distributions(reference, continuations, positions))
        changed = reference if rounded_reference is None else rounded_reference
        other.append(distributions(changed, continuations, positions))
    return judge_sampling(rows, exact, other, positions)


@pytest.fixture(scope="module")
def exact_engines():
    """Certificates of an engine that samples exactly, with 150 seeds."""
    logits = chain(3)
    return [certificate(logits, logits, prompts=2, seed=seed) for seed in range(150)]


def test_the_false_alarm_rate_is_the_stated_one(exact_engines):
    alarms = sum(not result.lossless for result in exact_engines)
    assert alarms <= 6, alarms  # of 150 at ALPHA = 1 %: more with a probability of 0.1 %


def test_p_values_of_an_exact_engine_are_uniform(exact_engines):
    for kind in ("tokens", "surprise"):
        chosen = [
            [test for test in result.tests if test.kind == kind and test.position == 1]
            for result in exact_engines
        ]
        values = torch.tensor([tests[0].p_value for tests in chosen])
        for level in (0.1, 0.5, 0.9):
            assert float((values < level).double().mean()) == pytest.approx(level, abs=0.1)


def test_rounding_is_no_difference():
    """An engine that differs from the reference as much as the measured rounding does, in another
    way."""
    logits = chain(1)
    alarms = 0
    for seed in range(20):
        noise = (
            0.1 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)).double()
        )
        other = (
            0.1
            * torch.randn(
                logits.shape, generator=torch.Generator().manual_seed(seed + 500)
            ).double()
        )
        alarms += not certificate(
            logits + noise, logits, logits + other, count=600, positions=2, seed=seed
        ).lossless
    assert alarms <= 1, alarms


def test_unlikely_tokens_are_found_by_their_surprise_where_no_bin_tells():
    """The likeliest token keeps its share, the others are drawn as if all were as likely."""
    p = torch.tensor([0.5, *[0.49 / 10] * 10, *[0.01 / 489] * 489]).double()
    q = torch.tensor([0.5, *[0.5 / 499] * 499]).double()
    generator = torch.Generator().manual_seed(0)
    drawn_rows = torch.multinomial(q, 120, replacement=True, generator=generator)
    after = NextToken.after_paths(p.log()[None], p.log()[None], [range(500)], keep=30)
    result = judge_sampling(
        [[(token,) for token in drawn_rows.tolist()]], [{(): after[0]}], [{(): after[0]}], 1
    )
    (surprise,) = [test for test in result.tests if test.kind == "surprise"]
    assert surprise.rejected and result.surprise[0].mean > 2
    assert not any(test.rejected for test in result.tests if test.kind == "tokens")


def test_skewed_surprises_give_no_false_alarms():
    """An unlikely token comes in one of a hundred draws: its surprise is far from normal."""
    p = torch.tensor([0.99, 0.01]).double()
    after = NextToken.after_paths(p.log()[None], p.log()[None], [range(2)], keep=2)
    generator = torch.Generator().manual_seed(0)
    alarms = 0
    for _ in range(400):
        rows = [
            (token,)
            for token in torch.multinomial(p, 400, replacement=True, generator=generator).tolist()
        ]
        alarms += not judge_sampling([rows], [{(): after[0]}], [{(): after[0]}], 1).lossless
    assert alarms <= 10, alarms


def test_tokens_that_processors_exclude_are_found_but_not_at_the_limit():
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0, -1.0]).double()
    scores = torch.where(logits >= 2.0, logits, -torch.inf)

    def after(token):
        rows = [[(0,)] * 40 + [(1,)] * 15 + [(2,)] * 5 + [(token,)]]
        exact = [
            {(): NextToken.after_paths(scores[None], logits[None], [[0, 1, 2, token]], keep=6)[0]}
        ]
        return judge_sampling(rows, exact, exact, 1)

    assert not after(3).impossible  # rounding may move the limit by one token
    found = after(4)
    assert [(each.token, each.draws) for each in found.impossible] == [(4, 1)]
    assert not found.lossless and "probability 0" in found.reasons[0]


def test_few_draws_are_said_to_say_nothing():
    logits = chain(0)
    result = certificate(logits, logits, prompts=1, count=5)
    assert result.tests == [] and result.lossless
    assert result.detectable_everywhere(0) is None and result.detectable_at_one_prompt(0) is None


def test_bins_hold_the_expected_number_of_draws():
    reference = NextToken([0, 1, 2, 3], [0.5, 0.3, 0.15, 0.05], 1.0, 1.0, 0.0, {})
    test = path_test(Counter({0: 50, 1: 30, 2: 15, 3: 5}), reference, reference)
    # 0, 1, and 2 with 3: 5 would be too few
    assert test.freedom == 2 and test.statistic == pytest.approx(0.0)
    assert path_test(Counter({0: 6, 1: 4}), reference, reference) is None
    certain = NextToken([0], [1.0], 0.0, 0.0, 0.0, {})
    assert path_test(Counter({0: 100}), certain, certain) is None


def test_the_stated_difference_is_detected_with_the_stated_power():
    """The alternative of least noncentrality: half of the probability gains, half loses."""
    reference = NextToken([0, 1, 2, 3], [0.25] * 4, math.log(4), 0.0, 0.0, {})
    draws = 400
    generator = torch.Generator().manual_seed(0)
    exact = path_test(Counter(dict.fromkeys(range(4), draws // 4)), reference, reference)
    smallest = exact.detectable(ALPHA)
    assert smallest == pytest.approx(
        math.sqrt(detectable_noncentrality(3, 0.0, ALPHA) / (4 * draws))
    )
    probs = torch.tensor(
        [0.25 + smallest / 2, 0.25 + smallest / 2, 0.25 - smallest / 2, 0.25 - smallest / 2]
    )
    found = 0
    for _ in range(400):
        counts = Counter(
            torch.multinomial(probs, draws, replacement=True, generator=generator).tolist()
        )
        found += path_test(counts, reference, reference).p_value <= ALPHA
    assert found / 400 == pytest.approx(POWER, abs=0.05)
