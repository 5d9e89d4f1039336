"""Adaptive speculation as two pure functions: which candidate runs next, and what a step teaches.

A candidate is a plain (autoregressive) step or a step with one draft tree. Its speed is the tokens
that its steps emit over the seconds that they take:

    record ── choose ──► choice ── (the step runs and is timed) ── after_step ──► next record

`choose` aims at what a user feels: an answer of 128 tokens or more is never slower than 0.95 of
plain steps. Hence drafts run on credit. It holds the tokens that they may lose to plain steps, at
most `CREDIT` when an answer begins; it grows by what drafts gain and by `PROBE_SHARE` of the
tokens, and shrinks by what they lose. Where it is used up, plain steps run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

PROBE_SHARE = 0.01
"""Tokens that probes may lose, per generated token: a hundredth is less than the noise of a
benchmark."""
PROBE_STEPS = 4
"""Steps of a probe: the first one is slow, because weights are not in the cache; the median of four
is not."""
CREDIT = 2.5
"""Tokens that drafts may lose to plain steps when an answer begins: with `PROBE_SHARE`, 0.03 of 128
tokens; the rest of 0.05 is for slow first steps."""
READING_SHARE = 0.03
"""Plain steps that the prefill of a head may take for a probe, per token to come: what `CREDIT`
leaves of 0.05."""
AVERAGED_STEPS = 48
"""Steps of the exponential average of tokens per step: over a third of it, chance decides."""


@dataclass(frozen=True)
class Candidate:
    """A plain step, or a step with one tree, as measured so far."""

    expected_seconds: float
    """Seconds of a step before one was timed; only ratios between candidates count."""
    tokens: float
    """Tokens per step and row: the acceptance length."""
    steps: int = 1
    """Steps that `tokens` is known from, at most `AVERAGED_STEPS`; what was expected counts as
    one."""
    timed: tuple[float, ...] = ()
    """Seconds of its latest steps, of which a probe is the majority."""
    idle: float = math.inf
    """Tokens generated since it ran last; infinity if it never did."""


@dataclass(frozen=True)
class Record:
    """All that `choose` knows."""

    candidates: tuple[Candidate, ...]
    plain: int | None
    """The candidate that is a plain step; None where every step drafts."""
    credit: float = CREDIT
    """Tokens that drafts may lose to plain steps."""
    last: int | None = None
    """The candidate of the latest step; None before the first."""
    probe_left: int = 0
    """Steps that are left of a probe of `last`."""
    unread_seconds: float = 0.0
    """Seconds in which the head would read the text that it has not read, before it drafts."""
    tokens_to_come: float = math.inf
    """Expected tokens to come in each row."""

    def seconds(self, number: int) -> float:
        """Seconds of a candidate's step: the median, or as expected relative to those timed."""
        candidate = self.candidates[number]
        if candidate.timed:
            return median_low(candidate.timed)
        ratios = [
            median_low(other.timed) / other.expected_seconds
            for other in self.candidates
            if other.timed
        ]
        return candidate.expected_seconds * (median_low(ratios) if ratios else 1.0)

    def speed(self, number: int) -> float:
        """Tokens per second and row."""
        return self.candidates[number].tokens / self.seconds(number)


@dataclass(frozen=True)
class Choice:
    """The next step."""

    candidate: int
    begins_probe: bool = False


