"""The maths of a certificate: exact engines pass at the stated rate, rounding is told from wrong
rules, power holds."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from messages import lacking

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


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(scores_TV, noise, seed=0):
    return scores_TV + noise * normal(seed, *scores_TV.shape)


def random_scores(positions, seed=0):
    return 2 * normal(seed, positions, V)


def judged(tokens, scores, noise=0.05, seed=1):
    kept = BestScores.of(rounded(scores, noise, seed))
    return judge_answer(tokens, scores, scores, kept, frozenset(), len(tokens))


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
    less = 0.01 + 0.1 * torch.rand(3000, generator=torch.Generator().manual_seed(5))
    scores[:, 0] = scores[:, 1:].amax(-1) - less
    result = judge_greedy([judged([0] * 3000, scores)])
    assert not result.unexplained
    assert result.verdict == "not lossless"
    assert not lacking(result.reasons[0], "rounding")


@pytest.mark.parametrize(
    ("tokens", "new_tokens", "wrong"),
    [
        ([1, 2, 3], 3, ""),
        ([1, 2, END], 3, ""),
        ([1, END], 3, ""),
        ([1, 2], 3, "stops 2"),
        ([END, 2, 3], 3, "after end 1"),
        ([1, 2, 3], 2, "3 2"),
    ],
)
def test_answers_must_end_where_they_should(tokens, new_tokens, wrong):
    scores = torch.full((len(tokens), V), -1.0)
    scores[torch.arange(len(tokens)), torch.tensor(tokens)] = 1.0
    kept = BestScores.of(scores)
    answer = judge_answer(tokens, scores, scores, kept, frozenset({END}), new_tokens)
    assert bool(answer.wrong_end) == bool(wrong) and not lacking(answer.wrong_end, wrong)
    result = judge_greedy([answer])
    assert result.verdict == ("not lossless" if wrong else "identical")
    assert result.exact_answers == (not wrong)


# Sampling: a first-order chain, whose distributions depend on the last token of the path.


def chain(seed):
    return 1.5 * normal(seed, V + 1, V).double()


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


def certificate(engine, reference, also, prompts=3, count=150, positions=3, seed=0):
    """Draws of an engine, judged by a reference and by what else rounding may make of it."""
    rows = [drawn(engine, count, positions, 1000 * seed + prompt) for prompt in range(prompts)]
    exact = [distributions(reference, continuations, positions) for continuations in rows]
    other = [distributions(also, continuations, positions) for continuations in rows]
    return judge_sampling(rows, exact, other, positions)


@pytest.fixture(scope="module")
def exact_engines():
    """Certificates of an engine that samples exactly, with 150 seeds."""
    logits = chain(3)
    return [certificate(logits, logits, logits, prompts=2, seed=seed) for seed in range(150)]


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
        engine = rounded(logits, 0.1, seed)
        also = rounded(logits, 0.1, seed + 500)
        found = certificate(engine, logits, also, count=600, positions=2, seed=seed)
        alarms += not found.lossless
    assert alarms <= 1, alarms


def judged_draws(engine_V, count, generator, reference_V, keep):
    """One-token draws by some probabilities, judged by others."""
    tokens = torch.multinomial(engine_V, count, replacement=True, generator=generator).tolist()
    scores_1V = reference_V.log()[None]
    (after,) = NextToken.after_paths(scores_1V, scores_1V, [range(len(reference_V))], keep=keep)
    return judge_sampling([[(token,) for token in tokens]], [{(): after}], [{(): after}], 1)


def test_unlikely_tokens_are_found_by_their_surprise_where_no_bin_tells():
    """The likeliest token keeps its share, the others are drawn as if all were as likely."""
    p = torch.tensor([0.5, *[0.49 / 10] * 10, *[0.01 / 489] * 489]).double()
    q = torch.tensor([0.5, *[0.5 / 499] * 499]).double()
    generator = torch.Generator().manual_seed(0)
    result = judged_draws(q, 120, generator, p, keep=30)
    (surprise,) = [test for test in result.tests if test.kind == "surprise"]
    assert surprise.rejected and result.surprise[0].mean > 2
    assert not any(test.rejected for test in result.tests if test.kind == "tokens")


def test_skewed_surprises_give_no_false_alarms():
    """An unlikely token comes in one of a hundred draws: its surprise is far from normal."""
    p = torch.tensor([0.99, 0.01]).double()
    generator = torch.Generator().manual_seed(0)
    alarms = 0
    for _ in range(400):
        alarms += not judged_draws(p, 400, generator, p, keep=2).lossless
    assert alarms <= 10, alarms


def test_tokens_that_processors_exclude_are_found_but_not_at_the_limit():
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0, -1.0]).double()
    scores = torch.where(logits >= 2.0, logits, -torch.inf)

    def after(token):
        rows = [[(0,)] * 40 + [(1,)] * 15 + [(2,)] * 5 + [(token,)]]
        drawn = [[0, 1, 2, token]]
        (exact,) = NextToken.after_paths(scores[None], logits[None], drawn, keep=6)
        return judge_sampling(rows, [{(): exact}], [{(): exact}], 1)

    assert not after(3).impossible  # rounding may move the limit by one token
    found = after(4)
    assert [(each.token, each.draws) for each in found.impossible] == [(4, 1)]
    assert not found.lossless and not lacking(found.reasons[0], "probability 0")


def test_few_draws_are_said_to_say_nothing():
    logits = chain(0)
    result = certificate(logits, logits, logits, prompts=1, count=5)
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
    noncentrality = detectable_noncentrality(3, 0.0, ALPHA)
    assert smallest == pytest.approx(math.sqrt(noncentrality / (4 * draws)))
    probs = 0.25 + smallest / 2 * torch.tensor([1.0, 1.0, -1.0, -1.0])
    found = 0
    for _ in range(400):
        tokens = torch.multinomial(probs, draws, replacement=True, generator=generator).tolist()
        found += path_test(Counter(tokens), reference, reference).p_value <= ALPHA
    assert found / 400 == pytest.approx(POWER, abs=0.05)
