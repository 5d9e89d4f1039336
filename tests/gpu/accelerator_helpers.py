"""Decoding on an accelerator: a simulated one, or a GPU where HEADSTART_TEST_DEVICE says "cuda" (`make test-gpu`).

A process that knows the simulated device is not as other processes are, so these tests run in one of their own.
"""

from __future__ import annotations

import os

import torch

from headstart.heads import DraftHead
from headstart.heads.checkpoints.save_load import build_head
from headstart.inference import Target

DEVICE = os.environ.get("HEADSTART_TEST_DEVICE", "")
if DEVICE == "sim":
    import simulated  # noqa: F401 - makes the device

VOCAB = 40


def head_for(target: Target, kind: str) -> DraftHead:
    """An untrained head on the CPU, whose guesses are its own all the same."""
    torch.manual_seed(0)
    head = build_head(kind, {}, target.info).to(target.dtype)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    return head.eval()
