"""A drafter that chooses step by step: an autoregressive step, or one of several trees.

It times steps, keeps a record of them, and lets `next_step.choose` decide. The choice depends on
the clock and on past acceptance alone, so the output stays exact whatever is chosen.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from ..trees.tree import DraftTree
from ..trees.tree_spec import DynamicShape, TreePolicy
from ..tuning.round_costs import RoundCosts
from ..tuning.tree_search import default_length
from .base import BatchDrafter, DraftContext, NoDraft, PrefillChunk, replaced_rows, selected_rows
from .next_step import (
    Choice,
    Record,
    after_step,
    answer_begins,
    choose,
    expected_record,
    for_other_rows,
)
from .round import Round
from .tree_policies import HeadDrafter

TIMED_READING = 16
"""Tokens per row that a head must read at once for that to be timed: fewer are mostly launches."""


class AdaptiveDrafter(BatchDrafter):
    """Autoregressive steps, or one of several trees of one head: whichever has been fastest.

    Records are kept from one generation to the next. A step's time is all of it: draft, forward,
    verification, host, and what the drafter reads of the step. Prompts, and tokens of
    autoregressive steps, are read by a head when it drafts again, which is weighed, or when other
    rows join the batch, which is not.

    When sampling from sampled trees, it always uses the first tree, so that a seed fixes the text.
    """

    def __init__(
        self,
        trees: Sequence[BatchDrafter],
        plain: bool = True,
        costs: RoundCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Wrap one drafter of any kind, or several trees of one head.

        Args:
            trees: the drafters to choose from.
            plain: whether autoregressive steps are a choice, too.
            costs: costs of steps on this machine, for the first choices; None if not measured.
            clock: seconds.
        """
        if not trees:
            raise ValueError("adaptive drafting needs a drafter")
        if len({tree.kind for tree in trees}) > 1:
            raise ValueError(
                "top-k trees and sampled trees have different rules: choose among either"
            )
        rows = [tree.model_state if isinstance(tree, HeadDrafter) else tree for tree in trees]
        if any(other is not rows[0] for other in rows):
            raise ValueError("several trees to choose from must be of the same head")
        self.trees = list(trees)
        self.reader = self.trees[0]
        """The tree that reads the text; the others share its head's state."""
        self.parts = self.trees
        self.plain = plain
        self.costs = costs
        self.clock = clock
        self.feature_layers = self.reader.feature_layers
        self.kind = self.reader.kind
        self.max_nodes = max(tree.max_nodes for tree in trees)
        if plain and isinstance(self.reader, HeadDrafter):
            self.reader.model_state.read_when_needed()
        self.records: dict[tuple[bool, int], Record] = {}
        """What was measured, by whether texts are sampled and by the rows decoded together."""
        self.answers = AnswerLengths()
        self.choice: Choice | None = None
        """What the current step is; None where nothing was chosen."""
        self._choice_ahead: Choice | None = None
        """What the step is that was proposed ahead."""
        self._sampling = False
        self._limit = math.inf
        """Tokens that a row may get in steps."""
        self._written: list[int] = []
        """Tokens that each row has got in steps."""
        self._read_seconds: float | None = None
        """What the head took to read a token of a prompt, the last time that was timed."""
        self._started = 0.0
        """When the current step began."""

    def __repr__(self) -> str:
        choices = ["plain steps"] if self.plain else []
        choices += map(repr, self.trees)
        return f"AdaptiveDrafter({' | '.join(choices)})"

    def fresh(self) -> Self:
        other = copy.copy(self)
        other.reader = self.reader.fresh()
        other.trees = [other.reader]
        for tree in self.trees[1:]:
            assert isinstance(tree, HeadDrafter) and isinstance(other.reader, HeadDrafter)
            other.trees.append(tree.on(other.reader.model_state))
        other.parts = other.trees
        other._written = []
        other.choice = None
        other._choice_ahead = None
        return other

    def begin(self, context: DraftContext) -> None:
        self._begin(context)
        self.reader.begin(context)

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        self._begin(context)
        self.reader.resume(context, kept, state, whole)

    def _begin(self, context: DraftContext) -> None:
        self.choice = None
        self._choice_ahead = None
        self._note_lengths(self._written)
        for key, record in self.records.items():
            self.records[key] = answer_begins(record)
        # One token came with the prompt.
        self._limit = math.inf if context.new_tokens is None else context.new_tokens - 1
        self._written = [0] * context.batch_size
        self._sampling = context.draft_probs is not None
        for tree in self.trees[1:]:
            assert isinstance(tree, HeadDrafter)
            tree.set_sampling(context)

    def saved_state(self) -> Any:
        return self.reader.saved_state()

    def prefill(self, chunk: PrefillChunk) -> None:
        self.reader.prefill(chunk)

    def propose(self, roots_B: Tensor) -> DraftTree:
        if self._sampling and self.kind != "top_k":
            return self.reader.propose(roots_B)
        self._started = self.clock()
        batch = len(roots_B)
        record = self._record(batch, roots_B.device)
        # The choice knows what is about to be read and written.
        unread = 0
        if self.plain and isinstance(self.reader, HeadDrafter):
            unread = batch * self.reader.model_state.unread
        unread_seconds = 0.0
        if unread > 0:
            unread_seconds = unread * self._seconds_to_read(record, roots_B.device)
        mean = sum(self._written) / len(self._written)
        to_come = self.answers.expected(max(self._limit - mean, 0.0))
        record = replace(record, unread_seconds=unread_seconds, tokens_to_come=to_come)
        self.records[self._sampling, batch] = record
        self.choice = choose(record)
        self._choice_ahead = None

        drafter = self._drafter_of(self.choice)
        # What the head has not read is timed apart. An accelerator would have to be waited for:
        # there, reading is part of the step.
        if (
            isinstance(drafter, HeadDrafter)
            and unread >= batch * TIMED_READING
            and roots_B.device.type == "cpu"
            and not drafter.shrinks_to_root(batch)
        ):
            drafter.model_state.catch_up()
            now = self.clock()
            self._read_seconds = (now - self._started) / unread
            self._started = now
        return drafter.propose(roots_B)

    def stand_aside(self) -> None:
        """Let another drafter draft this round, which tells nothing about the trees here."""
        self.choice = None

    def _drafter_of(self, choice: Choice) -> BatchDrafter:
        """The drafter of a step: one of the trees, or none."""
        if self.plain and choice.candidate == 0:
            return NoDraft("slower")
        return self.trees[choice.candidate - self.plain]

    def propose_ahead(self, roots_B: Tensor) -> DraftTree | None:
        here = (self._sampling, len(roots_B))
        if self.choice is None or here not in self.records:
            return None
        # The step that the host has not read counts as those of its candidate usually do.
        record = self.records[here]
        number = self.choice.candidate
        usual = record.candidates[number].tokens
        choice = choose(after_step(record, self.choice, record.seconds(number), usual))
        proposed = self._drafter_of(choice).propose_ahead(roots_B)
        if proposed is not None:
            self._choice_ahead = choice
        return proposed

    def _seconds_to_read(self, record: Record, device: torch.device) -> float:
        """Expected seconds in which the head reads a token of a prompt."""
        if self._read_seconds is not None:
            return self._read_seconds
        costs = self.costs or RoundCosts.assumed(device)
        assert record.plain is not None
        return costs.reading / costs.seconds(1, 0) * record.seconds(record.plain)

    def _note_lengths(self, lengths: Sequence[int]) -> None:
        """Note the lengths of answers that have ended."""
        for length in lengths:
            self.answers.add(length, self._limit)

    def tokens_a_plain_step(self, rows: int, device: torch.device) -> float:
        """Tokens that each of some rows is expected to get in the time of a plain step."""
        record = self._record(rows, device)
        speed = max(record.speed(number) for number in range(len(record.candidates)))
        if record.plain is not None:
            return speed * record.seconds(record.plain)
        costs = self.costs or RoundCosts.assumed(device)
        first = record.candidates[0]
        return speed * record.seconds(0) * costs.plain / first.expected_seconds

    def observe_ahead(self, finished: Round) -> None:
        self.reader.observe_ahead(finished)

    def take_back(self) -> None:
        self._choice_ahead = None
        self.reader.take_back()

    def observe(self, finished: Round) -> None:
        before_reading = self.clock()
        self.reader.observe(finished)
        emitted = [len(tokens) for tokens in finished.tokens]
        for row, count in enumerate(emitted):
            self._written[row] += count
        if self.choice is None:  # nothing was chosen, or another drafter decided not to draft
            return
        here = (self._sampling, len(emitted))
        record = self.records[here]
        # Autoregressive steps do not pay for a head that follows the text.
        is_plain = self.choice.candidate == record.plain
        ended = before_reading if is_plain else self.clock()
        decoded = len(emitted) - len(finished.idle)
        seconds = ended - self._started
        self.records[here] = after_step(record, self.choice, seconds, sum(emitted) / decoded)
        # A step that was proposed ahead begins now, when its turn comes.
        self.choice = self._choice_ahead
        self._choice_ahead = None
        self._started = self.clock()

    def select(self, rows_R: Tensor) -> None:
        rows = rows_R.tolist()  # sync: when rows have ended
        self._note_lengths([length for row, length in enumerate(self._written) if row not in rows])
        self._written = selected_rows(self._written, rows_R)
        self.reader.select(rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self._note_lengths(selected_rows(self._written, rows_R))
        self._written = replaced_rows(self._written, rows_R, other._written)
        self.reader.replace(rows_R, other.reader)

    def _record(self, rows: int, device: torch.device) -> Record:
        """The record at this number of rows; at a new one, from the nearest that is known."""
        here = (self._sampling, rows)
        if here in self.records:
            return self.records[here]
        if not self.records:
            return self._expected_record(device)

        def distance(other: tuple[bool, int]) -> tuple[bool, float]:
            sampling, other_rows = other
            return sampling != self._sampling, abs(math.log(other_rows / rows))

        return for_other_rows(self.records[min(self.records, key=distance)])

    def _expected_record(self, device: torch.device) -> Record:
        """The candidates before any step was timed."""
        costs = self.costs or RoundCosts.assumed(device)
        seconds = []
        tokens = []
        if self.plain:
            seconds.append(costs.seconds(1, 0))
            tokens.append(1.0)
        for tree in self.trees:
            depth = tree.depth if isinstance(tree, HeadDrafter) else 0
            seconds.append(costs.seconds(tree.max_nodes, depth))
            tokens.append(default_length(_shape(tree)))
        return expected_record(seconds, tokens, 0 if self.plain else None)


def _shape(tree: BatchDrafter) -> TreePolicy:
    """The shape of a drafter's trees, or one as large."""
    if isinstance(tree, HeadDrafter):
        return tree.shape
    return DynamicShape(max(tree.max_nodes, 2), max(tree.max_nodes - 1, 1))


class AnswerLengths:
    """How many tokens answers have: every token is the last one with the same probability.

    What the prefill of a head costs is earned back by the tokens to come.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of all answers so far."""
        self.ended = 0
        """Answers that ended before their limit."""

    def add(self, tokens: int, limit: float) -> None:
        """Note an answer that has ended, or was cut at the limit."""
        self.tokens += tokens
        self.ended += 0 < tokens < limit

    def expected(self, limit: float) -> float:
        """Tokens that an answer is expected to go on for, of which `limit` are allowed."""
        if self.ended == 0:
            return limit
        ending = self.ended / self.tokens
        return (1 - (1 - ending) ** limit) / ending
