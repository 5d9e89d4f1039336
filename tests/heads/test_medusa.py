"""Medusa heads: how they begin."""

from __future__ import annotations

import dataclasses
import itertools

import helpers
import pytest
import torch
from torch import Tensor, nn

from headstart.heads import MedusaConfig, MedusaHead, TargetModules

VOCAB, WIDTH = 23, 12
INFO = dataclasses.replace(helpers.INFO, hidden_size=WIDTH, vocab_size=VOCAB)
CLOSE = {"rtol": 0.0, "atol": 1e-10}

SHAPES = [
    MedusaConfig(num_heads=3, num_layers=layers, bias=bias, lm_head=lm_head, draft_vocab_size=size)
    for layers, bias in itertools.product((1, 2), (True, False))
    for lm_head, size in (("own", None), ("own", 9), ("shared", None))
]


def name_of(config: MedusaConfig) -> str:
    bias = "bias" if config.bias else "plain"
    return f"{config.num_layers}layers-{bias}-{config.lm_head}-{config.draft_vocab_size}"


def build_modules(seed: int = 0) -> TargetModules:
    torch.manual_seed(seed)
    embed, lm_head = (
        nn.Embedding(VOCAB, WIDTH).double(),
        nn.Linear(WIDTH, VOCAB, bias=False).double(),
    )
    return TargetModules(embed, lm_head, nn.Identity(), ())


def draft_logits(
    head: MedusaHead,
    modules: TargetModules,
    features_BTF: Tensor,
    tokens_BT: Tensor,
    lengths_B: Tensor,
):
    """Logits of decoding at each depth after `observe`: logits_BKV."""
    state = head.begin(modules, len(tokens_BT), tokens_BT.shape[1], head.max_depth, head.max_depth)
    state = head.observe(state, features_BTF, tokens_BT, lengths_B)
    logits = []
    frontier, parents = tokens_BT[:, :1], torch.full((len(tokens_BT), 1), -1)
    for _ in range(head.max_depth):
        logits_B1V, state = head.expand(state, frontier, parents)
        logits.append(logits_B1V)
        frontier, parents = head.target_tokens(logits_B1V.argmax(-1)), torch.zeros_like(parents)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("config", SHAPES, ids=name_of)
def test_a_new_head_drafts_what_the_lm_head_does(config: MedusaConfig) -> None:
    head, modules = MedusaHead(config, INFO).double(), build_modules()
    head.initialize(modules, torch.arange(1, VOCAB + 1))
    features_BTF = torch.randn(4, 1, WIDTH, dtype=torch.float64)
    tokens_BT, lengths_B = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    logits_BKV = draft_logits(head, modules, features_BTF, tokens_BT, lengths_B)
    kept = head.target_tokens(torch.arange(head.draft_vocab_size))
    expected = modules.lm_head(features_BTF)[..., kept].expand(-1, head.max_depth, -1)
    torch.testing.assert_close(logits_BKV, expected, **CLOSE)
