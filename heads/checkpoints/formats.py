"""How each project writes a draft head: tables of every key of its config.json and every tensor.

`export_formats.py` writes only what is in these tables, and `import_formats.py` refuses a tensor
that is not, and a key that may change what a layer computes. In names {l} counts decoder layers or
blocks, {i} fused features and {h} heads; {next} is l + 1, {blocks} the number of blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..base import DraftHead

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
    kind: str = ""
    """Kind of its values, see `KINDS`; with "", of the default where that is true, false or a
    number."""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "size": ("a whole number of at least 1", lambda value: _whole(value) and value >= 1),
    "id": ("a whole number of at least 0", lambda value: _whole(value) and value >= 0),
    "positive": (
        "a number above 0",
        lambda value: (
            isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        ),
    ),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a text", lambda value: isinstance(value, str)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "numbers": (
        "a list of whole numbers",
        lambda value: isinstance(value, list) and all(map(_whole, value)),
    ),
    "texts": (
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    ),
}
"""What a key's value must be, and the test of it; null is always allowed where the key may be left
out."""
MAY_COMPUTE = re.compile(
    r"softcap|multiplier|scal(e|ing)|rotary|rope|alibi|causal|window|sink"
    r"|norm|bias|residual|parallel|logit|clip|clamp"
    r"|(^|_)act(_|$)|act_fn|activation|temperature|query_pre|interleave|nope|eps(ilon)?$"
)
"""Names of keys by which a layer may compute something else without having other tensors."""
OF_TENSORS = re.compile(
    r"expert|router|routed|moe|topk|top_k|lora|vision|visual|image|video|audio"
    r"|token|quantization|dropout|initializer|loss"
)
"""Names of keys that speak of tensors, by which they are judged, of text or of training."""


EVIDENCE = {r"bias": r"\.bias$", r"qk_?(layer)?norm": r"\.q_norm\.", r"sink": r"sink"}
"""Names of flags, and of the tensors that a file has where they are set."""


def may_compute(name: str, value: Any, tensors: Collection[str]) -> bool:
    """Whether an unknown key may change what a draft layer computes.

    By its name, unless its value says that it is off. Whatever adds weights shows in the tensors of
    a file, of which each must have its place.
    """
    off = not value if isinstance(value, bool) else value in (None, 0, 1, "", "none", [], {})
    if off or MAY_COMPUTE.search(name) is None or OF_TENSORS.search(name) is not None:
        return False
    for flag, tensor in EVIDENCE.items():
        if value is True and re.search(flag, name):
            return not any(re.search(tensor, each) for each in tensors)
    return True


class Row(NamedTuple):
    """A tensor, or one for each layer, feature or head."""

    ours: str
    """Name in our state_dict."""
    meaning: str


@dataclass(frozen=True)
class Format:
    """The format of one project for one family of heads."""

    heads: tuple[str, ...]
    """Names in `HEADS` that it can hold."""
    keys: dict[str, Key]
    tensors: dict[str, Row]
    """By their names in the file."""
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors that are copies of the target's."""


