"""Continuous batching: a waiting prompt begins where a row has ended, and nobody's text changes."""

from __future__ import annotations

import pytest
import torch
from helpers import calls_of, check_identity, head_for

from headstart.inference import SpeculativeLM
from headstart.inference.rounds.prefill import similar_lengths
from headstart.inference.rounds.sequences import Sequences

VOCAB = 20


def prompts_of_lengths(count):
    random = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (2 + 5 * i % 11,), generator=random) for i in range(count)]


@pytest.mark.parametrize(("slots", "apart"), [(1, 64), (4, 1), (4, 64), (20, 1)])
def test_places_do_not_stay_empty_while_a_prompt_waits(target, monkeypatch, slots, apart):
    """Whether prompts of different lengths are read together, or apart from each other."""
    rows = prompts_of_lengths(11)
    head = head_for(target, "eagle3", 0.2, seed=2, depth=3)
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:3", adaptive=False)
    monkeypatch.setattr(target.engine, "least_padding", apart)
    calls = calls_of(monkeypatch, target.engine, "forward_tree")
    settings = {"max_new_tokens": 12, "eos_token_id": [3, 7, 11], "repetition_penalty": 1.2}
    output = check_identity(lm, rows, max_batch_size=slots, **settings)
    assert len({len(row) for row in output.stats.rows}) > 3  # they end at different times
    widths = [len(tree.tokens_BN) for tree, *_ in calls]
    assert max(widths) <= slots
    if slots < len(rows):
        assert widths.count(slots) > len(widths) / 3


@pytest.mark.parametrize(
    ("lengths", "shared", "expected"),
    [
        ([10, 10, 10, 10], 0, [[0, 1, 2, 3]]),
        ([10, 74, 10], 0, [[1], [0, 2]]),
        # two rows of 31 tokens of padding do not pay for another forward
        ([10, 41, 10], 0, [[0, 1, 2]]),
        ([200, 10, 400, 12, 11], 0, [[2], [0], [1, 3, 4]]),
        ([110, 174, 110], 100, [[0, 1, 2]]),  # nor 64 tokens for a hundred that would be read again
        ([110, 275, 110], 100, [[1], [0, 2]]),
    ],
)
def test_prompts_are_read_apart_where_that_saves_padding(target, lengths, shared, expected):
    first = torch.zeros(shared, dtype=torch.int64)
    rows = [
        torch.cat([first, torch.full((length - shared,), row + 1)])
        for row, length in enumerate(lengths)
    ]
    sequences = Sequences(rows, 4, frozenset())
    assert similar_lengths(sequences, [*range(len(rows))], target) == expected


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_no_prompt_is_read_with_padding_that_can_be_saved(target, monkeypatch, kind):
    """By the target or by the head, however late the head reads."""
    rows = [torch.arange(length) % VOCAB for length in (90, 4, 5, 6)]
    head = head_for(target, kind, 0.2, seed=2)
    observed = calls_of(monkeypatch, head, "observe")
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:2")
    read = calls_of(monkeypatch, target.engine, "read_chunk")
    check_identity(lm, rows, max_new_tokens=2, eos_token_id=[])
    assert [tokens.shape for tokens, *_ in read] == [(1, 90), (3, 6)]
    assert max(len(tokens) for _, _, tokens, *_ in observed if tokens.shape[1] > 10) == 1
