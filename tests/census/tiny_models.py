"""A tiny random model of every type of language model that the installed transformers knows.

The config of a type is its class's default with every dimension replaced by a small one of the same
meaning, found by the field's name (`SIZES`), and with a few layers that together show every kind of
layer of the default. What that does not make valid is in `EXCEPTIONS`; `VARIANTS` has options that
are off by default.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

VOCAB = 112
WIDTH = 64
LAYERS = 4
HEAD = 16
POSITIONS = 256
WINDOW = 6
"""Of sliding layers: shorter than the prompts."""
LARGEST = 110_000_000
"""Parameters of a model that is still built: more would mean that a dimension has not been
found."""

NAMES_BY_SIZE = [
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (VOCAB - 4, "unpadded_vocab_size"),
    (
        WIDTH,
        """hidden_size d_model n_embd emb_dim word_embed_proj_dim embedding_size embedding_dim input_embedding_size
        output_embedding_size lru_width attention_hidden_size embed_dim hidden_dim moe_hidden_size text_hidden_size
        audio_hidden_size encoder_hidden_size out_hidden_size output_dim projection_dim projector_hidden_size
        projection_hidden_size mm_hidden_size original_max_position_embeddings""",
    ),
    (2 * WIDTH, "mamba_d_ssm"),
    (
        LAYERS,
        """num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers
        num_encoder_layers num_blocks depth""",
    ),
    (
        4,
        """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads
        num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_experts n_routed_experts
        num_local_experts moe_num_experts linear_num_value_heads linear_num_heads index_topk index_block_size
        time_step_rank mamba_dt_rank""",
    ),
    (
        2,
        """num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups num_experts_per_tok
        num_experts_per_token moe_topk moe_k top_k_experts zero_expert_num n_group num_expert_group o_groups n_groups
        linear_num_key_heads index_n_heads index_topk_blocks""",
    ),
    (1, "topk_group num_mem_blocks"),
    (
        HEAD,
        """head_dim attention_head_dim swa_head_dim dim_head d_head d_kv kv_channels attention_head_size v_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim query_pre_attn_scalar kv_lora_rank
        mamba_d_head mamba_d_state mamba_head_dim mamba_headdim ssm_state_size state_size router_hidden_size patch_size
        num_mel_bins d_rel rel_extent""",
    ),
    (
        8,
        """qk_rope_head_dim qk_nope_head_dim o_lora_rank mamba_n_heads mamba_num_heads mamba_chunk_size chunk_size
        rotary_dim attention_chunk_size block_size gated_norm_rank laurel_rank hidden_size_per_layer_input hc_lowrank
        adapter_rank""",
    ),
    (24, "q_lora_rank"),
    (
        32,
        """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size shared_experts_intermediate_size image_size codebook_size""",
    ),
    (
        96,
        """intermediate_size ffn_dim d_ff dff d_inner dim_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size
        dense_intermediate_size intermediate_size_mlp feed_forward_size""",
    ),
    (
        POSITIONS,
        """max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length model_max_length
        max_source_positions""",
    ),
    (
        WINDOW,
        """sliding_window window_size local_attention attention_window_size sliding_window_size keep_window_size
        local_attention_window_len""",
    ),
]
SIZES = {name: size for size, names in NAMES_BY_SIZE for name in names.split()}
"""Small values by the names of fields."""
ONE_MEANS_OFF = ("num_experts_per_tok", "moe_topk", "n_group", "num_expert_group", "top_k_experts")
"""Fields whose default of 1 is kept."""
SPECIAL_TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
NOT_DIMENSIONS = (
    *(
        "model_type",
        "transformers_version",
        "architectures",
        "_name_or_path",
        "dtype",
        "torch_dtype",
    ),
    *("id2label", "label2id", "per_layer_config"),
)
LEFT_OUT: Any = object()
"""In `EXCEPTIONS`: the class chooses the value."""

SLIDING = {"sliding_window": WINDOW}
MIXED = ["sliding_attention", "full_attention"] * 2
STATES = ["linear_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(HEAD // 2)],
    "long_factor": [2.0 + 0.3 * i for i in range(HEAD // 2)],
    "original_max_position_embeddings": 64,
}
ALPHA = {
    "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "alpha": 1000.0,
        "factor": 1.0,
    }
}


def multimodal_rope(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary embedding whose dimensions are split between time, height and width."""
    return {"rope_parameters": {**ROPE, "mrope_section": list(sections), **more}}


EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 64,
        "cross_attn_k": 2,
        "local_attention_window_len": 64,
        "patch_in_forward": True,
    },
    "blt_global_transformer": {
        "hidden_size": 2 * WIDTH,
        "head_dim": 2 * HEAD,
        "num_key_value_heads": 4,
    },
    "blt_local_decoder": {
        "vocab_size": 260,
        "hidden_size_global": 2 * WIDTH,
        "num_key_value_heads": 4,
    },
    "blt_local_encoder": {
        "vocab_size": 260,
        "hidden_size_global": 2 * WIDTH,
        "num_key_value_heads": 4,
    },
    "blt_patcher": {"vocab_size": 260, "num_key_value_heads": 4},
    "chameleon": {"vocabulary_map": {"<image>": 8}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "cosmos3_edge_text": multimodal_rope(2, 3, 3),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": WIDTH,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
        "num_key_value_heads": 2,
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "doge": {"num_key_value_heads": 4},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    "dots3_note_vision_encoder": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], **multimodal_rope(3, 3, 2)},
    "gemma3n_text": {
        "layer_types": MIXED,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "altup_num_inputs": 2,
    },
    "gemma4_assistant": {"backbone_hidden_size": WIDTH, "num_centroids": 8},
    "glm4v_moe_text": multimodal_rope(2, 1, 1, partial_rotary_factor=0.5),
    "glm4v_text": multimodal_rope(2, 3, 3),
    "glm5_next_text": {"index_topk": 16, "index_kpool": 8, "qk_rope_head_dim": 0, "head_dim": 0},
    "glm_ocr_text": multimodal_rope(2, 3, 3),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": LEFT_OUT},
    "granite4_vision": {"deepstack_layer_map": [], "spatial_target_layers": []},
    "granitemoehybrid": {"layer_types": STATES, "shared_intermediate_size": 64},
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {
        "head_dim": HEAD,
        **multimodal_rope(2, 2, 2, 2, xdrope_section=[2, 2, 2, 2]),
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "full_attn_idxs": LEFT_OUT,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4_text": {"moe_layers": LEFT_OUT, "num_experts_per_tok": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mimi": {
        "upsample_groups": WIDTH,
        "codebook_dim": 32,
        "vector_quantization_hidden_dimension": 32,
        "num_filters": 8,
    },
    "ministral": {"head_dim": HEAD},
    "molmo2_adapter": {"vision_feature_layer": [1, 2]},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": multimodal_rope(2, 3, 3),
    "qwen2_5_omni_text": multimodal_rope(2, 3, 3),
    "qwen2_5_omni_thinker": {
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "audio_start_token_id": 7,
    },
    "qwen2_5_vl_text": multimodal_rope(2, 3, 3),
    "qwen2_vl_text": multimodal_rope(2, 3, 3),
    "qwen3_omni_moe_text": multimodal_rope(2, 3, 3),
    "qwen3_omni_moe_thinker": {
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "audio_start_token_id": 7,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "step3p5": SLIDING,
    "xlm": {"causal": True},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    **{
        zamba: {
            "attention_hidden_size": 2 * WIDTH,
            "attention_head_dim": 2 * HEAD,
            "use_mamba_kernels": False,
            "num_key_value_heads": 4,
            "n_mamba_heads": 8 if zamba == "zamba2" else 2,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            **dict.fromkeys(("hybrid_layer_ids", "kv_channels", "num_query_groups"), LEFT_OUT),
        }
        for zamba in ("zamba", "zamba2")
    },
}
"""By the type of a config or of a part of one: values that no rule gives."""

LATER_LAYERS_SLIDE = {
    "use_sliding_window": True,
    **SLIDING,
    "max_window_layers": 2,
    "layer_types": LEFT_OUT,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_v3@yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "dots1@sliding": {"layer_types": MIXED},
    "falcon@alibi": {"alibi": True},
    "falcon@new": {"new_decoder_architecture": True},
    "gemma4_text@kv-shared": {
        "layer_types": MIXED,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
    },
    "gemma4_text@moe": {
        "layer_types": MIXED,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_neo@global": {"attention_types": [[["global"], 4]]},
    "granitemoehybrid@attention-only": {
        "layer_types": ["full_attention"] * 4,
        "num_local_experts": 0,
    },
    "granitemoehybrid@moe": {"num_local_experts": 4},
    "hunyuan_v1_dense@alpha": ALPHA,
    "hunyuan_v1_moe@alpha": ALPHA,
    "laguna@sliding": {"layer_types": MIXED},
    "llama@dynamic": {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}},
    "llama@llama3": {"rope_parameters": LLAMA3},
    "llama@yarn": {"rope_parameters": YARN},
    "mellum@sliding": {"layer_types": MIXED},
    "minimax_m3_vl_text@sparse": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ministral@mixed": {"layer_types": MIXED},
    "mistral@full": {"sliding_window": None},
    "mixtral@sliding": SLIDING,
    "nemotron_h@attention-only": {
        "layers_block_type": ["full_attention", "mlp", "full_attention", "moe"]
    },
    "phi3@longrope": {"rope_parameters": LONGROPE},
    "phi3@sliding": SLIDING,
    "phimoe@longrope": {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.2}},
    "qwen2@sliding": LATER_LAYERS_SLIDE,
    "qwen3@sliding": LATER_LAYERS_SLIDE,
    "qwen3@yarn": {"rope_parameters": YARN},
    "stablelm@qk-norm": {"qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2@sliding": SLIDING,
}
"""`type@variant`: options besides those of the type's exceptions."""
IN_FLOAT32 = ("inkling2", "inkling2_text", "xglm", "xlnet")
"""Types whose code mixes float64 with float32."""


def causal_types() -> dict[str, str]:
    """Class names of causal language models, by model type."""
    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def multimodal_types() -> dict[str, str]:
    """Class names of models that take images or sound besides text, by model type."""
    found: dict[str, str] = {}
    for table in (
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    ):
        found |= getattr(modeling_auto, table, {})
    return {name: kind for name, kind in found.items() if name not in causal_types()}


def every_name() -> list[str]:
    """All types, and the variants of those that this version of transformers has."""
    types = [*causal_types(), *multimodal_types()]
    return types + [name for name in VARIANTS if name.split("@")[0] in types]


def tiny_config(name: str, **options: Any) -> PreTrainedConfig:
    """The tiny config of a type or variant, but for `options`."""
    model_type = name.split("@")[0]
    default = AutoConfig.for_model(model_type)
    return _shrunk(default, model_type, VARIANTS.get(name, {}) | options)


def tiny_model(
    name: str, scale: float, untied: bool = False, seed: int = 0, **options: Any
) -> PreTrainedModel:
    """A random model of a type or variant, frozen, in float64 where its code allows that.

    Matrices are multiplied by `scale`, so that the next token depends on the text; `untied` gives
    the LM head weights of its own, without which a model with a tied one repeats its last token.
    `options` are those of its config in place of the tiny ones.

    Raises:
        MemoryError: a model that is not tiny.
    """
    model_type = name.split("@")[0]
    config = tiny_config(name, **options)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in _built(model_type, config).parameters())
    if size > LARGEST:
        raise MemoryError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model = (
        _built(model_type, config)
        .eval()
        .to(torch.float32 if model_type in IN_FLOAT32 else torch.float64)
    )
    lm_head = model.get_output_embeddings()
    if untied and lm_head is not None:
        lm_head.weight = torch.nn.Parameter(0.1 * torch.randn_like(lm_head.weight))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the faster ones know no float64
    for weight_name, weight in model.named_parameters():
        weight.requires_grad_(False)
        if weight.ndim > 1 and weight.is_floating_point():
            weight.mul_(scale)
        elif "norm" in weight_name:  # a gain of 1 would hide a norm that is left out
            weight.add_(0.2 * torch.rand_like(weight))
    # An encoder-decoder needs a first token.
    model.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=1)
    return model