OWN = "of transformers, irrelevant for the head"
TRANSFORMERS = {
    name: Key(OWN, None)
    for name in (
        *(
            "architectures",
            "auto_map",
            "bos_token_id",
            "dtype",
            "eos_token_id",
            "initializer_range",
            "model_type",
        ),
        *("pad_token_id", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"),
    )
}
LLAMA = {
    **TRANSFORMERS,
    "rope_theta": Key(
        "base of the rotary positions, and not the target's where it is absent",
        10000.0,
        kind="positive",
    ),
    "rope_scaling": Key("scaling of the rotary positions", None, kind="object"),
    "rope_parameters": Key("both, as transformers 5 writes them", None, kind="object"),
    "partial_rotary_factor": Key(
        "share of a head's width that has rotary positions", 1.0, only=(1.0, None)
    ),
    "hidden_size": Key("width of the head", kind="size"),
    "intermediate_size": Key("width of the MLP", kind="size"),
    "num_attention_heads": Key("query heads", kind="size"),
    "num_key_value_heads": Key(
        "key and value heads; as many as query heads where absent", None, kind="size"
    ),
    "head_dim": Key(
        "width of an attention head; hidden_size / query heads where absent", None, kind="size"
    ),
    "hidden_act": Key("activation of the MLP", "silu", kind="text"),
    "rms_norm_eps": Key("of all norms", 1e-6, kind="positive"),
    "num_hidden_layers": Key(
        "decoder layers, or the target's blocks in a config made from the target's", 1, kind="size"
    ),
    "vocab_size": Key("size of the target's vocabulary", kind="size"),
    "max_position_embeddings": Key("longest text that a server allows", 2048),
    "tie_word_embeddings": Key(
        "whether the LM head is the embedding, unless it has weights of its own", False
    ),
    "attention_bias": Key("bias in attention", False),
    "qkv_bias": Key("bias of queries, keys and values, SafeAILab's key", False),
    "attention_dropout": Key("training only", 0.0),
    "mlp_bias": Key("bias in the MLP", False, only=(False,)),
    "logit_scale": Key("factor of the logits", 1.0, only=(1.0, None)),
    "pretraining_tp": Key("of transformers, has no effect", 1),
    "sliding_window": Key("tokens that a query of a sliding layer sees", None, kind="size"),
    "use_sliding_window": Key("whether there are such layers", False),
    "max_window_layers": Key("of sliding_window", None),
    "layer_types": Key(
        "attention of each layer: full_attention or sliding_attention", None, kind="texts"
    ),
}
EAGLE3 = {
    "draft_vocab_size": Key(
        "size of the draft vocabulary; null or absent for the target's", None, kind="size"
    ),
    "target_hidden_size": Key("width of the target; hidden_size where absent", None, kind="size"),
    "norm_before_residual": Key("the residual stream begins after hidden_norm", False),
    "norm_before_fc": Key("one norm on all features together", False),
    "fc_norm": Key("a norm on each feature", False),
    "norm_output": Key("the normalised output is fed back", False),
    "eagle_aux_hidden_state_layer_ids": Key(
        "feature layers, each by the block whose input it is", None, kind="numbers"
    ),
    "num_aux_hidden_states": Key("how many features are fused", None, kind="size"),
}
EAGLE_CONFIG = {
    "eagle_aux_hidden_state_layer_ids": Key(
        "feature layers, each by the block whose output it is", None, kind="numbers"
    ),
    "use_aux_hidden_state": Key("whether features of several layers are fused", True, only=(True,)),
    "norm_before_fc": Key("as at the top level", False),
    "use_input_layernorm_in_first_layer": Key(
        "ModelOpt: the first layer's input norm", True, only=(True,)
    ),
    "use_last_layernorm": Key("ModelOpt: the norm before the LM head", True, only=(True,)),
    "use_mtp_layernorm": Key(
        "ModelOpt: norms of multi-token prediction", False, only=(False, None)
    ),
    "next_layer_regular": Key(
        "ModelOpt: layers after the first are plain ones", True, only=(True, None)
    ),
    "parallel_draft_step": Key("ModelOpt: tokens drafted at once", 1, only=(1, None)),
    "parallel_draft_heads_num_layers": Key("ModelOpt: of parallel drafting", None),
}
"""Keys of `eagle_config`."""
DFLASH = {
    "block_size": Key("slots of a block, the root's included", kind="size"),
    "draft_vocab_size": Key(
        "size of the draft vocabulary; null or absent for the target's", None, kind="size"
    ),
    "sample_from_anchor": Key("whether the root's slot drafts", False),
}
DSPARK = {
    "markov_rank": Key("width of the dependence on the token before; 0 would be DFlash", kind="id"),
    "markov_head_type": Key("its kind: vanilla, gated or rnn", "vanilla", kind="text"),
    "enable_confidence_head": Key("whether the head estimates its acceptance rate", False),
    "confidence_head_with_markov": Key("whether that estimate sees the token before", False),
}
DFLASH_NATIVE = {
    "num_target_layers": Key("blocks of the target", None, kind="size"),
    "aux_hidden_state_layer_ids": Key(
        "feature layers once more, each by the block whose input it is", None, kind="numbers"
    ),
    "eagle_aux_hidden_state_layer_ids": Key("the same", None, kind="numbers"),
    "is_causal": Key(
        "whether slots see only those before them; absent: where layers slide",
        None,
        only=(None, False),
    ),
}
"""Keys of the form that servers read."""
DFLASH_CONFIG = {
    "mask_token_id": Key("token of the slots behind the root", kind="id"),
    "target_layer_ids": Key("feature layers, each by the block whose output it is", kind="numbers"),
    "sample_from_anchor": Key("as at the top level", None, kind="flag"),
    "block_size": Key("as at the top level", None, kind="size"),
    "causal": Key("as is_causal at the top level", None, only=(None, False)),
    "use_swa": Key(
        "whether all layers see a window of the context, if layer_types names none", False
    ),
    "swa_window_size": Key("the window; sliding_window where absent", None, kind="size"),
    "attention_sink_bias": Key(
        "learned sinks of attention, the tensors self_attn.sinks", False, only=(False, None)
    ),
    "projector_type": Key("another way to join features", None, only=(None,)),
}
"""Keys of `dflash_config`."""

SPECULATORS = {
    **{
        name: TRANSFORMERS[name]
        for name in ("architectures", "auto_map", "dtype", "model_type", "torch_dtype")
    },
    **{name: Key(OWN, None) for name in ("transformers_version", "speculators_version")},
    "speculators_config": Key("how it drafts, and the verifier's name and architecture"),
    "tie_word_embeddings": LLAMA["tie_word_embeddings"],
}
"""Keys of both of its kinds."""


def _layer(theirs: str, ours: str) -> dict[str, Row]:
    """Rows of a decoder layer's tensors, with its prefix in the format and the one it has here."""
    meanings = {
        "self_attn.q_proj": "queries",
        "self_attn.k_proj": "keys",
        "self_attn.v_proj": "values",
        "self_attn.o_proj": "attention's output",
        "self_attn.q_norm": "norm of each query",
        "self_attn.k_norm": "norm of each key",
        "mlp.gate_proj": "the MLP's gate",
        "mlp.up_proj": "into the MLP",
        "mlp.down_proj": "out of the MLP",
        "input_layernorm": "norm before attention; in the first layer, of the embedding",
        "post_attention_layernorm": "norm before the MLP",
    }
    rows = {
        f"{theirs}.{name}.weight": Row(f"{ours}.{name}.weight", meaning)
        for name, meaning in meanings.items()
    }
    for kind, meaning in {"q": "queries", "k": "keys", "v": "values"}.items():
        name = f"self_attn.{kind}_proj.bias"
        rows[f"{theirs}.{name}"] = Row(f"{ours}.{name}", f"bias of the {meaning}")
    return rows


def _same(name: str, meaning: str) -> dict[str, Row]:
    """A tensor that is called the same here."""
    return {name: Row(name, meaning)}


def _eagle3(first: str) -> dict[str, Row]:
    """EAGLE-3, its first layer called `first`."""
    return {
        "fc.weight": Row("fc.weight", "joins the fused features, the shallowest first"),
        "fc_norm.{i}.weight": Row("fc_norm.{i}.weight", "norm of one feature"),
        "input_norm.weight": Row("input_norm.weight", "norm of all features"),
        **_layer(first, "midlayer"),
        f"{first}.hidden_norm.weight": Row("midlayer.hidden_norm.weight", "norm of the state"),
        **_layer("layers.{l}", "layers.{l}"),
        "norm.weight": Row("norm.weight", "norm before the LM head"),
        "lm_head.weight": Row("lm_head.weight", "LM head over the draft vocabulary"),
        "embed_tokens.weight": Row("embed_tokens.weight", "embedding, if not the target's"),
        "d2t": Row("d2t", "target id minus draft id"),
        "t2d": Row("t2d", "whether a target id is in the draft vocabulary"),
    }


_DFLASH = {
    "fc.weight": Row("fc.weight", "joins the features, the shallowest first"),
    "hidden_norm.weight": Row("hidden_norm.weight", "norm of the context"),
    **_layer("layers.{l}", "layers.{l}"),
    "norm.weight": Row("norm.weight", "norm before the LM head"),
    "lm_head.weight": Row("lm_head.weight", "LM head over the draft vocabulary"),
    "d2t": Row("d2t", "target id minus draft id"),
    "t2d": Row("t2d", "whether a target id is in the draft vocabulary"),
}
_DSPARK = {
    **_DFLASH,
    "markov_head.markov_w1.weight": Row(
        "markov_head.markov_w1.weight", "embedding of the token before a draft"
    ),
    "markov_head.markov_w2.weight": Row(
        "markov_head.markov_w2.weight", "correction of the logits by it"
    ),
    "markov_head.gate_proj.weight": Row("markov_head.gate_proj.weight", "gate of the correction"),
    "markov_head.gate_proj.bias": Row("markov_head.gate_proj.bias", "its bias"),
    "markov_head.joint_proj.weight": Row(
        "markov_head.joint_proj.weight", "gate, candidate and output of the RNN"
    ),
    "markov_head.joint_proj.bias": Row("markov_head.joint_proj.bias", "their bias"),
    "confidence_head.proj.weight": Row(
        "confidence_head.proj.weight", "estimate of the acceptance rate"
    ),
    "confidence_head.proj.bias": Row("confidence_head.proj.bias", "its bias"),
}

FORMATS: dict[str, Format] = {
    "eagle3": Format(
        ("eagle3",),
        {
            **LLAMA,
            **EAGLE3,
            "eagle_config": Key("more options", {}, kind="object"),
            "bias": Key("bias of fc", False, only=(False,)),
        },
        _eagle3("midlayer"),
    ),
    "eagle": Format(
        ("eagle",),
        {
            **LLAMA,
            "bias": Key(
                "whether fc has a bias: SafeAILab's default, which vLLM does not read", True
            ),
        },
        {
            "fc.weight": Row("fc.weight", "joins embedding and feature"),
            "fc.bias": Row("fc.bias", "its bias"),
            **_layer("layers.{l}", "layers.{l}"),
        },
        ignored=("embed_tokens.",),
    ),
    "medusa": Format(
        ("medusa",),
        {
            **TRANSFORMERS,
            "hidden_size": Key("width of the head", kind="size"),
            "vocab_size": Key("size of the target's vocabulary", kind="size"),
            "truncated_vocab_size": Key(
                "size of the draft vocabulary; null or absent for the target's", None, kind="size"
            ),
            "num_heads": Key("heads", 5, kind="size"),
            "num_hidden_layers": Key(
                "blocks of each head, or of the target in its own config", 1, kind="size"
            ),
            "medusa_fc_bias": Key("whether the blocks have a bias", False),
            "original_lm_head": Key("whether one LM head serves all heads", False),
            "max_paths": Key("of a tree, not read any more", 64),
            "topk": Key("of a tree, not read any more", 10),
            "max_seq_len": Key("longest text that a server allows", None),
            "logit_scale": Key("factor of the logits", 1.0, only=(1.0,)),
        },
        {
            "blocks.{h}.layers.{l}.weight": Row("blocks.{h}.layers.{l}.weight", "a residual block"),
            "blocks.{h}.layers.{l}.bias": Row("blocks.{h}.layers.{l}.bias", "its bias"),
            "lm_heads.{h}.weight": Row("lm_heads.{h}.weight", "LM head"),
            "token_map": Row("token_map", "target ids of the draft vocabulary"),
        },
    ),
    "fasterdecoding": Format(
        ("medusa",),
        {
            **TRANSFORMERS,
            "medusa_num_heads": Key(
                "heads; published files have more than they say, so tensors are counted", None
            ),
            "medusa_num_layers": Key("blocks of each head; tensors are counted", 1),
            "hidden_size": Key("width of the head, in a whole model's config", None, kind="size"),
            "vocab_size": Key(
                "size of the target's vocabulary, in a whole model's config", None, kind="size"
            ),
            "base_model_name_or_path": Key("the target", None),
            "version": Key("2 for heads without an LM head of their own", None),
        },
        {
            "{h}.{l}.linear.weight": Row("blocks.{h}.layers.{l}.weight", "a residual block"),
            "{h}.{l}.linear.bias": Row("blocks.{h}.layers.{l}.bias", "its bias"),
            "{h}.{blocks}.weight": Row("lm_heads.{h}.weight", "LM head"),
        },
    ),
    "speculators": Format(
        ("eagle3",),
        {
            **SPECULATORS,
            **EAGLE3,
            "speculators_model_type": Key("eagle3"),
            "transformer_layer_config": Key(
                "the decoder layers: what differs from the defaults of their class", kind="object"
            ),
            "embed_requires_grad": Key("training only", False),
            "draft_attn_kernel": Key("training only", "auto"),
        },
        _eagle3("layers.0"),
    ),
    "speculators-eagle": Format(
        ("eagle",),
        {
            **SPECULATORS,
            "speculators_model_type": Key("eagle"),
            "transformer_layer_config": Key("the decoder layer", kind="object"),
            "transformer_layer_architecture": Key(
                "its class", "LlamaDecoderLayer", only=("LlamaDecoderLayer",)
            ),
            "layernorms": Key("three norms more (HASS)", False, only=(False,)),
            "fusion_bias": Key("whether fc has a bias", False),
        },
        {
            "fusion_fc.weight": Row("fc.weight", "joins embedding and feature"),
            "fusion_fc.bias": Row("fc.bias", "its bias"),
            **_layer("transformer", "layers.0"),
        },
        ignored=("embed_tokens.", "lm_head."),
    ),
    "dflash": Format(
        ("dflash",),
        {
            **LLAMA,
            **DFLASH,
            **DFLASH_NATIVE,
            "mask_token_id": Key("as in dflash_config", None, kind="id"),
            "target_layer_ids": Key("as in dflash_config", None, kind="numbers"),
            "dflash_config": Key("more options", kind="object"),
        },
        _DFLASH,
        ignored=("embed_tokens.",),
    ),
    "speculators-dflash": Format(
        ("dflash",),
        {
            **SPECULATORS,
            **DFLASH,
            "speculators_model_type": Key("dflash"),
            "transformer_layer_config": Key(
                "the decoder layers: what differs from the defaults of their class", kind="object"
            ),
            "aux_hidden_state_layer_ids": Key(
                "feature layers, each by the block whose input it is", kind="numbers"
            ),
            "mask_token_id": Key("token of the slots behind the root", kind="id"),
            "target_hidden_size": Key(
                "width of the target; hidden_size where absent", None, kind="size"
            ),
            "sliding_window_non_causal": Key(
                "whether slots of sliding layers see those behind them", False
            ),
        },
        _DFLASH,
        ignored=("embed_tokens.",),
    ),
    "speculators-dspark": Format(
        ("dspark",),
        {
            **SPECULATORS,
            **DFLASH,
            **DSPARK,
            "sample_from_anchor": Key("whether the root's slot drafts", True),
            "speculators_model_type": Key("dspark"),
            "transformer_layer_config": Key(
                "the decoder layers: what differs from the defaults of their class", kind="object"
            ),
            "aux_hidden_state_layer_ids": Key(
                "feature layers, each by the block whose input it is", kind="numbers"
            ),
            "mask_token_id": Key("token of the slots behind the root", kind="id"),
            "target_hidden_size": Key(
                "width of the target; hidden_size where absent", None, kind="size"
            ),
            "sliding_window_non_causal": Key(
                "whether slots of sliding layers see those behind them", False
            ),
        },
        _DSPARK,
        ignored=("embed_tokens.",),
    ),
    "speculators-mtp": Format(
        ("mtp",),
        {
            **SPECULATORS,
            "speculators_model_type": Key("mtp"),
            "transformer_layer_config": Key(
                "the target's text config, which says of what kind the layer is", kind="object"
            ),
            "num_nextn_predict_layers": Key("layers", 1, kind="size"),
        },
        {
            **_same("mtp_layers.{l}.input_proj.weight", "joins embedding and state"),
            **_same("mtp_layers.{l}.token_layernorm.weight", "norm of the embedding"),
            **_same("mtp_layers.{l}.hidden_layernorm.weight", "norm of the state"),
            **_same("mtp_layers.{l}.final_layernorm.weight", "norm of the output"),
            **_layer("mtp_layers.{l}", "mtp_layers.{l}"),
        },
        ignored=("embed_tokens.", "lm_head."),
    ),
    "dspark": Format(
        ("dspark",),
        {
            **LLAMA,
            **DFLASH,
            **DSPARK,
            "sample_from_anchor": Key("whether the root's slot drafts", True),
            **DFLASH_NATIVE,
            "mask_token_id": DFLASH_CONFIG["mask_token_id"],
            "target_layer_ids": DFLASH_CONFIG["target_layer_ids"],
            "num_anchors": Key("training only", None),
        },
        _DSPARK,
        ignored=("embed_tokens.",),
    ),
    "hydra": Format(
        ("hydra", "hydra++"),
        {
            **TRANSFORMERS,
            "hydra_num_heads": Key("heads; tensors are counted", None),
            "hydra_num_layers": Key("blocks of each head", 1, kind="size"),
            "hydra_head_arch": Key("mlp or prefix-mlp", "mlp", only=("mlp", "prefix-mlp")),
            "hidden_size": Key("width of the head, in a whole model's config", None, kind="size"),
            "vocab_size": Key(
                "size of the target's vocabulary, in a whole model's config", None, kind="size"
            ),
            "base_model_name_or_path": Key("the target", None),
            "grounded_heads": Key("whether heads see the path", False, only=(True,)),
            "hidden_state_offset": Key("which state they read, from the last", 0, only=(0,)),
        },
        {
            "hydra_mlp.{h}.0.linear.weight": Row(
                "blocks.{h}.join.linear.weight", "joins state and path"
            ),
            "hydra_mlp.{h}.0.linear.bias": Row("blocks.{h}.join.linear.bias", "its bias"),
            "hydra_mlp.{h}.0.res_connection.weight": Row(
                "blocks.{h}.join.res.weight", "its residual"
            ),
            "hydra_mlp.{h}.0.res_connection.bias": Row(
                "blocks.{h}.join.res.bias", "the residual's bias"
            ),
            "hydra_mlp.{h}.{next}.linear.weight": Row(
                "blocks.{h}.layers.{l}.weight", "a residual block"
            ),
            "hydra_mlp.{h}.{next}.linear.bias": Row("blocks.{h}.layers.{l}.bias", "its bias"),
            "hydra_lm_head.{h}.weight": Row("lm_heads.{h}.weight", "LM head"),
            "hydra_lm_head.{h}.bias": Row("lm_heads.{h}.bias", "its bias"),
            **_layer("prefix_embeding_layer.layers.0", "prefix"),
            "prefix_embeding_layer.norm.weight": Row("prefix_norm.weight", "norm after the prefix"),
        },
        ignored=(
            "input_embed_fn.",
            "prefix_embeding_layer.embed_tokens.",
            "prefix_embeding_layer.layers.0.self_attn.rotary_emb.",
            "lm_head.",
        ),
    ),
}
"""By the name that `headstart import` reports. Servers read `eagle3`, `eagle`, `medusa`, `dflash`
and `dspark` as saved here; SafeAILab, SpecForge and ModelOpt write the first two as well."""


class Place(NamedTuple):
    """A tensor of a head, with its names in a format and here."""

    theirs: str
    ours: str
    meaning: str
    tensor: Tensor


def places(form: Format, head: DraftHead) -> Iterator[Place]:
    """Every tensor of a head that a format has a name for."""
    state = head.state_dict()
    for theirs, row in form.tensors.items():
        # {h} to (?P<h>\d+)
        pattern = re.compile(re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d+)", re.escape(row.ours)))
        for ours, tensor in state.items():
            if match := pattern.fullmatch(ours):
                numbers = {letter: int(number) for letter, number in match.groupdict().items()}
                name = theirs.format(
                    **numbers, next=numbers.get("l", 0) + 1, blocks=head.config.num_layers
                )
                # Hydra++ counts the dropout before each module
                if getattr(head.config, "prefix_layer", False):
                    name = re.sub(
                        r"^(hydra_mlp\.\d+)\.(\d+)",
                        lambda old: f"{old[1]}.{2 * int(old[2]) + 1}",
                        name,
                    )
                    name = re.sub(r"^(hydra_lm_head\.\d+)", r"\1.1", name)
                yield Place(name, ours, row.meaning, tensor)
