"""Medusa heads: how they begin."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headstart.heads import build_head
from headstart.inference import Target

VOCAB = 23
OPTIONS = [
    {"num_layers": layers, "bias": bias, **lm_head}
    for layers, bias in itertools.product((1, 2), (True, False))
    for lm_head in ({}, {"draft_vocab_size": 9}, {"lm_head": "shared"})
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_new_head_drafts_what_the_lm_head_does(
    options: dict[str, Any], tiny_target: Callable[..., Target]
) -> None:
    target = tiny_target(vocab_size=VOCAB)
    head = build_head("medusa", {"num_heads": 3, **options}, target.info).double()
    head.initialize(target.modules, torch.arange(1, VOCAB + 1))
    features_BTF = torch.randn(4, 1, target.info.hidden_size, dtype=torch.float64)
    tokens_B1 = torch.zeros(4, 1, dtype=torch.int64)
    kept = head.target_tokens(torch.arange(head.draft_vocab_size))
    expected = target.modules.lm_head(features_BTF)[..., kept]
    state = head.begin(target.modules, 4, 1, head.max_depth, head.max_depth)
    state = head.observe(state, features_BTF, tokens_B1, torch.ones(4, dtype=torch.int64))
    for _ in range(head.max_depth):
        logits_B1V, state = head.expand(state, tokens_B1, torch.full((4, 1), -1))
        torch.testing.assert_close(logits_B1V, expected, rtol=0, atol=1e-10)
