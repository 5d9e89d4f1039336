"""What a config says of a model's layers: facts by layer, kinds of attention, and what cannot run
trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
import transformers as tf
from messages import refused

from headstart.inference import Target
from headstart.inference.targets.info import layer_fact, rope_of
from headstart.inference.targets.states import keeps_states

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def llama(**options: Any) -> tf.LlamaForCausalLM:
    """A tiny Llama with options of its config."""
    config = tf.LlamaConfig(**SMALL)
    for name, value in options.items():
        setattr(config, name, value)
    return tf.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("rope", "found"),
    [
        (None, {}),
        ({"rope_type": "default", "rope_theta": 5.0}, {"rope_type": "default", "rope_theta": 5.0}),
        ({"full_attention": None, "sliding_attention": {"rope_theta": 5.0}}, {}),
        (
            {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 5.0}},
            {"rope_theta": 7.0},
        ),
        ({"sliding_attention": {"rope_theta": 5.0}}, {"rope_theta": 5.0}),
    ],
)
def test_the_rotary_embedding_is_that_of_full_attention(rope, found):
    config = tf.LlamaConfig(**SMALL)
    config.rope_parameters = rope
    assert rope_of(config) == found


def test_facts_that_differ_by_layer_are_the_first_layers():
    assert layer_fact(SimpleNamespace(intermediate_size=[24, 48]), "intermediate_size") == 24
    assert layer_fact(SimpleNamespace(), "intermediate_size") is None
    if "gemma4_text" not in tiny_models.causal_types():
        pytest.skip("this version of transformers has no Gemma 4")
    gemma = tiny_models.tiny_model("gemma4_text", 1.0)
    assert Target(gemma).info.head_dim == tiny_models.HEAD


def test_layers_with_a_state_are_named_by_the_config_and_not_by_the_class():
    attention = tiny_models.tiny_model("granitemoehybrid@attention-only", 1.0)
    assert attention._is_stateful
    assert not keeps_states(attention)
    assert Target(attention).attention_kinds == ("full_attention",)
    assert keeps_states(tiny_models.tiny_model("granitemoehybrid", 1.0))


def test_a_window_over_all_positions_is_none():
    for window, kind in ((64, "full_attention"), (63, "sliding_attention")):
        config = tf.MistralConfig(**SMALL, sliding_window=window)
        assert Target(tf.MistralForCausalLM(config)).attention_kinds == (kind,)


def test_a_stretch_that_is_fixed_changes_nowhere():
    """HunYuan calls it dynamic."""
    config = tf.LlamaConfig(**SMALL)
    model = tf.LlamaForCausalLM(config)
    config.rope_parameters = {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "factor": 1.0,
        "alpha": 1000.0,
    }
    target = Target(model)
    assert target.attention_kinds == ("full_attention",)
    assert target.segments is None


@pytest.mark.parametrize("value", [True, "all", "vision", False, None])
def test_a_model_that_reads_in_both_directions_is_refused(value):
    model = llama(use_bidirectional_attention=value)
    if value in (True, "all"):
        with refused("use_bidirectional_attention"):
            Target(model)
    else:
        assert Target(model).attention_kinds == ("full_attention",)


def test_a_causal_mask_in_the_blocks_counts_places_in_the_cache():
    """Indexed by the cache's length, as in GPT-Neo; not one that only the body holds, as in
    GPT-BigCode."""
    neo = Target(tiny_models.tiny_model("gpt_neo@global", 1.0))
    assert "places in the cache" in neo.counted
    assert neo.engine.chains_only
    model = llama()
    model.model.register_buffer(
        "bias", torch.ones(64, 64, dtype=torch.bool).tril(), persistent=False
    )
    assert not Target(model).counted
