"""Which candidate runs next, and what a step teaches: tables, and scripted answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from headstart.inference.drafters.next_step import (
    AVERAGED_STEPS,
    CREDIT,
    PROBE_SHARE,
    PROBE_STEPS,
    Candidate,
    Choice,
    Record,
    after_step,
    answer_begins,
    choose,
    expected_record,
    for_other_rows,
)

PLAIN = 0
TREE = 1
OTHER = 2


def timed(seconds: float, tokens: float, idle: float = 0.0) -> Candidate:
    return Candidate(seconds, tokens, 20, (seconds,) * PROBE_STEPS, idle)


def untimed(seconds: float, tokens: float, idle: float = math.inf) -> Candidate:
    return Candidate(seconds, tokens, idle=idle)


def steps_of(
    *candidates: Candidate, plain: int | None = PLAIN, last: int = PLAIN, **more
) -> Record:
    return Record(candidates, plain, last=last, **more)


def documented_example(idle: float) -> Record:
    """The example of the docstring of `choose`, in plain steps."""
    return steps_of(timed(1.0, 1.0), timed(1.5, 2.4), timed(1.2, 1.5, idle), last=TREE)


GOOD = timed(1.5, 2.4)
USELESS = timed(1.5, 1.0)
STEP = timed(1.0, 1.0)
SLOW_STEP = timed(2.0, 1.0)

CHOICES = {
    # the fastest leads
    "drafts that pay go on": (steps_of(STEP, GOOD, last=TREE), Choice(TREE)),
    "a leader that was timed once is probed": (
        steps_of(Candidate(1.0, 1.0, 2, (1.0,), 0.0), USELESS, last=TREE),
        Choice(PLAIN, True),
    ),
    "nothing was timed": (
        steps_of(untimed(1.0, 1.0), untimed(1.5, 1.4), untimed(1.8, 2.0)),
        Choice(OTHER, True),
    ),
    # probes
    "the example, too early": (documented_example(300.0), Choice(TREE)),
    "the example, 40 tokens later": (documented_example(340.0), Choice(OTHER, True)),
    "plain steps are probed, too": (
        steps_of(timed(1.0, 1.0, 241.0), GOOD, last=TREE),
        Choice(PLAIN, True),
    ),
    "plain steps, too early": (steps_of(timed(1.0, 1.0, 239.0), GOOD, last=TREE), Choice(TREE)),
    "one that promises more, at once": (
        steps_of(STEP, GOOD, untimed(2.0, 4.0), last=TREE),
        Choice(OTHER, True),
    ),
    "the one that waited longest": (
        steps_of(STEP, timed(1.5, 1.0, 900.0), timed(1.5, 1.0, 901.0)),
        Choice(OTHER, True),
    ),
    "a probe goes on": (steps_of(STEP, USELESS, last=TREE, probe_left=1), Choice(TREE)),
    "a probe of plain steps goes on": (
        steps_of(STEP, GOOD, probe_left=1, credit=-1.0),
        Choice(PLAIN),
    ),
    "a probe ends": (steps_of(STEP, USELESS, last=TREE, probe_left=0), Choice(PLAIN)),
    "a single tree": (steps_of(GOOD, plain=None), Choice(0)),
    # credit
    "credit is used up": (steps_of(STEP, GOOD, last=TREE, credit=-0.1), Choice(PLAIN)),
    "a probe on no credit": (
        steps_of(STEP, USELESS, last=TREE, probe_left=2, credit=-0.1),
        Choice(PLAIN),
    ),
    "drafts begin again too early": (steps_of(STEP, GOOD, credit=0.4), Choice(PLAIN)),
    "drafts begin again": (steps_of(STEP, GOOD, credit=0.6), Choice(TREE)),
    "a slow tree needs no more than all": (steps_of(STEP, timed(9.0, 10.0)), Choice(TREE)),
    "a probe is due, on no credit": (
        steps_of(STEP, timed(1.5, 1.0, 900.0), credit=0.4),
        Choice(PLAIN),
    ),
    "without plain steps, no credit": (
        steps_of(timed(1.0, 1.4), timed(1.5, 2.4), plain=None, last=1, credit=-9.0),
        Choice(TREE),
    ),
    # what the head has not read; drafts save 0.375 of a step per token, and a step
    # takes two seconds
    "the prefill is earned back": (
        steps_of(SLOW_STEP, timed(3.0, 2.4), unread_seconds=60.0, tokens_to_come=81.0),
        Choice(TREE),
    ),
    "the prefill is not earned back": (
        steps_of(SLOW_STEP, timed(3.0, 2.4), unread_seconds=60.0, tokens_to_come=79.0),
        Choice(PLAIN),
    ),
    "the prefill of a probe is felt": (
        steps_of(SLOW_STEP, timed(3.0, 1.0, 9999.0), unread_seconds=8.0, tokens_to_come=128.0),
        Choice(PLAIN),
    ),
    "the prefill of a probe is not felt": (
        steps_of(SLOW_STEP, timed(3.0, 1.0, 9999.0), unread_seconds=8.0, tokens_to_come=140.0),
        Choice(TREE, True),
    ),
    "the prefill counts as a loss": (
        steps_of(SLOW_STEP, timed(3.0, 1.0, 599.0), unread_seconds=8.0, tokens_to_come=140.0),
        Choice(PLAIN),
    ),
    "the prefill counts once": (
        steps_of(SLOW_STEP, timed(3.0, 1.0, 601.0), unread_seconds=8.0, tokens_to_come=140.0),
        Choice(TREE, True),
    ),
}


@pytest.mark.parametrize(("known", "choice"), CHOICES.values(), ids=CHOICES)
def test_the_next_step_follows_from_what_was_measured(known, choice):
    assert choose(known) == choice


BEGINNING = steps_of(STEP, untimed(1.5, 2.4), credit=1.0)
ALWAYS = steps_of(GOOD, USELESS, plain=None, credit=1.0)
DRAFTING = steps_of(STEP, GOOD, last=TREE, credit=1.0)
CREDITS = {
    # after a step of the tree, which costs 1.5 plain steps
    "a gain": (DRAFTING, Choice(TREE), 1.5, 4.0, 1.0 + 2.5 + 4 * PROBE_SHARE),
    "a loss": (DRAFTING, Choice(TREE), 1.5, 1.0, 1.0 - 0.5 + PROBE_SHARE),
    "a pause is not charged": (DRAFTING, Choice(TREE), 75.0, 1.0, 1.0 - 0.5 + PROBE_SHARE),
    "plain steps": (DRAFTING, Choice(PLAIN), 1.0, 1.0, 1.0 + PROBE_SHARE),
    "the first step of a tree": (BEGINNING, Choice(TREE, True), 30.0, 1.0, 1.0 + PROBE_SHARE),
    "without plain steps": (ALWAYS, Choice(TREE), 1.5, 1.0, 1.0 + PROBE_SHARE),
}


@pytest.mark.parametrize(
    ("known", "choice", "seconds", "tokens", "credit"), CREDITS.values(), ids=CREDITS
)
def test_credit_is_what_drafts_may_lose(known, choice, seconds, tokens, credit):
    assert after_step(known, choice, seconds, tokens).credit == pytest.approx(credit)


def test_gains_of_an_answer_are_not_lost_in_the_next():
    assert answer_begins(steps_of(STEP, GOOD, credit=50.0)).credit == CREDIT
    assert answer_begins(steps_of(STEP, GOOD, credit=-1.0)).credit == -1.0


def test_a_step_is_averaged_timed_and_counted():
    known = steps_of(untimed(1.0, 1.0), untimed(1.5, 2.0), untimed(3.0, 2.0))
    known = after_step(known, Choice(TREE, True), 20.0, 4.0)
    assert known.candidates[TREE].tokens == 3.0, "what was expected counts as one step"
    assert known.probe_left == PROBE_STEPS - 1
    for _ in range(2):
        known = after_step(known, Choice(TREE), 0.75, 3.0)
    assert known.candidates[TREE].tokens == 3.0
    assert known.candidates[TREE].steps == 4
    assert known.seconds(TREE) == 0.75, "a slow first step is not timed"
    assert (known.seconds(PLAIN), known.seconds(OTHER)) == (0.5, 1.5), "as expected beside it"
    assert [candidate.idle for candidate in known.candidates] == [math.inf, 0.0, math.inf]
    known = after_step(known, Choice(PLAIN), 0.5, 1.0)
    assert known.probe_left == 0
    for _ in range(100):
        known = after_step(known, Choice(TREE), 0.75, 3.0)
    assert known.candidates[TREE].steps == AVERAGED_STEPS
    assert len(known.candidates[TREE].timed) == 2 * PROBE_STEPS - 1


def test_at_another_number_of_rows_what_was_measured_is_expected():
    there = for_other_rows(
        steps_of(timed(2.0, 1.0), timed(3.0, 2.4), untimed(4.0, 2.0), credit=2.0)
    )
    assert [there.seconds(number) for number in range(3)] == [2.0, 3.0, 4.0]
    assert [candidate.timed for candidate in there.candidates] == [(), (), ()]
    assert (there.credit, there.last) == (2.0, None)
    assert choose(there) == Choice(TREE, True)


def test_the_candidate_that_is_expected_to_emit_one_token_is_a_plain_step():
    assert expected_record([1.0, 1.0, 1.5], [1.0, 1.0, 2.0], 0).plain == 0, "and not the root alone"
    assert expected_record([1.5, 1.8], [1.5, 2.0], None).plain is None


# Answers on a machine of the test's own: seconds in plain steps.

Emits = Callable[[int, int], int]
"""Tokens of a step, by candidate and by the tokens written so far."""


def simulated_answer(
    known: Record, costs: list[float], emits: Emits, tokens: int
) -> tuple[Record, float, list[int]]:
    """An answer: the record after it, its seconds, and the candidates of its steps."""
    known = answer_begins(known)
    taken = 0.0
    written = 0
    steps = []
    while written < tokens:
        known = replace(known, unread_seconds=0.0, tokens_to_come=tokens - written)
        choice = choose(known)
        count = 1
        if choice.candidate != PLAIN:
            count = emits(choice.candidate, written)
        known = after_step(known, choice, costs[choice.candidate], count)
        taken += costs[choice.candidate] * min(1.0, (tokens - written) / count)
        written += count
        steps.append(choice.candidate)
    return known, taken, steps


def never(candidate: int, written: int) -> int:
    return 1


@pytest.mark.parametrize("cost", [1.2, 2.0, 5.0])
def test_drafts_that_never_pay_are_probed_on_their_share_of_the_tokens(cost):
    tokens = 20_000
    known = expected_record([1.0, cost], [1.0, 2.0], 0)
    _, seconds, steps = simulated_answer(known, [1.0, cost], never, tokens)
    assert seconds - tokens <= PROBE_SHARE * tokens + CREDIT + 2 * cost
    assert steps.count(TREE) * (cost - 1) >= 0.5 * PROBE_SHARE * tokens


def test_drafts_that_cease_to_pay_run_until_their_credit_is_used_up():
    """Each rejected step of a tree that costs two plain steps loses one token."""
    known = expected_record([1.0, 2.0], [1.0, 2.2], 0)
    known, _, _ = simulated_answer(known, [1.0, 2.0], lambda *_: 4, 600)
    known, seconds, steps = simulated_answer(known, [1.0, 2.0], never, 128)
    assert steps[: int(CREDIT) + 1] == [TREE] * int(CREDIT) + [PLAIN]
    assert seconds <= 128 / 0.95
    known, seconds, steps = simulated_answer(known, [1.0, 2.0], lambda *_: 4, 600)
    assert seconds <= 0.7 * 600, "and they are taken up again when they pay"


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize(("tokens", "ideal"), [(3, 0.5), (1, 1.0)])
def test_a_machine_that_changes_its_speed_is_measured_anew(factor, tokens, ideal):
    known = expected_record([1.0, 1.5], [1.0, 2.0], 0)
    for speed in (1.0, factor, factor):
        costs = [speed, 1.5 * speed]
        known, seconds, _ = simulated_answer(known, costs, lambda *_: tokens, 1000)
    assert seconds <= 1.04 * ideal * 1000 * factor


@pytest.mark.parametrize("when", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_pause_does_not_decide(when, tokens):
    """One step takes fifty times as long, whichever it is."""
    known = expected_record([1.0, 1.5], [1.0, 2.0], 0)
    steps = []
    for number in range(400):
        choice = choose(known)
        steps.append(choice.candidate)
        count = tokens if choice.candidate == TREE else 1
        pause = 50 if number == when else 1
        known = after_step(known, choice, pause * [1.0, 1.5][choice.candidate], count)
    best = TREE if tokens == 3 else PLAIN
    assert steps[-300:].count(best) >= 280


@pytest.mark.parametrize("cost", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_answer_is_slower_than_0_95_of_plain_steps(cost, seed):
    """In each third of an answer drafts are accepted with another chance: never, or nearly always.

    The first answer, in which all candidates are new, is left out.
    """
    chance = random.Random(seed)
    costs = [1.0, cost, 1.2 * cost]
    known = expected_record(costs, [1.0, 2.0, 2.5], 0)
    known, _, _ = simulated_answer(known, costs, never, 128)
    for _ in range(25):
        rates = [chance.choice([0.0, 0.0, 0.3, 0.6, 0.9]) for _ in range(3)]

        def emits(candidate, written, rates=rates):
            count = 1
            while count <= 2 * candidate and chance.random() < rates[written // 43]:
                count += 1
            return count

        known, seconds, _ = simulated_answer(known, costs, emits, 128)
        assert seconds <= 128 / 0.95
