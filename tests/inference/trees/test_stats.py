"""Acceptance statistics by their definition."""

from __future__ import annotations

import math

import pytest

from headstart.inference import Stats
from headstart.inference.trees.stats import RoundRecord


def two_rows():
    """Two rows in three rounds: a chain of 3, a plain round, and a chain of 2 whose text ends
    early."""
    rows = [
        [RoundRecord(3, 4, 3, 0), RoundRecord(0, 1, 0, 1), RoundRecord(2, 2, 2, 2)],
        [RoundRecord(1, 2, 3, 0), RoundRecord(0, 1, 0, 1)],
    ]
    seconds = {"prefill": 9.0, "draft": 1.0, "target": 3.0, "verify": 0.5, "cache": 0.5}
    return Stats(rows, 3, seconds, [0.4, 0.1, 0.2])


def test_a_tokens_time_is_its_share_of_the_round():
    assert sorted(two_rows().token_seconds) == pytest.approx(
        sorted([0.1] * 4 + [0.2] * 2 + [0.1] * 2 + [0.1] * 2)
    )


def of_pairs(*pairs):
    return [RoundRecord(accepted, returned) for accepted, returned in pairs]


def test_acceptance_length_counts_the_bonus_token_and_what_the_last_round_returns():
    stats = Stats([of_pairs((2, 3), (0, 1), (3, 2))], max_depth=3)
    assert stats.tokens == 6
    assert stats.acceptance_length == 2


def test_acceptance_rate_by_depth_is_conditional_and_a_cut_round_says_nothing_of_what_was_cut():
    # accepted 2, 0 and 1 of 3; the last round accepted 3 but only 1 token was returned
    stats = Stats([of_pairs((2, 3), (0, 1), (1, 2), (3, 1))], max_depth=3)
    assert stats.acceptance_rate_by_depth == [3 / 4, 1 / 2, 0 / 1]


def test_no_round_gives_nan_and_not_a_crash():
    stats = Stats([[]], max_depth=2)
    assert math.isnan(stats.acceptance_length)
    assert all(map(math.isnan, stats.acceptance_rate_by_depth))
    assert all(map(math.isnan, stats.acceptance_length_interval))


def test_the_interval_is_that_of_a_ratio_over_prompts():
    assert Stats(
        [of_pairs((1, 2)), of_pairs((1, 2), (1, 2))]
    ).acceptance_length_interval == pytest.approx((2, 2))
    rows = [of_pairs((1, 2)), of_pairs((1, 2), (1, 2), (1, 2)), of_pairs((3, 4))]
    stats = Stats(rows, max_depth=3)
    mean = 12 / 5
    squares = (2 - mean) ** 2 + (6 - 3 * mean) ** 2 + (4 - mean) ** 2
    half = 1.96 * math.sqrt(squares * 3 / 2) / 5
    assert stats.acceptance_length_interval == pytest.approx((mean - half, mean + half))


def test_merging_adds_rows_and_times_and_keeps_every_tokens_time():
    left = Stats([of_pairs((0, 1))], 1, {"draft": 1.0})
    right = Stats([of_pairs((2, 3))], 2, {"draft": 2.0, "target": 1.0})
    merged = Stats.merged([left, right])
    assert merged.acceptance_length == 2
    assert merged.max_depth == 2
    assert merged.seconds == {"draft": 3.0, "target": 1.0}
    assert sorted(Stats.merged([two_rows(), two_rows()]).token_seconds) == sorted(
        two_rows().token_seconds * 2
    )


def test_parts_of_a_round_are_those_of_its_whole_batch():
    """Two rows share two rounds: a round's mean time is not divided among its rows."""
    rows = [[RoundRecord(1, 2, number=0), RoundRecord(1, 2, number=1)] for _ in range(2)]
    stats = Stats(rows=rows, round_seconds=[0.5, 0.7], seconds={"draft": 0.4, "target": 0.8})
    parts = stats.round_parts
    assert (parts["draft"], parts["target"]) == pytest.approx((0.2, 0.4))
    assert Stats().round_parts == {}
