"""EAGLE-3 heads: the draft vocabulary, how a head begins, and that the checkpoint is what servers
read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import build_model
from messages import refused

from headstart.heads import build_head
from headstart.inference import Target

VOCAB, WIDTH, BLOCKS = 47, 32, 7
NARROW = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
}


@pytest.fixture(scope="module")
def deep_target() -> Target:
    """Seven blocks, so that EAGLE-3's own choice of layers exists: 1, 2 and 3."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    sizes = {"intermediate_size": 40, "max_position_embeddings": 128, "rope_parameters": rope}
    model = build_model(VOCAB, layers=BLOCKS, dtype=torch.float32, **sizes)
    torch.nn.init.normal_(model.model.norm.weight)
    return Target(model.requires_grad_(False), "made-up/target")


# The draft vocabulary.


@pytest.mark.parametrize("size", [1, 20, VOCAB - 1, VOCAB])
def test_both_maps_name_the_most_frequent_tokens(size: int, deep_target: Target) -> None:
    head = build_head("eagle3", {"draft_vocab_size": size}, deep_target.info)
    tokens_V = torch.arange(size)
    # before any data is seen, too
    assert head.target_tokens(tokens_V).tolist() == head.t2d.nonzero().flatten().tolist()
    counts_V = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(size)) + 1
    head.initialize(deep_target.modules, counts_V)
    chosen = sorted(sorted(range(VOCAB), key=lambda token: -int(counts_V[token]))[:size])
    assert head.d2t.dtype == torch.int64 and head.t2d.dtype == torch.bool
    assert head.d2t.tolist() == [token - i for i, token in enumerate(chosen)]
    assert head.t2d.shape == (VOCAB,) and head.t2d.nonzero().flatten().tolist() == chosen
    assert head.draft_vocab_size == size and head.lm_head.weight.shape == (size, WIDTH)
    assert head.target_tokens(tokens_V[:, None]).tolist() == [[token] for token in chosen]
    assert torch.equal(head.lm_head.weight, deep_target.modules.lm_head.weight[chosen])


# How a head begins.


@pytest.mark.parametrize(("start_at", "block"), [("last", BLOCKS - 1), (0, 0), (3, 3)])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_head_may_begin_with_the_weights_of_a_block(
    start_at: str | int, block: int, layers: int, deep_target: Target
) -> None:
    head = build_head("eagle3", {"start": start_at, "num_layers": layers}, deep_target.info)
    head.initialize(deep_target.modules, torch.ones(VOCAB))
    theirs = deep_target.model.model.layers[block].state_dict()
    first = head.midlayer.state_dict()
    for kind in "qkv":
        weight = first.pop(f"self_attn.{kind}_proj.weight")
        assert not weight[:, :WIDTH].any() and torch.equal(
            weight[:, WIDTH:], theirs[f"self_attn.{kind}_proj.weight"]
        )
    assert torch.equal(first.pop("hidden_norm.weight"), theirs["input_layernorm.weight"])
    assert first and all(torch.equal(tensor, theirs[key]) for key, tensor in first.items())
    assert len(head.layers) == layers - 1
    for layer in head.layers.values():
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in layer.state_dict().items())
    fused = torch.randn(2, 3 * WIDTH)
    assert torch.equal(head.fc(fused), fused[:, -WIDTH:])


def test_the_lm_head_and_the_final_norm_begin_as_the_targets_unless_told_otherwise(
    deep_target: Target,
) -> None:
    for asked in (True, False):
        head = build_head("eagle3", {"start_lm_head": asked}, deep_target.info)
        head.initialize(deep_target.modules, torch.ones(VOCAB))
        assert torch.equal(head.lm_head.weight, deep_target.modules.lm_head.weight) == asked
        assert torch.equal(head.norm.weight, deep_target.modules.norm.weight) == asked
        assert head.lm_head.weight.data_ptr() != deep_target.modules.lm_head.weight.data_ptr()


@pytest.mark.parametrize(
    ("blocks", "layers"),
    [(4, (0, 1, 2)), (5, (0, 1, 3)), (6, (0, 2, 4)), (7, (1, 2, 3)), (30, (1, 14, 26))],
)
def test_the_default_layers_are_an_early_a_middle_and_a_late_one(
    blocks: int, layers: tuple[int, ...], deep_target: Target
) -> None:
    info = replace(deep_target.info, num_layers=blocks)
    assert build_head("eagle3", {}, info).feature_layers == layers


# What servers read.


def test_config_has_the_keys_of_servers_with_both_ways_of_counting_layers(
    deep_target: Target,
) -> None:
    options = {"num_layers": 3, "draft_vocab_size": 20, "feature_layers": [0, 2, 5, -1]}
    flags = {"qk_norm": True, "fc_norm": True, "norm_output": True}
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    config = build_head("eagle3", {**NARROW, **options, **flags}, deep_target.info).server_config()
    assert config == NARROW | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_hidden_size": WIDTH,
        "hidden_act": "silu",
        "rms_norm_eps": deep_target.info.rms_norm_eps,
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "draft_vocab_size": 20,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_parameters": rope,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "num_aux_hidden_states": 4,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6, 0],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 2, 5, -1],
            "use_aux_hidden_state": True,
        },
    }


def test_a_rotary_embedding_without_scaling_is_said_to_have_none(deep_target: Target) -> None:
    info = replace(deep_target.info, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = build_head("eagle3", {}, info).server_config()
    assert (config["rope_scaling"], config["rope_theta"]) == (None, 5e5)


# What is refused.


def test_a_draft_vocabulary_larger_than_the_data_is_refused(deep_target: Target) -> None:
    head = build_head("eagle3", {"draft_vocab_size": 6}, deep_target.info)
    counts_V = torch.zeros(VOCAB, dtype=torch.int64)
    counts_V[10:15] = 3
    with refused("eagle3 draft_vocab_size 6 larger 5"):
        head.initialize(deep_target.modules, counts_V)
    counts_V[2] = 1
    head.initialize(deep_target.modules, counts_V)
    assert head.target_tokens(torch.arange(6)).tolist() == [2, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 4}, "self_attn"),
        ({"intermediate_size": 24}, "24 32 40"),
        ({"hidden_size": 16}, "first layer"),
        ({"num_key_value_heads": 4}, "self_attn.k_proj.weight 32 64 16"),
    ],
    ids=str,
)
def test_a_start_from_a_block_of_other_dimensions_is_refused(
    options: dict[str, int], message: str, deep_target: Target
) -> None:
    head = build_head("eagle3", {"start": "last", **options}, deep_target.info)
    with refused(message):
        head.initialize(deep_target.modules, torch.ones(VOCAB))


@pytest.mark.parametrize("block", [BLOCKS, -BLOCKS - 1])
def test_a_start_from_a_block_that_is_not_there_is_refused(block: int, deep_target: Target) -> None:
    head = build_head("eagle3", {"start": block}, deep_target.info)
    with refused(f"eagle3 {block} {BLOCKS}"):
        head.initialize(deep_target.modules, torch.ones(VOCAB))
