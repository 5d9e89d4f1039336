"""An EAGLE head that starts from one of the target's blocks."""

from __future__ import annotations

import pytest
import torch
from helpers import build_model
from torch import nn

from headstart.heads import EagleHead, build_head
from headstart.heads.eagle.head import OUTPUTS, STEP
from headstart.heads.layers.training_time_test import TrainingTimeTest
from headstart.inference import Target

GAIN = 1.7
"""Of the final norm: what a feature is larger by than the normalised stream."""


@pytest.fixture
def lively_target() -> Target:
    model = build_model(12, layers=3, rms_norm_eps=1e-12)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    nn.init.constant_(model.model.norm.weight, GAIN)
    return Target(model)


def started_head(target: Target, **options: object) -> EagleHead:
    head = build_head("eagle", options, target.info).double()
    assert isinstance(head, EagleHead)
    head.initialize(target.modules, torch.ones(12, dtype=torch.int64))
    return head


@torch.no_grad()
def undo_resizing(head: EagleHead, block: nn.Module) -> None:
    """Make the outputs of its layers as large as those of the block, times the final norm's
    gain."""
    for layer in head.layers:
        attention = layer.get_parameter(OUTPUTS[0])
        factor = GAIN * block.get_parameter(OUTPUTS[0]).norm() / attention.norm()
        for name in OUTPUTS:
            layer.get_parameter(name).mul_(factor)


@torch.no_grad()
def through(head: EagleHead, features_BTD: torch.Tensor) -> torch.Tensor:
    rotary = head.rotary(torch.arange(features_BTD.shape[1])[None], features_BTD.dtype)
    kv = TrainingTimeTest(len(head.layers)).at(0)
    for i, layer in enumerate(head.layers):
        features_BTD = layer(features_BTD, rotary, kv, i)
    return features_BTD


@pytest.mark.parametrize(("start", "block"), [("last", 2), (1, 1)])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_its_layers_do_to_features_what_the_block_does_to_the_stream(
    lively_target, start, block, num_layers
):
    head = started_head(lively_target, start=start, num_layers=num_layers)
    theirs = lively_target.model.model.layers[block]
    undo_resizing(head, theirs)
    stream_BTD = torch.randn(1, 9, 32, dtype=torch.float64)
    # the stream's size taken out
    stream_BTD = stream_BTD / stream_BTD.square().mean(-1, keepdim=True).sqrt()
    places = torch.arange(9)[None]
    expected = stream_BTD
    with torch.no_grad():
        rotary = lively_target.model.model.rotary_emb(stream_BTD, places)
        causal = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        for _ in range(num_layers):
            out = theirs(expected, attention_mask=causal, position_embeddings=rotary)
            expected = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(
        through(head, GAIN * stream_BTD), GAIN * expected, rtol=1e-5, atol=1e-5
    )


def test_a_layer_moves_features_as_far_as_a_trained_block_moves_its_stream(lively_target):
    head = started_head(lively_target, start="last")
    features_BTD = GAIN * torch.randn(1, 200, 32, dtype=torch.float64)
    moved = (through(head, features_BTD) - features_BTD).norm() / features_BTD.norm()
    assert float(moved) == pytest.approx(STEP, rel=0.25)


def test_the_feature_goes_through_unchanged_and_the_embedding_is_silent(lively_target):
    weight = started_head(lively_target, start=0).fc.weight
    assert torch.equal(weight, torch.cat([torch.zeros(32, 32), torch.eye(32)], dim=1).double())
