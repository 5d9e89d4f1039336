"""Packed rows: each sequence has the states that it has alone, and no mask of a whole row is
made."""

from __future__ import annotations

import functools
import itertools

import axes
import pytest
import torch
from axes import VOCAB
from families import family_model, family_target
from helpers import LargestTensor
from hypothesis import given
from hypothesis import strategies as st

from headstart.inference import Target
from headstart.inference.engines.target import SIMILAR, of_similar_length, sequences_in

SEQUENCES = ("llama", "mistral", "qwen3_moe", "gemma3_text", "gpt2")
STATES = ("qwen3_5_text", "lfm2", "granitemoehybrid", "mamba2")
FAMILIES = {
    family: functools.partial(family_target, family, "sdpa") for family in SEQUENCES + STATES
}
FAMILIES["bloom, ALiBi"] = lambda: Target(axes.lively_model(axes.chains_only).double().eval())
LENGTHS = [[9, 3, 7, 1], [11, 8]]
"""Of the sequences of each row; the second has a token of padding."""
ROUNDED = {"qwen3_5_text", "granitemoehybrid", "mamba2"}
"""Whose recurrences are computed in float32."""


def frozen_target(family):
    target = FAMILIES[family]()
    target.model.requires_grad_(False)
    return target


def packed_rows(lengths, seed=1):
    """Rows of random tokens, and their positions."""
    texts = [
        [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed + n)) for n in row]
        for row in lengths
    ]
    longest = max(sum(row) for row in lengths)
    tokens_BT = torch.zeros(len(lengths), longest, dtype=torch.int64)
    positions_BT = torch.arange(longest).repeat(len(lengths), 1)
    for row, own in enumerate(texts):
        tokens_BT[row, : sum(lengths[row])] = torch.cat(own)
        start = 0
        for length in lengths[row]:
            positions_BT[row, start:] = torch.arange(longest - start)
            start += length
    return texts, tokens_BT, positions_BT


@pytest.mark.parametrize("family", FAMILIES)
def test_states_in_packed_rows_are_those_of_each_sequence_alone(family):
    target, layers = frozen_target(family), (0, -1)
    texts, tokens_BT, positions_BT = packed_rows(LENGTHS)
    features_BTF, last_BTD = target.read(tokens_BT, layers, positions_BT)
    none_BTF, alone_BTD = target.read(tokens_BT, (), positions_BT)
    assert none_BTF.shape == (*tokens_BT.shape, 0)
    torch.testing.assert_close(alone_BTD, last_BTD)
    close = {"rtol": 1e-4, "atol": 1e-4} if family in ROUNDED else {"rtol": 1e-6, "atol": 1e-9}
    for row, own in enumerate(texts):
        starts = itertools.accumulate([0, *map(len, own)])
        for text, start in zip(own, starts, strict=False):
            features_1TF, last_1TD = target.read(text[None], layers)
            place = slice(start, start + len(text))
            torch.testing.assert_close(features_BTF[row, place], features_1TF[0], **close)
            torch.testing.assert_close(last_BTD[row, place], last_1TD[0], **close)
    assert features_BTF.shape == (*tokens_BT.shape, target.info.hidden_size * len(layers))
    assert last_BTD.shape == (*tokens_BT.shape, target.info.hidden_size)


def test_gradients_reach_the_weights_through_packed_rows():
    """An adapter of the target is trained through them."""
    target = frozen_target("llama")
    weight = target.model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    texts, tokens_BT, positions_BT = packed_rows(LENGTHS)
    _, last_BTD = target.states(tokens_BT, (), positions_BT)
    inside_BT = torch.tensor([[True] * 20, [True] * 19 + [False]])
    (ours,) = torch.autograd.grad(last_BTD[inside_BT].square().sum(), weight)
    loss = sum(target.states(text[None], ())[1].square().sum() for row in texts for text in row)
    (theirs,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(ours, theirs)


def test_a_row_of_8192_tokens_needs_no_mask_of_its_square():
    narrow = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    target = Target(family_model("llama", torch.float32, **narrow))
    lengths = [512, 700, 300, 90, 410, 1000, 600, 40] * 2
    lengths.append(8192 - sum(lengths))
    _, tokens_BT, positions_BT = packed_rows([lengths])
    with LargestTensor() as largest:
        target.read(tokens_BT, (0, -1), positions_BT)
    # what the row's states take; a mask takes 128 times as many
    assert largest.elements <= 8192 * 64
    with LargestTensor() as largest, torch.no_grad():
        target.model.model(
            input_ids=tokens_BT[:, :2048], position_ids=positions_BT[:, :2048], use_cache=False
        )
    assert largest.elements >= 2048 * 2048  # as it was


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 400))
def test_every_sequence_is_read_once_with_others_of_its_length(lengths, budget):
    groups = of_similar_length(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        own = [lengths[i] for i in group]
        assert len(group) == 1 or len(own) * max(own) <= budget
        assert min(own) >= SIMILAR * max(own)


def test_places_of_sequences_are_found_by_their_positions():
    positions_BT = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    places = [(row, place.start, place.stop) for row, place in sequences_in(positions_BT)]
    assert places == [(0, 0, 3), (0, 3, 5), (0, 5, 6), (1, 0, 6)]
