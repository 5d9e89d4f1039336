"""Tiny random models whose layers keep states, one for each family, as functions that build
them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as tf

VOCAB = 37
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GATED = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
    "mamba_expand": 2,
}
LATENT = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "q_lora_rank": None,
}


def without(*names: str) -> dict[str, object]:
    """`BASE` for a config that lacks some of its fields, or has others in their place."""
    return {name: value for name, value in BASE.items() if name not in names}


HYBRIDS: dict[str, Callable[[], tf.PreTrainedModel]] = {
    "qwen3-next, gated delta": lambda: tf.Qwen3NextForCausalLM(
        tf.Qwen3NextConfig(**BASE, **EXPERTS, **GATED)
    ),
    "qwen3.5, gated delta": lambda: tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**BASE, **GATED)),
    "olmo-hybrid, gated delta": lambda: tf.OlmoHybridForCausalLM(
        tf.OlmoHybridConfig(**BASE, **{**GATED, "linear_num_key_heads": 4})
    ),
    "kimi-linear, KDA and MLA": lambda: tf.KimiLinearForCausalLM(
        tf.KimiLinearConfig(
            **without("num_key_value_heads"),
            **EXPERTS,
            **LATENT,
            num_key_value_heads=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_head_dim=8,
            linear_num_heads=4,
            n_group=1,
            topk_group=1,
        )
    ),
    "lfm2, convolution": lambda: tf.Lfm2ForCausalLM(
        tf.Lfm2Config(
            **BASE, layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False
        )
    ),
    "lfm2-moe, convolution": lambda: tf.Lfm2MoeForCausalLM(
        tf.Lfm2MoeConfig(
            **BASE, **EXPERTS, layer_types=["conv", "full_attention"] * 2, num_dense_layers=1
        )
    ),
    "granite-4, mamba-2": lambda: tf.GraniteMoeHybridForCausalLM(
        tf.GraniteMoeHybridConfig(
            **BASE,
            **MAMBA,
            layer_types=["linear_attention", "full_attention"] * 2,
            shared_intermediate_size=48,
            num_local_experts=4,
            num_experts_per_tok=2,
            logits_scaling=2.0,
        )
    ),
    "falcon-h1, mamba-2 beside attention": lambda: tf.FalconH1ForCausalLM(
        tf.FalconH1Config(**BASE, **{**MAMBA, "mamba_d_ssm": 64}, lm_head_multiplier=0.7)
    ),
    "nemotron-h, mamba-2": lambda: tf.NemotronHForCausalLM(
        tf.NemotronHConfig(
            **without("num_hidden_layers"),
            layers_block_type=[
                "linear_attention",
                "moe",
                "full_attention",
                "mlp",
                "linear_attention",
            ],
            mamba_num_heads=8,
            mamba_head_dim=8,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=24,
        )
    ),
    "bamba, mamba-2": lambda: tf.BambaForCausalLM(
        tf.BambaConfig(**BASE, **MAMBA, attn_layer_indices=[1, 3])
    ),
    "zamba2, shared attention": lambda: tf.Zamba2ForCausalLM(
        tf.Zamba2Config(
            **without("num_key_value_heads", "head_dim"),
            num_key_value_heads=4,
            attention_hidden_size=64,
            attention_head_dim=16,
            layers_block_type=["linear_attention", "hybrid"] * 2,
            mamba_d_state=8,
            mamba_headdim=8,
            mamba_ngroups=2,
            n_mamba_heads=8,
            chunk_size=4,
            num_mem_blocks=1,
        )
    ),
    "mamba-2 alone": lambda: tf.Mamba2ForCausalLM(
        tf.Mamba2Config(
            **without(
                "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"
            ),
            num_heads=8,
            head_dim=8,
            state_size=8,
            n_groups=2,
            expand=2,
            chunk_size=4,
        )
    ),
}
"""By family and kind of state."""
SCALES = {
    "lfm2, convolution": 5.0,
    "lfm2-moe, convolution": 5.0,
    "falcon-h1, mamba-2 beside attention": 5.0,
}
"""Of the random weights, where 3 gives a model that repeats one token."""


def hybrid(family: str, dtype: torch.dtype = torch.float64) -> tf.PreTrainedModel:
    """A random model whose next token depends on its prefix, by way of its states."""
    torch.manual_seed(0)
    scale = SCALES.get(family, 3.0)
    model = HYBRIDS[family]().to(dtype).eval()
    model.set_experts_implementation("eager")  # the faster ones know no float64
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if parameter.ndim > 1:
            parameter *= scale
        if "norm" in name and parameter.ndim == 1:  # norms that are one hide mistakes
            parameter += 0.2 * torch.rand_like(parameter)
        if name.endswith(".D"):  # what passes a recurrence by would hide its state
            parameter *= 0.1
        if name.endswith(".dt_bias"):  # long steps: the newest tokens make most of the state
            parameter += 1.0
    model.generation_config = tf.GenerationConfig(pad_token_id=0)
    return model