def _built(model_type: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The model; a tower that needs a package which is not here (timm) is left empty: the text does
    not pass it."""
    from_config = AutoModel.from_config

    def tower(*given: Any, **named: Any) -> torch.nn.Module:
        try:
            return from_config(*given, **named)
        except ImportError:
            return torch.nn.Identity()

    with mock.patch.object(AutoModel, "from_config", tower):
        if model_type in causal_types():
            return AutoModelForCausalLM.from_config(config)
        return getattr(transformers, multimodal_types()[model_type])._from_config(config)


def _shrunk(
    default: PreTrainedConfig, model_type: str, variant: dict[str, Any]
) -> PreTrainedConfig:
    """A config with small dimensions; those of its towers, too."""
    kind = type(default)
    fields = default.to_dict()
    parts = getattr(kind, "sub_configs", None) or {}
    shown = _layers_of_every_kind(fields)
    chosen: dict[str, Any] = {}
    for name, value in fields.items():
        if name in NOT_DIMENSIONS or name.startswith("_") or name in parts:
            continue
        small = _small(name, value, fields, shown)
        if small is not LEFT_OUT:
            chosen[name] = small
    for name in parts:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            chosen[name] = _shrunk(part, part.model_type, {})
    if "is_decoder" in fields and not fields.get("is_encoder_decoder"):
        chosen["is_decoder"] = True
    for name, value in (EXCEPTIONS.get(model_type, {}) | variant).items():
        chosen[name] = value
    return kind(**{name: value for name, value in chosen.items() if value is not LEFT_OUT})


def _number_of_layers(fields: dict[str, Any]) -> tuple[str, int]:
    """The field that counts layers, and its default; ("", 0) if there is none."""
    for name in ("num_hidden_layers", "num_layers", "n_layer", "decoder_layers"):
        if fields.get(name):
            return name, fields[name]
    return "", 0


def _is_per_layer(value: Any, layers: int) -> bool:
    return (
        isinstance(value, list)
        and 1 < layers == len(value)
        and not isinstance(value[0], list | dict)
    )


def _layers_of_every_kind(fields: dict[str, Any]) -> list[int]:
    """Numbers of layers that together show every kind, at least `LAYERS` of them; none if all
    layers are alike."""
    _, layers = _number_of_layers(fields)
    per_layer = [value for value in fields.values() if _is_per_layer(value, layers)]
    if not per_layer:
        return []
    first: dict[str, int] = {}
    for number, kind in enumerate(zip(*per_layer, strict=True)):
        first.setdefault(repr(kind), number)
    shown = sorted(first.values())
    if len(shown) > LAYERS + 2:  # every layer is another
        shown = list(range(LAYERS))
    kinds = list(shown)
    while len(shown) < LAYERS:
        shown.append(kinds[len(shown) % len(kinds)])
    return shown


def _small(name: str, value: Any, fields: dict[str, Any], shown: list[int]) -> Any:
    """The small value of one field; `LEFT_OUT` for its default."""
    layer_field, layers = _number_of_layers(fields)
    if "token" in name and name.endswith(("_token_id", "_token_index", "_index")):
        if isinstance(value, list):
            return [2]
        return SPECIAL_TOKENS.get(name, 3 + len(name) % 7) if isinstance(value, int) else LEFT_OUT
    if shown and name == layer_field:
        return len(shown)
    if shown and _is_per_layer(value, layers):
        kept = [value[layer] for layer in shown]
        if name == "num_attention_heads_per_layer":
            return [4] * len(kept)
        return [SIZES[name]] * len(kept) if name in SIZES and isinstance(kept[0], int) else kept
    if name == "rope_parameters" and isinstance(value, dict):
        return _small_rope(value)
    if name not in SIZES or value is None or isinstance(value, bool | str | dict):
        return LEFT_OUT
    if isinstance(value, list):
        return [SIZES[name]] * len(value)
    latent_attention = fields.get("kv_lora_rank") is not None
    if name == "head_dim" and latent_attention:  # follows from the parts of a head
        return LEFT_OUT
    if name == "sliding_window" and value == 0:
        return LEFT_OUT
    if name in ONE_MEANS_OFF and value == 1:
        return LEFT_OUT
    if name in ("num_key_value_heads", "num_kv_heads"):
        return 1 if value == 1 else 4 if latent_attention else SIZES[name]
    return SIZES[name]


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose scaling begins within the tiny model's positions."""
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _small_rope(value)
        elif name in ("original_max_position_embeddings", "max_position_embeddings"):
            small[name] = SIZES[name]
        else:
            small[name] = value
    return small
