"""A head's forward and backward on an accelerator: the host waits for the device once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import DEVICE, VOCAB, head_for

from headstart.heads import HEADS, TargetFeatures, losses
from headstart.heads.objective import LOSSES, Objective

WAITS = 1
"""A forward and its backward: the host learns how many positions are judged."""


def features_of(target, head, packed):
    tokens_BT = torch.randint(VOCAB, (2, 90), generator=torch.Generator().manual_seed(3))
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    mask_BT[:, [0, 1, 30, 31, 32, 60]] = False
    positions_BT = torch.arange(45).repeat(2, 2) if packed else None
    if packed:
        mask_BT[:, 45] = False
    states = target.read(tokens_BT, head.feature_layers, positions_BT)
    features = TargetFeatures(*states, tokens_BT, mask_BT, target.modules, positions_BT)
    return dataclasses.replace(features, documents_BT=features.sequences_BT)


def moved(features, ends, device):
    tensors = {
        name: value.to(device)
        for name in (field.name for field in dataclasses.fields(features))
        if isinstance(value := getattr(features, name), torch.Tensor)
    }
    for name in tensors.keys() & {"loss_mask_BT", "documents_BT"}:
        tensors[name] = getattr(features, name)  # on the host, as in training
    return dataclasses.replace(features, modules=ends, **tensors)


@pytest.mark.skipif(DEVICE != "sim", reason="only the simulated device counts")
@pytest.mark.parametrize(
    ("kind", "weights"),
    [*((kind, "decay") for kind in HEADS), ("eagle", "d_pace"), ("dspark", "d_pace")],
)
def test_a_step_waits_once_however_many_chunks_it_has(
    on_cpu, there, device, kind, weights, monkeypatch
):
    import simulated

    monkeypatch.setattr(losses, "VOCABULARY_ON_CPU", 1)  # chunks of 64 positions
    head = head_for(on_cpu, kind).train()
    features = moved(features_of(on_cpu, head, weights == "decay"), there.modules, device)
    head = head.to(device)
    loss = dict.fromkeys(LOSSES, 1.0) | ({"smooth_l1": 1.0} if kind == "eagle" else {})
    objective = Objective(loss, weights)
    head(features, objective).loss.backward()  # what is made once
    with simulated.counted() as counts:
        head(features, objective).loss.backward()
    assert counts.waits.total() <= WAITS, counts.waits
    # the draft positions, which are found on the host
    assert counts.uploads.total() <= 3, counts.uploads
