"""Uploads: from pinned memory where a device copies without a wait, and plainly elsewhere."""

from __future__ import annotations

import torch

from headstart.heads.layers import constants
from headstart.heads.layers.constants import upload

CPU = torch.device("cpu")
META = torch.device("meta")


def test_an_upload_goes_through_pinned_memory(monkeypatch):
    pinned = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone()
    )
    assert upload([1, 2], META).device == META and not pinned
    monkeypatch.setattr(constants, "PINNED", {"meta"})
    assert upload([1, 2], META).device == META and len(pinned) == 1
    upload(torch.zeros(2, device=META), META)  # what lies there already
    assert len(pinned) == 1
