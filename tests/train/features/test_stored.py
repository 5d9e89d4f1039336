"""A head trained with no target in memory: on states from files, or from a server."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from headstart.inference import Target
from headstart.scripts.features import precompute
from headstart.train.config import FeaturesConfig
from headstart.train.loop import train


@pytest.fixture
def stored(short, tmp_path):
    """A run of EAGLE-3 on states in float32 that `headstart features` has written."""
    config = dataclasses.replace(
        short,
        head={"type": "eagle3", "feature_layers": [0, -1], "depth": 3, "train_steps": 2},
        features=FeaturesConfig(mode="stored", format="float32", folder=str(tmp_path / "states")),
    )
    precompute(config)
    return config


def losses(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row], [row for row in rows if "eval" in row]


def no_target(monkeypatch):
    def load(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", load)


def test_a_run_without_the_target_has_the_losses_of_one_with_it(stored, monkeypatch):
    with_target = dataclasses.replace(stored, output=stored.output + "-online", features=FeaturesConfig())
    expected, (judged,) = losses(train(with_target))
    with monkeypatch.context() as patch:
        patch.setattr(Target, "load", None)
        folder = train(stored)
    found, (row,) = losses(folder)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-6, rtol=0)
    torch.testing.assert_close(row["held_out_loss"], judged["held_out_loss"], atol=1e-6, rtol=0)
    assert row["eval"] == judged["eval"]
    one, other = (load_file(path / "last" / "model.safetensors") for path in (folder, folder.parent / "run-online"))
    assert one.keys() == other.keys()
