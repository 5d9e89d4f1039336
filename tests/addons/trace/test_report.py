"""The report on hand-made traces, whose figures can be counted."""

from __future__ import annotations

import math

import pytest
from messages import refused

from headstart.addons.trace.report import calibration, token_kind, trace_report

VOCAB = [" the", "boat", " 12", "\n", ".", "<|im_end|>", "⟨E2 96⟩"]
THE, BOAT, NUMBER, NEWLINE, STOP, END, HALF = range(len(VOCAB))


def node(token, parent, status, q=0.5, p=0.25):
    return {"v": token, "u": parent, "q": q, "p": p, "s": status}


def a_round(nodes, following, emitted, draft_ms=4.0):
    times = {"ms": 12.0, "parts": {"draft": draft_ms, "target": 6.0}, "fallback": ""}
    return {**times, "nodes": nodes, "next": following, "emitted": emitted}


def a_trace(rounds, depth=2, plain=None):
    tokens = sum(found["emitted"] for found in rounds)
    stats = {"tokens": tokens, "rounds": len(rounds), "acceptance_length": tokens / len(rounds)}
    stats |= {"acceptance_rate_by_depth": [None] * depth, "tokens_per_second": 50.0}
    vocab = [{"id": index, "t": text} for index, text in enumerate(VOCAB)]
    asked = {"vocab": vocab, "prompt": "ask", "rule": "greedy"}
    return {**asked, "rounds": rounds, "stats": stats, "plain": plain}


ROOT = node(THE, -1, 1, None, None)
BOTH = a_round(
    [ROOT, node(BOAT, 0, 1, 0.9), node(NUMBER, 1, 1, 0.7), node(STOP, 0, 0, 0.1)], NEWLINE, 3
)
"""Two drafts stand; the sibling of the first was compared and does not."""
MISSED = a_round([ROOT, node(BOAT, 0, 0, 0.8), node(NUMBER, 1, -1, 0.6)], STOP, 1)
CUT = a_round([ROOT, node(BOAT, 0, 1, 0.9), node(NUMBER, 1, 1, 0.9)], NEWLINE, 1)
"""The text ended after the first of two accepted drafts."""
PLAIN = a_round([ROOT], BOAT, 1, 0.0)


def test_kinds_and_tokens_count_positions_and_misses():
    report = trace_report([a_trace([BOTH, MISSED, CUT, PLAIN])])
    kinds = {each.name: (each.positions, each.misses) for each in report.kinds}
    assert kinds == {"word continuation": (2, 0), "number": (1, 0), "punctuation": (1, 1)}
    (worst,) = report.tokens
    assert (worst.name, worst.misses, worst.instead, worst.rejection_rate) == (".", 1, "boat", 1.0)


def test_acceptance_is_that_of_stats_and_depths_have_their_price():
    report = trace_report([a_trace([BOTH, MISSED, CUT, PLAIN])])
    assert (report.stats.tokens, report.stats.rounds, report.stats.plain_rounds) == (6, 4, 1)
    first, second = report.depths
    # a plain round is a round; CUT ended
    assert (first.acceptance_rate, second.acceptance_rate) == (2 / 4, 1 / 1)
    assert (first.gained, second.gained) == (2 / 4, 1 / 4)
    assert (first.nodes, second.nodes) == (4 / 4, 3 / 4)
    assert first.draft_ms == second.draft_ms == (3 * 2.0) / 4
    assert first.gained_per_ms == pytest.approx((2 / 4) / 1.5)


def test_calibration_compares_probability_with_what_stands():
    report = trace_report([a_trace([BOTH, MISSED])])
    bins = {round(each.draft_prob, 2): (each.drafts, each.accepted) for each in report.calibration}
    assert bins == {0.9: (1, 1.0), 0.7: (1, 1.0), 0.1: (1, 0.0), 0.8: (1, 0.0)}
    assert report.calibration_error == pytest.approx((0.1 + 0.3 + 0.1 + 0.8) / 4)
    even = calibration(
        [(0.25, 0.3, hit) for hit in (True, False, False, False)] + [(1.0, 1.0, True)]
    )
    assert [(each.drafts, each.accepted) for each in even] == [(4, 0.25), (1, 1.0)]


def test_prompts_stand_by_themselves_and_sources_without_probabilities_have_no_calibration():
    plain = {"ms_per_token": 8.0, "tokens_per_second": 125.0, "same_text": True}
    silent = [{**ROOT}, node(BOAT, 0, 0, None), node(NUMBER, 0, 1, None)]
    report = trace_report([a_trace([BOTH], plain=plain), a_trace([a_round(silent, END, 2)])])
    assert [each.rejection_rate for each in report.prompts] == [0.0, 0.0]
    measured, unmeasured = (each.plain_tokens_per_second for each in report.prompts)
    assert measured == 125.0 and math.isnan(unmeasured)
    assert report.plain_ms == 8.0 and report.stats.tokens == 5
    nothing = trace_report([a_trace([a_round(silent, END, 2)])])
    assert nothing.calibration == [] and math.isnan(nothing.calibration_error)
    assert "acceptance length 2.00" in nothing.summary()
    with refused("trace"):
        trace_report([])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" the", "word start"),
        ("boat", "word continuation"),
        ("שלום", "word continuation"),
        (" 12", "number"),
        ("\n\n", "newline"),
        ("  ", "whitespace"),
        (".", "punctuation"),
        (" (", "punctuation"),
        ("={", "code symbol"),
        ("<|im_end|>", "special token"),
        ("</s>", "special token"),
        ("⟨E2 96⟩", "part of a character"),
        ("👩", "other"),
        ("", "other"),
    ],
)
def test_tokens_have_kinds(text, kind):
    assert token_kind(text) == kind
