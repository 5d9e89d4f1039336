"""Whether a head reads a prompt: by what that takes, what drafts would save, and how many tokens
are still to come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import generated, one_row_tree, random_ids

from headstart.inference import Conversation, SpeculativeLM, Target
from headstart.inference.drafters import adaptive
from headstart.inference.drafters.adaptive import AdaptiveDrafter, AnswerLengths
from headstart.inference.drafters.base import PrefillChunk
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.draft_model_state import DraftModelState
from headstart.inference.drafters.next_step import Choice
from headstart.inference.drafters.round import Round, Verdict
from headstart.inference.tuning.round_costs import RoundCosts

VOCAB = 20


def test_how_long_answers_are_is_learned():
    answers = AnswerLengths()
    assert answers.expected(2000) == 2000
    for _ in range(5):
        answers.add(50, 2000)
    assert 45 < answers.expected(2000) <= 50
    assert answers.expected(10) < 10
    cut = AnswerLengths()
    for _ in range(5):
        cut.add(64, 64)
    assert cut.expected(256) == 256, "answers that were cut tell nothing of their ends"


def test_of_rejected_drafts_nothing_is_read_later():
    """Another drafter drafted two tokens in each of three rounds, and none was accepted."""
    read: list[list[int]] = []

    def observe(state, features_BAF, tokens_BA, lengths_B):
        read.append(tokens_BA[0, : int(lengths_B)].tolist())
        return state

    rows = DraftModelState(SimpleNamespace(reads_from_start=False, observe=observe), None)
    rows.read_when_needed()
    nothing_BTF = torch.zeros(1, 3, 0)
    text_1T = torch.tensor([[1, 2, 3, 4]])
    rows.prefill(PrefillChunk(text_1T[:, :3], text_1T[:, 1:], nothing_BTF, torch.tensor([3])))
    for root in (4, 5, 6):
        tree = one_row_tree([root, 8, 9], [-1, 0, 1], 2)
        one_1 = torch.tensor([1])
        emitted_1A = torch.tensor([[root + 1, 9, 9]])
        path_1A = torch.tensor([[0, 1, 2]])
        verdict = Verdict(path_1A, one_1, one_1 + root, emitted_1A, nothing_BTF, one_1 < 0)
        rows.observe(Round(tree, tree, None, None, verdict, None, tokens=[[root + 1]]))
    rows.catch_up()
    assert read == [[2, 3, 4], [5, 6], [7]]


def of_itself(target: Target, clock: Any, costs: RoundCosts | None = None) -> SpeculativeLM:
    """The target drafts for itself, in chains of three: it is right about everything, if it has
    read everything."""
    drafter = make_drafter(target, target, "chain:3")
    return SpeculativeLM(target, AdaptiveDrafter([drafter], costs=costs, clock=clock))


COSTS = RoundCosts({1: 1.0, 2: 1.1}, draft=0.0, reading=0.1)


def read_after(lm: SpeculativeLM, clock: Any, answers: int, **settings: Any) -> list[int]:
    """Tokens read so far, after each answer to a prompt of 200 tokens."""
    read = []
    for seed in range(answers):
        generated(lm, random_ids(VOCAB, 1, 200, seed=seed), **settings)
        read.append(clock.read)
    return read


@pytest.mark.parametrize(("tokens", "reads"), [(8, False), (128, True)])
def test_a_long_prompt_is_read_for_long_answers_alone(target, clock, tokens, reads):
    """A prompt of 200 tokens takes 20 s to read; drafts are expected to save a quarter of one a
    token."""
    clock.reading = 0.1
    lm = of_itself(target, clock, COSTS)
    read_after(lm, clock, 3, max_new_tokens=tokens)
    assert (clock.read > 0) == reads


def test_what_reading_took_is_remembered(target, clock):
    """Expected to cost nothing, and far too dear: one prompt is read, and no more."""
    clock.reading = 1.0
    lm = of_itself(target, clock, RoundCosts({1: 1.0, 2: 1.1}, draft=0.0))
    read = read_after(lm, clock, 3, max_new_tokens=40)
    assert read[0] >= 200
    assert read[-1] == read[0]


def test_answers_that_end_early_earn_less(target, clock):
    """The limit is 500 tokens; after answers of twenty no prompt is read whose reading costs as
    much."""
    clock.reading = 0.1
    lm = of_itself(target, clock, COSTS)
    stops = [lambda ids, scores: ids.shape[1] >= 220]
    read = read_after(lm, clock, 6, max_new_tokens=500, stopping_criteria=stops)
    assert read[0] >= 200
    assert read[-1] == read[2]


def test_a_turn_that_was_decoded_plainly_is_read_in_its_order(target, clock, monkeypatch):
    """A head reads both prompts and the answer between them, when it drafts in the second turn."""
    lm = of_itself(target, clock)
    chosen = 0
    monkeypatch.setattr(adaptive, "choose", lambda record: Choice(chosen))
    past = Conversation()
    first = random_ids(VOCAB, 1, 9)
    found = generated(lm, first, max_new_tokens=8, past_key_values=past)
    chosen = 1
    second = torch.cat([found.sequences, random_ids(VOCAB, 1, 7, seed=1)], dim=1)
    stats = generated(lm, second, max_new_tokens=17, past_key_values=past).stats
    assert {record.returned for record in stats.rows[0]} == {4}
