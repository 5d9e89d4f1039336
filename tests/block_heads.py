"""Tiny heads that draft blocks, and batches to train them on."""

from __future__ import annotations

import dataclasses
from typing import Any

import helpers
import torch
from torch import Tensor, nn

from headstart.heads import DFlashHead, TargetFeatures, TargetModules, build_head

VOCAB, WIDTH, TIME = 23, 12, 19
INFO = dataclasses.replace(
    helpers.INFO,
    hidden_size=WIDTH,
    vocab_size=VOCAB,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
)


def block_head(options: dict[str, object], name: str = "dflash", **more: object) -> Any:
    torch.manual_seed(0)
    head = build_head(name, {**options, **more}, INFO).double()
    assert isinstance(head, DFlashHead)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    if head.config.draft_vocab_size is not None:
        head.choose_vocabulary(torch.arange(head.config.draft_vocab_size) * 2 + 1)
    return head


def modules() -> TargetModules:
    torch.manual_seed(1)
    embed, lm_head = (
        nn.Embedding(VOCAB, WIDTH).double(),
        nn.Linear(WIDTH, VOCAB, bias=False).double(),
    )
    return TargetModules(
        embed.requires_grad_(False), lm_head.requires_grad_(False), nn.Identity(), ()
    )


def block_batch(head: DFlashHead, positions_BT: Tensor | None = None) -> TargetFeatures:
    torch.manual_seed(2)
    mask_BT = torch.ones(3, TIME, dtype=torch.bool)
    mask_BT[0, :6] = mask_BT[1, 12:] = False
    return TargetFeatures(
        features_BTF=torch.randn(3, TIME, WIDTH * len(head.feature_layers)).double(),
        last_BTD=torch.randn(3, TIME, WIDTH).double(),
        tokens_BT=torch.randint(VOCAB, (3, TIME)),
        loss_mask_BT=mask_BT,
        modules=modules(),
        positions_BT=positions_BT,
    )
