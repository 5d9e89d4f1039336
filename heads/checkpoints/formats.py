"""How each project writes a draft head: tables of every key of its config.json and every tensor.

`import_formats.py` and `export_formats.py` refuse a key or tensor that is not in these tables. Sizes are letters: D the
head's width, Dt the target's, V and Vd the target's and the draft vocabulary, I the MLP, Q and K all query and key
heads together, E one head, F the fused features, P the (h + 2) D wide input of Hydra's head h. In names {l} counts
decoder layers or blocks, {i} fused features and {h} heads; {next} is l + 1, {blocks} the number of blocks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..base import DraftHead
from ..eagle import EagleHead
from ..eagle3 import Eagle3Head
from ..hydra import HydraHead

NEEDED: Any = ...
"""The default of a key without one."""


@dataclass(frozen=True)
class Key:
    """A key of a config.json."""

    meaning: str
    default: Any = NEEDED
    """Value that the format's readers take where the key is absent."""
    only: tuple[Any, ...] = ()
    """Values that a head here can have; all if empty."""


@dataclass(frozen=True)
class Row:
    """A tensor, or one for each layer, feature or head."""

    ours: str
    """Name in our state_dict."""
    shape: str
    meaning: str
    when: str = ""
    """Property of the head without which the tensor does not exist; empty for a tensor that always does."""
    optional: bool = False
    """Whether a file may lack it, because it follows from other tensors."""
    dtype: str = "float"


@dataclass(frozen=True)
class Format:
    """The format of one project for one family of heads."""

    heads: tuple[str, ...]
    """Names in `HEADS` that it can hold."""
    files: tuple[str, ...]
    """Names of the weight file."""
    keys: dict[str, Key]
    tensors: dict[str, Row]
    """By their names in the file."""
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors that are copies of the target's."""


