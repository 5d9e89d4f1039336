"""Acceptance of two heads on different answers: what is compared with what, and when a head gives way."""

from __future__ import annotations

import math
import random

import pytest

from headstart.inference.stats import RoundRecord, Stats
from headstart.inference.swap_watch import difference, fallen, rounds_of

CHAIN, TREE, PLAIN = ("", 0.0, "greedy", 4), ("", 0.0, "greedy", 17), ("", 0.0, "greedy", 1)


def answers(group, *counts):
    """One answer for each pair of rounds and tokens."""
    return [{group: pair} for pair in counts]


def test_rounds_are_counted_by_kind_sampling_and_size():
    row = [RoundRecord(2, 3, 3, nodes=4), RoundRecord(0, 1), RoundRecord(1, 2, 3, nodes=4)]
    stats = Stats([row, [], [RoundRecord(0, 1)]])
    assert rounds_of(stats, "code", 0.7, "auto") == [
        {("code", 0.7, "auto", 4): (2, 5), ("code", 0.7, "auto", 1): (1, 1)},
        {("code", 0.7, "auto", 1): (1, 1)},
    ]


def test_the_interval_is_that_of_two_independent_ratios():
    new = [(1, 2), (3, 6), (1, 4)]
    old = [(2, 4), (2, 8), (4, 8)]
    found = difference(answers(CHAIN, *new), answers(CHAIN, *old))
    spread = 0.0
    means = []
    for pairs in (new, old):
        rounds = sum(pair[0] for pair in pairs)
        mean = sum(pair[1] for pair in pairs) / rounds
        spread += sum((tokens - mean * own) ** 2 for own, tokens in pairs) * 3 / 2 / rounds**2
        means.append(mean)
    assert found.estimate == pytest.approx(means[0] - means[1])
    assert found.high - found.estimate == pytest.approx(1.96 * math.sqrt(spread))
    assert found.estimate - found.low == pytest.approx(1.96 * math.sqrt(spread))


def test_groups_are_compared_with_their_like():
    old = answers(CHAIN, *[(10, 30)] * 20) + answers(TREE, *[(10, 50)] * 20)
    more_chains = answers(CHAIN, *[(10, 30)] * 38) + answers(TREE, *[(10, 50)] * 2)
    assert difference(more_chains, old).estimate == pytest.approx(0)
    assert fallen(more_chains, old) is None, "smaller trees are no worse head"
    more_plain = [{**answer, PLAIN: (30, 30)} for answer in old]
    assert fallen(more_plain, old) is None, "neither are rounds without drafts"
    other_kind = answers(("code", *CHAIN[1:]), *[(10, 11)] * 40)
    assert fallen(other_kind, old) is None, "nor other prompts"
    assert math.isnan(difference(other_kind, old).estimate)
    assert fallen(answers(CHAIN, (10, 11)), old) is None, "nor a single answer"
    assert fallen([], old) is None and fallen(old, []) is None


def test_a_head_that_drafts_large_trees_in_harder_texts_too_is_no_worse_one():
    old = answers(PLAIN, *[(30, 30)] * 30) + answers(TREE, *[(10, 50)] * 10)
    better = answers(TREE, *[(13, 52)] * 40)
    assert difference(better, old).high < 0, "it accepts less where the old one drafted, with fewer rounds in all"
    assert fallen(better, old) is None


def window(rng, rate, count=100):
    """Answers of 20 rounds in chains of 3, easier and harder ones, and some plain rounds."""
    found = []
    for _ in range(count):
        own = min(max(rate + rng.gauss(0, 0.1), 0.05), 0.95)
        tokens = 0
        for _ in range(20):
            accepted = 0
            while accepted < 3 and rng.random() < own:
                accepted += 1
            tokens += accepted + 1
        found.append({CHAIN: (20, tokens), PLAIN: (5, 5)})
    return found


def test_chance_seldom_returns_a_head_and_a_worse_one_is_returned():
    rng = random.Random(0)
    equal = [fallen(window(rng, 0.6), window(rng, 0.6)) is not None for _ in range(300)]
    assert sum(equal) <= 15, "2.5 % are expected"
    worse = [fallen(window(rng, 0.5), window(rng, 0.6)) is not None for _ in range(50)]
    assert sum(worse) >= 48
    better = [fallen(window(rng, 0.65), window(rng, 0.6)) is not None for _ in range(50)]
    assert sum(better) == 0
