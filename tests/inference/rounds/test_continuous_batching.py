"""Continuous batching: a waiting prompt begins where a row has ended, and nobody's text changes."""

from __future__ import annotations

import pytest
import torch
from helpers import padded_batch, written_alone

from headstart.heads import build_head
from headstart.inference import SpeculativeLM
from headstart.inference.rounds.prefill import similar_lengths
from headstart.inference.rounds.sequences import Sequences

VOCAB = 20
HEADS = {
    "plain": None,
    "medusa": {"num_heads": 3},
    "eagle3": {"depth": 3, "feature_layers": [0, -1]},
}


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=VOCAB)


def head_of(name, target):
    if HEADS[name] is None:
        return None
    torch.manual_seed(2)
    head = build_head(name, HEADS[name], target.info).to(target.dtype)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head


def prompts(count, vocab=VOCAB):
    random = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (2 + 5 * i % 11,), generator=random) for i in range(count)]


@pytest.mark.parametrize("name", ["plain", "eagle3"])
@pytest.mark.parametrize("slots", [1, 4, 20])
@pytest.mark.parametrize(("tree", "apart"), [("chain:3", 1), ("dynamic:9:3:3", 64)])
def test_every_row_writes_what_it_writes_alone(target, monkeypatch, name, slots, tree, apart):
    """Whether prompts of different lengths are read together, or apart from each other."""
    rows = prompts(11)
    settings = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": [3, 7, 11],
        "repetition_penalty": 1.2,
    }
    settings |= {"pad_token_id": 0}
    alone = [written_alone(target.model, row, **settings) for row in rows]
    assert len({len(row) for row in alone}) > 3  # they end at different times
    lm = SpeculativeLM.from_pretrained(
        target, head_of(name, target), tree=tree if HEADS[name] else "auto", adaptive=False
    )
    monkeypatch.setattr(target.engine, "least_padding", apart)
    widths, original = [], target.engine.forward_tree
    monkeypatch.setattr(
        target.engine,
        "forward_tree",
        lambda tree, *rest: widths.append(len(tree.tokens_BN)) or original(tree, *rest),
    )
    padded, mask = padded_batch(rows)
    output = lm.generate(padded, attention_mask=mask, max_batch_size=slots, **settings)
    for found, expected in zip(output.sequences[:, padded.shape[1] :].tolist(), alone, strict=True):
        assert found[: len(expected)] == expected and not any(found[len(expected) :])
    assert max(widths) <= slots
    if slots < len(rows):  # places do not stay empty while a prompt waits
        assert widths.count(slots) > len(widths) / 3
    returned = [1 + sum(record.returned for record in row) for row in output.stats.rows]
    assert returned == [len(row) for row in alone]


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


@pytest.mark.parametrize("name", [name for name in HEADS if name != "plain"])
def test_no_prompt_is_read_with_padding_that_can_be_saved(target, monkeypatch, name):
    """By the target or by the head, however late the head reads."""
    rows = [torch.arange(length) % VOCAB for length in (90, 4, 5, 6)]
    head = head_of(name, target)
    observed, observe = [], head.observe
    head.observe = lambda state, features, tokens, *rest: (
        observed.append(tokens.shape) or observe(state, features, tokens, *rest)
    )
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:2")
    read, original = [], target.engine.read_chunk
    monkeypatch.setattr(
        target.engine,
        "read_chunk",
        lambda tokens, *rest: read.append(tokens.shape) or original(tokens, *rest),
    )
    padded, mask = padded_batch(rows)
    lm.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=2,
        do_sample=False,
        eos_token_id=[],
        pad_token_id=0,
    )
    assert read == [(1, 90), (3, 6)]
    assert max(batch for batch, tokens in observed if tokens > 10) == 1