OWN = "of transformers, says nothing about the head"
TRANSFORMERS = {
    name: Key(OWN, None)
    for name in (
        *("architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "model_type"),
        *("pad_token_id", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"),
    )
}
ROPE = {
    "rope_theta": Key("base of the rotary positions, and not the target's where it is absent", 10000.0),
    "rope_scaling": Key("scaling of the rotary positions", None),
    "rope_parameters": Key("both, as transformers 5 writes them", None),
}
LLAMA = {
    **TRANSFORMERS,
    **ROPE,
    "hidden_size": Key("D"),
    "intermediate_size": Key("I"),
    "num_attention_heads": Key("query heads"),
    "num_key_value_heads": Key("key and value heads; as many as query heads where absent", None),
    "head_dim": Key("E; D / query heads where absent", None),
    "hidden_act": Key("activation of the MLP", "silu"),
    "rms_norm_eps": Key("of all norms", 1e-6),
    "num_hidden_layers": Key("decoder layers", 1),
    "vocab_size": Key("V"),
    "max_position_embeddings": Key("longest text that a server allows", 2048),
    "tie_word_embeddings": Key("whether the LM head is the embedding", False, only=(False,)),
    "attention_bias": Key("bias in attention", False, only=(False,)),
    "attention_dropout": Key("training only", 0.0),
    "mlp_bias": Key("bias in the MLP", False, only=(False,)),
    "pretraining_tp": Key("of transformers, has no effect", 1),
    "sliding_window": Key("tokens that a query of a sliding layer sees", None),
    "use_sliding_window": Key("whether there are such layers", False, only=(False,)),
    "max_window_layers": Key("of sliding_window", None),
    "layer_types": Key("attention of each layer; full_attention here", None),
}
FEATURES = {
    "eagle_aux_hidden_state_layer_ids": Key("feature layers, each by the block whose input it is", None),
    "num_aux_hidden_states": Key("how many features are fused", None),
}
EAGLE3_FLAGS = {
    "draft_vocab_size": Key("Vd; null or absent for V", None),
    "target_hidden_size": Key("Dt; D where absent", None),
    "norm_before_residual": Key("the residual stream begins behind hidden_norm", False),
    "norm_before_fc": Key("one norm on all features together", False),
    "fc_norm": Key("a norm on each feature", False),
    "norm_output": Key("the normalised output is fed back", False),
}
EAGLE_CONFIG = {
    "eagle_aux_hidden_state_layer_ids": Key("feature layers, each by the block whose output it is", None),
    "use_aux_hidden_state": Key("whether features of several layers are fused", True, only=(True,)),
    "norm_before_fc": Key("as at the top level", False),
    "use_input_layernorm_in_first_layer": Key("ModelOpt: the first layer's input norm", True, only=(True,)),
    "use_last_layernorm": Key("ModelOpt: the norm before the LM head", True, only=(True,)),
    "use_mtp_layernorm": Key("ModelOpt: norms of multi-token prediction", False, only=(False, None)),
    "next_layer_regular": Key("ModelOpt: layers after the first are plain ones", True, only=(True, None)),
    "parallel_draft_step": Key("ModelOpt: tokens drafted at once", 1, only=(1, None)),
    "parallel_draft_heads_num_layers": Key("ModelOpt: of parallel drafting", None),
}
"""The keys inside of `eagle_config`."""

SPECULATORS = {
    **{name: TRANSFORMERS[name] for name in ("architectures", "auto_map", "dtype", "model_type", "torch_dtype")},
    **{name: Key(OWN, None) for name in ("transformers_version", "speculators_version")},
    "speculators_config": Key("how it drafts, and the verifier's name and architecture"),
    "tie_word_embeddings": LLAMA["tie_word_embeddings"],
}
"""What both of its kinds write."""


def _layer(theirs: str, ours: str, attention: str, input_norm: bool) -> dict[str, Row]:
    """A decoder layer whose attention reads states of width `attention`."""
    rows = {
        "self_attn.q_proj.weight": (f"Q,{attention}", "queries", ""),
        "self_attn.k_proj.weight": (f"K,{attention}", "keys", ""),
        "self_attn.v_proj.weight": (f"K,{attention}", "values", ""),
        "self_attn.o_proj.weight": ("D,Q", "attention's output", ""),
        "self_attn.q_norm.weight": ("E", "norm of each query", "qk_norm"),
        "self_attn.k_norm.weight": ("E", "norm of each key", "qk_norm"),
        "mlp.gate_proj.weight": ("I,D", "the MLP's gate", ""),
        "mlp.up_proj.weight": ("I,D", "into the MLP", ""),
        "mlp.down_proj.weight": ("D,I", "out of the MLP", ""),
        "post_attention_layernorm.weight": ("D", "norm before the MLP", ""),
    }
    if input_norm:
        rows["input_layernorm.weight"] = ("D", "norm before attention; in the first layer, of the embedding", "")
    return {f"{theirs}.{name}": Row(f"{ours}.{name}", *row) for name, row in rows.items()}


def _eagle3(first: str) -> dict[str, Row]:
    """EAGLE-3, its first layer called `first`."""
    return {
        "fc.weight": Row("fc.weight", "D,F*Dt", "joins the fused features, the shallowest first"),
        "fc_norm.{i}.weight": Row("fc_norm.{i}.weight", "Dt", "norm of one feature", "fc_norm"),
        "input_norm.weight": Row("input_norm.weight", "F*Dt", "norm of all features", "norm_before_fc"),
        **_layer(first, "midlayer", "2*D", input_norm=True),
        f"{first}.hidden_norm.weight": Row("midlayer.hidden_norm.weight", "D", "norm of the state"),
        **_layer("layers.{l}", "layers.{l}", "D", input_norm=True),
        "norm.weight": Row("norm.weight", "D", "norm before the LM head"),
        "lm_head.weight": Row("lm_head.weight", "Vd,D", "LM head over the draft vocabulary"),
        "embed_tokens.weight": Row("embed_tokens.weight", "V,D", "embedding, if not the target's", "own_embedding"),
        "d2t": Row("d2t", "Vd", "target id minus draft id", "truncated", dtype="int64"),
        "t2d": Row("t2d", "V", "whether a target id is in the draft vocabulary", "truncated", True, "bool"),
    }


FORMATS: dict[str, Format] = {
    "eagle3": Format(
        ("eagle3",),
        ("model.safetensors", "pytorch_model.bin"),
        {
            **LLAMA,
            **EAGLE3_FLAGS,
            **FEATURES,
            "eagle_config": Key("see EAGLE_CONFIG", {}),
            "bias": Key("bias of fc", False, only=(False,)),
        },
        _eagle3("midlayer"),
    ),
    "eagle": Format(
        ("eagle",),
        ("model.safetensors", "pytorch_model.bin"),
        {**LLAMA, "bias": Key("whether fc has a bias: SafeAILab's default, which vLLM does not read", True)},
        {
            "fc.weight": Row("fc.weight", "D,2*D", "joins embedding and feature"),
            "fc.bias": Row("fc.bias", "D", "its bias", "fc_bias"),
            **_layer("layers.0", "layers.0", "D", input_norm=False),
            **_layer("layers.{l}", "layers.{l}", "D", input_norm=True),
        },
        ignored=("embed_tokens.",),
    ),
    "medusa": Format(
        ("medusa",),
        ("model.safetensors",),
        {
            **TRANSFORMERS,
            "hidden_size": Key("D"),
            "vocab_size": Key("V"),
            "truncated_vocab_size": Key("Vd; null or absent for V", None),
            "num_heads": Key("heads", 5),
            "num_hidden_layers": Key("blocks of each head", 1),
            "medusa_fc_bias": Key("whether the blocks have a bias", False),
            "original_lm_head": Key("whether one LM head serves all heads", False),
            "max_paths": Key("of a tree, not read any more", 64),
            "topk": Key("of a tree, not read any more", 10),
            "max_seq_len": Key("longest text that a server allows", None),
            "logit_scale": Key("factor of the logits", 1.0, only=(1.0,)),
        },
        {
            "blocks.{h}.layers.{l}.weight": Row("blocks.{h}.layers.{l}.weight", "D,D", "a residual block"),
            "blocks.{h}.layers.{l}.bias": Row("blocks.{h}.layers.{l}.bias", "D", "its bias", "bias"),
            "lm_heads.{h}.weight": Row("lm_heads.{h}.weight", "Vd,D", "LM head", "own_lm_head"),
            "token_map": Row("token_map", "Vd", "target ids of the draft vocabulary", "truncated", dtype="int64"),
        },
    ),
    "fasterdecoding": Format(
        ("medusa",),
        ("medusa_lm_head.pt", "medusa_lm_head.safetensors"),
        {
            **TRANSFORMERS,
            "medusa_num_heads": Key("heads; published files have more than they say, so tensors are counted", None),
            "medusa_num_layers": Key("blocks of each head", 1),
            "base_model_name_or_path": Key("the target", None),
            "version": Key("2 for heads without an LM head of their own", None),
        },
        {
            "{h}.{l}.linear.weight": Row("blocks.{h}.layers.{l}.weight", "D,D", "a residual block"),
            "{h}.{l}.linear.bias": Row("blocks.{h}.layers.{l}.bias", "D", "its bias", "bias"),
            "{h}.{blocks}.weight": Row("lm_heads.{h}.weight", "V,D", "LM head", "own_lm_head"),
        },
    ),
    "speculators": Format(
        ("eagle3",),
        ("model.safetensors",),
        {
            **SPECULATORS,
            **EAGLE3_FLAGS,
            **FEATURES,
            "speculators_model_type": Key("eagle3"),
            "transformer_layer_config": Key("the decoder layers: what differs from the defaults of their class"),
            "embed_requires_grad": Key("training only", False),
            "draft_attn_kernel": Key("training only", "auto"),
        },
        _eagle3("layers.0"),
    ),
    "speculators-eagle": Format(
        ("eagle",),
        ("model.safetensors",),
        {
            **SPECULATORS,
            "speculators_model_type": Key("eagle"),
            "transformer_layer_config": Key("the decoder layer"),
            "transformer_layer_architecture": Key("its class", "LlamaDecoderLayer", only=("LlamaDecoderLayer",)),
            "layernorms": Key("three norms more (HASS)", False, only=(False,)),
            "fusion_bias": Key("whether fc has a bias", False),
        },
        {
            "fusion_fc.weight": Row("fc.weight", "D,2*D", "joins embedding and feature"),
            "fusion_fc.bias": Row("fc.bias", "D", "its bias", "fc_bias"),
            **_layer("transformer", "layers.0", "D", input_norm=False),
        },
        ignored=("embed_tokens.", "lm_head."),
    ),
    "hydra": Format(
        ("hydra", "hydra++"),
        ("hydra_lm_head.pt",),
        {
            **TRANSFORMERS,
            "hydra_num_heads": Key("heads; tensors are counted", None),
            "hydra_num_layers": Key("blocks of each head", 1),
            "hydra_head_arch": Key("mlp or prefix-mlp", "mlp", only=("mlp", "prefix-mlp")),
            "base_model_name_or_path": Key("the target", None),
            "grounded_heads": Key("whether heads see the path", False, only=(True,)),
            "hidden_state_offset": Key("which state they read, from the last", 0, only=(0,)),
        },
        {
            "hydra_mlp.{h}.0.linear.weight": Row("blocks.{h}.join.linear.weight", "D,P", "joins state and path"),
            "hydra_mlp.{h}.0.linear.bias": Row("blocks.{h}.join.linear.bias", "D", "its bias"),
            "hydra_mlp.{h}.0.res_connection.weight": Row("blocks.{h}.join.res.weight", "D,P", "its residual"),
            "hydra_mlp.{h}.0.res_connection.bias": Row("blocks.{h}.join.res.bias", "D", "the residual's bias"),
            "hydra_mlp.{h}.{next}.linear.weight": Row("blocks.{h}.layers.{l}.weight", "D,D", "a residual block"),
            "hydra_mlp.{h}.{next}.linear.bias": Row("blocks.{h}.layers.{l}.bias", "D", "its bias"),
            "hydra_lm_head.{h}.weight": Row("lm_heads.{h}.weight", "V,D", "LM head"),
            "hydra_lm_head.{h}.bias": Row("lm_heads.{h}.bias", "V", "its bias"),
            **{
                name: Row(row.ours, row.shape, row.meaning, "prefix_layer")
                for name, row in _layer("prefix_embeding_layer.layers.0", "prefix", "D", input_norm=True).items()
                if row.when != "qk_norm"
            },
            "prefix_embeding_layer.norm.weight": Row(
                "prefix_norm.weight", "D", "norm after the prefix", "prefix_layer"
            ),
        },
        ignored=(
            "input_embed_fn.",
            "prefix_embeding_layer.embed_tokens.",
            "prefix_embeding_layer.layers.0.self_attn.rotary_emb.",
            "lm_head.",
        ),
    ),
}
"""By the name that `headstart import` reports. Servers read `eagle3`, `eagle` and `medusa`, the native formats here;
SafeAILab, SpecForge and ModelOpt write the first two as well."""


@dataclass(frozen=True)
class Place:
    """A tensor of one head: its names and shape."""

    row: Row
    theirs: str
    ours: str
    shape: tuple[int, ...]


def places(form: Format, head: DraftHead) -> Iterator[Place]:
    """Every tensor that a head has in a format."""
    config, layer = head.config, head.shape or head.target
    sizes = {
        "D": layer.hidden_size,
        "Dt": head.target.hidden_size,
        "V": head.target.vocab_size,
        "Vd": head.draft_vocab_size,
        "I": layer.intermediate_size,
        "E": layer.head_dim,
        "Q": layer.num_attention_heads * layer.head_dim,
        "K": layer.num_key_value_heads * layer.head_dim,
        "F": len(head.feature_layers),
    }
    has = {
        "own_embedding": hasattr(head, "embed_tokens"),
        "own_lm_head": getattr(config, "lm_head", None) == "own",
        "qk_norm": getattr(head.shape, "qk_norm", False),
        "truncated": getattr(config, "draft_vocab_size", None) is not None,
    }
    flags = ("bias", "fc_bias", "fc_norm", "norm_before_fc", "prefix_layer")
    has |= {name: getattr(config, name, False) for name in flags}
    first = 1 if isinstance(head, (EagleHead, Eagle3Head)) else 0
    blocks = config.num_layers - 1 if isinstance(head, HydraHead) else config.num_layers  # its joining block apart
    for name, row in form.tensors.items():
        if row.when and not has[row.when]:
            continue
        for h, number, i in itertools.product(
            range(config.num_heads) if "{h}" in name else (0,),
            range(first, blocks) if "{l}" in row.ours else (0,),
            range(sizes["F"]) if "{i}" in name else (0,),
        ):
            theirs = name.format(h=h, l=number, i=i, next=number + 1, blocks=blocks)
            if has["prefix_layer"]:
                theirs = _after_dropout(theirs)
            factors = [part.split("*") for part in row.shape.split(",")]
            known = sizes | {"P": (h + 2) * sizes["D"]}
            shape = tuple(math.prod(known[f] if f in known else int(f) for f in product) for product in factors)
            yield Place(row, theirs, row.ours.format(h=h, l=number, i=i), shape)


def _after_dropout(name: str) -> str:
    """The name of a Hydra tensor in Hydra++, where a dropout precedes, and is counted before, each module."""
    name = re.sub(r"^(hydra_mlp\.\d+)\.(\d+)", lambda match: f"{match[1]}.{2 * int(match[2]) + 1}", name)
    return re.sub(r"^(hydra_lm_head\.\d+)", r"\1.1", name)
