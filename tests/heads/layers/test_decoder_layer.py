"""Decoder layers: the target's own block where the weights are its own; starting values that are
refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import helpers
import pytest
import torch
from messages import refused
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headstart.heads.layers.decoder_layer import (
    DecoderLayer,
    LayerShape,
    RMSNorm,
    Rotary,
)
from headstart.heads.layers.starting_values import target_layer_weights
from headstart.heads.layers.training_time_test import TrainingTimeTest
from headstart.inference import Target

SIZE = helpers.SIZES["head_dim"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "another base": {"rope_type": "default", "rope_theta": 300.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
SIZES = helpers.SIZES | {"vocab_size": 31, "num_hidden_layers": 3}


def build_target(rope: dict[str, Any], qwen: bool = False) -> Target:
    torch.manual_seed(0)
    if qwen:
        return Target(Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=rope)).double())
    return Target(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)).double())


# Positions.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROPES)
def test_the_rotary_embedding_is_the_targets_with_its_scaling(
    name: str, dtype: torch.dtype
) -> None:
    target = build_target(ROPES[name])
    positions_BT = torch.cat([torch.arange(300)[None], torch.randint(512, (1, 300))])
    theirs = target.model.model.rotary_emb(torch.empty(0, dtype=dtype), positions_BT)
    ours = Rotary(target.info, SIZE)(positions_BT, dtype)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype and torch.equal(mine, wanted)
    plain = Rotary(replace(target.info, rope_parameters=ROPES["default"]), SIZE)(
        positions_BT, dtype
    )
    assert torch.equal(ours[0], plain[0]) == (name == "default")


def test_the_rotary_embedding_has_nothing_to_save_and_stays_in_float32() -> None:
    target = build_target(LLAMA3)
    rotary = nn.ModuleList([Rotary(target.info, SIZE)])
    positions_BT = torch.tensor([[1, 100, 511]])
    before = rotary[0](positions_BT, torch.float32)
    after = rotary.to(torch.bfloat16)[0](positions_BT, torch.float32)
    assert not rotary.state_dict() and all(map(torch.equal, before, after))


# Layers.


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("name", ["llama", "llama3", "qwen"])
def test_a_layer_with_the_weights_of_a_targets_block_is_that_block(name: str, block: int) -> None:
    target = build_target(LLAMA3 if name == "llama3" else ROPES["default"], qwen=name == "qwen")
    for parameter in target.model.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer = DecoderLayer(replace(LayerShape.of(target.info), qk_norm=name == "qwen")).double()
    layer.load_state_dict(
        target_layer_weights(target.modules.blocks, block, target.info, "some head")
    )
    tokens_BT = torch.randint(31, (2, 90))
    with torch.no_grad():
        hidden = target.model(tokens_BT, output_hidden_states=True).hidden_states
        rotary = Rotary(target.info, SIZE)(torch.arange(90).expand(2, -1), torch.float64)
        found_BTD = layer(hidden[block], rotary, TrainingTimeTest(1).at(0), 0)
    # transformers' norms compute in float32, whatever they are given
    torch.testing.assert_close(found_BTD, hidden[block + 1], rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_norms_are_torchs_own_and_keep_the_states_format(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(12, eps=1e-3), nn.RMSNorm(12, eps=1e-3)
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 12, dtype=dtype)
    assert ours(x).dtype == dtype
    torch.testing.assert_close(ours(x), theirs.to(dtype)(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 num_key_value_heads 3"),
        ({"hidden_act": "sillu"}, "hidden_act 'sillu' silu"),
    ],
    ids=str,
)
def test_dimensions_that_fit_no_layer_are_refused(change: dict[str, Any], message: str) -> None:
    with refused(message):
        LayerShape.of(build_target(LLAMA3).info, SimpleNamespace(**change))


def test_a_block_that_is_no_llama_layer_is_refused_with_the_way_out() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, n_positions=16))
    with refused("some head 0 GPT2Block random"):
        target_layer_weights(Target(model).modules.blocks, 0, Target(model).info, "some head")