def choose(record: Record) -> Choice:
    """The candidate of the next step, and whether it begins a probe.

    An example: plain steps take 10 ms; tree A takes 15 ms and emits 2.4 tokens, 160 per second;
    tree B takes 12 ms and emits 1.5, 125 per second, and ran last 300 tokens ago. A leads. A probe
    of B takes 4 * 12 ms, in which A emits 7.7 tokens and B 6: it loses 1.7. B may lose 0.01 of its
    300 tokens, divided by the two candidates that wait: 1.5. So A runs, and 40 tokens later B.
    """
    plain = record.plain
    numbers = range(len(record.candidates))

    def credit_covers(number: int) -> bool:
        """Whether a candidate may run, even if all its drafts are rejected."""
        if plain is None or number == plain:
            return True
        rejected = record.seconds(number) / record.seconds(plain) - 1
        return record.credit >= min(rejected, CREDIT)

    # 1. A probe goes on to its end.
    if record.probe_left > 0 and record.last is not None and credit_covers(record.last):
        return Choice(record.last)

    # 2. The fastest candidate that was timed leads.
    timed = [number for number in numbers if record.candidates[number].timed]
    leader = max(timed or numbers, key=record.speed)

    # 3. Plain steps take its place where the credit is used up, or where drafts would save less
    #    on the tokens to come than the prefill of the head takes.
    if plain is not None and leader != plain:
        saved_per_token = 1 / record.speed(plain) - 1 / record.speed(leader)
        saves = record.tokens_to_come * saved_per_token > record.unread_seconds
        if not credit_covers(leader) or (record.unread_seconds > 0 and not saves):
            leader = plain

    # 4. A leader that was hardly timed is itself probed: one slow step must not decide.
    leads = Choice(leader, len(record.candidates[leader].timed) < PROBE_STEPS)
    if not timed:
        return leads

    # 5. No other probe where the prefill would be felt in this answer.
    speed = record.speed(leader)
    if record.unread_seconds * speed > READING_SHARE * record.tokens_to_come:
        return leads

    # 6. Of the others, that one is probed which waits longest and may lose by now what a probe is
    #    expected to lose: nothing, if it promises to be faster.
    others = [number for number in numbers if number != leader]
    due = []
    for number in others:
        candidate = record.candidates[number]
        lost = PROBE_STEPS * (record.seconds(number) * speed - candidate.tokens)
        if number != plain:
            lost += record.unread_seconds * speed
        if lost <= PROBE_SHARE * candidate.idle / len(others) and credit_covers(number):
            due.append(number)
    if not due:
        return leads
    longest_idle = max(due, key=lambda number: record.candidates[number].idle)
    return Choice(longest_idle, begins_probe=True)


def after_step(record: Record, choice: Choice, seconds: float, tokens: float) -> Record:
    """The record after a step that took `seconds`, prefill excluded, and emitted `tokens` per row.

    The first step of a candidate is neither timed nor charged: it may compile kernels.
    """
    ran = record.candidates[choice.candidate]
    steps = min(ran.steps + 1, AVERAGED_STEPS)
    is_first = ran.idle == math.inf
    latest = ran.timed if is_first else (*ran.timed, max(seconds, 1e-9))  # a clock may stand still
    candidates = [replace(other, idle=other.idle + tokens) for other in record.candidates]
    candidates[choice.candidate] = replace(
        ran,
        tokens=ran.tokens + (tokens - ran.tokens) / steps,
        steps=steps,
        timed=latest[-(2 * PROBE_STEPS - 1) :],
        idle=0.0,
    )
    probe_left = max(record.probe_left - 1, 0)
    if choice.begins_probe:
        probe_left = PROBE_STEPS - 1
    elif choice.candidate != record.last:
        probe_left = 0
    measured = replace(
        record, candidates=tuple(candidates), last=choice.candidate, probe_left=probe_left
    )

    credit = record.credit + PROBE_SHARE * tokens
    if record.plain is not None and choice.candidate != record.plain and not is_first:
        plain_steps = measured.seconds(choice.candidate) / measured.seconds(record.plain)
        credit += tokens - plain_steps
    return replace(measured, credit=credit)


def answer_begins(record: Record) -> Record:
    """The record for another answer: what drafts gained in earlier ones is not theirs to lose."""
    return replace(record, credit=min(record.credit, CREDIT), probe_left=0)


def expected_record(seconds: Sequence[float], tokens: Sequence[float], plain: int | None) -> Record:
    """The record before any step: expected seconds and tokens per step of each candidate."""
    candidates = [Candidate(*pair) for pair in zip(seconds, tokens, strict=True)]
    return Record(tuple(candidates), plain)


def for_other_rows(record: Record) -> Record:
    """Start a record for another number of rows, or for sampling in place of greedy decoding.

    Seconds that were measured there are the expected seconds here; nothing counts as timed.
    """
    candidates = []
    for number, candidate in enumerate(record.candidates):
        candidates.append(replace(candidate, expected_seconds=record.seconds(number), timed=()))
    return replace(record, candidates=tuple(candidates), last=None, probe_left=0)
