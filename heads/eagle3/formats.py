"""How each project writes this head: every key of its config.json, every tensor, and the reader."""

from __future__ import annotations

from typing import Any

from ..checkpoints.reading import (
    Keys,
    Source,
    attention_bias,
    feature_layers,
    layer_keys,
    llama_options,
)
from ..checkpoints.tables import LLAMA, SPECULATORS, Format, Key, Row, layer_rows

EAGLE3 = {
    "draft_vocab_size": Key(
        "size of the draft vocabulary; null or absent for the target's", None, kind="size"
    ),
    "target_hidden_size": Key("width of the target; hidden_size where absent", None, kind="size"),
    "norm_before_residual": Key(
        "the residual stream begins after hidden_norm", False, option="norm_before_residual"
    ),
    "norm_before_fc": Key("one norm on all features together", False, option="norm_before_fc"),
    "fc_norm": Key("a norm on each feature", False, option="fc_norm"),
    "norm_output": Key("the normalised output is fed back", False, option="norm_output"),
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


def _tensors(first: str) -> dict[str, Row]:
    """EAGLE-3, its first layer called `first`."""
    return {
        "fc.weight": Row("joins the fused features, the shallowest first"),
        "fc_norm.{i}.weight": Row("norm of one feature"),
        "input_norm.weight": Row("norm of all features"),
        **layer_rows(first, "midlayer"),
        f"{first}.hidden_norm.weight": Row("norm of the state", "midlayer.hidden_norm.weight"),
        **layer_rows("layers.{l}", "layers.{l}"),
        "norm.weight": Row("norm before the LM head"),
        "lm_head.weight": Row("LM head over the draft vocabulary"),
        "embed_tokens.weight": Row("embedding, if not the target's"),
        "d2t": Row("target id minus draft id"),
        "t2d": Row("whether a target id is in the draft vocabulary"),
    }


def _one_window(layer: Keys) -> int | None:
    """The sliding window of all layers of an EAGLE-3 head; None without one."""
    kinds = set(layer["layer_types"] or [])
    # Without `layer_types`, `use_sliding_window` does not say which layers: refused below.
    if kinds <= {"full_attention"} and not (layer["use_sliding_window"] and not kinds):
        return None
    window: int | None = layer["sliding_window"]
    if kinds != {"sliding_attention"} or window is None:
        raise ValueError(
            f"{layer.where}: layer_types are {layer['layer_types']}, use_sliding_window is"
            f" {layer['use_sliding_window']} and sliding_window {window}; a head of this kind has"
            " full_attention alone, or sliding_attention alone with the number of tokens in"
            " sliding_window"
        )
    return window


def eagle3_options(source: Source) -> dict[str, Any]:
    """Return the options of an EAGLE-3 head from its config.json and tensors."""
    keys = source.keys
    tensors = source.tensors
    target = source.target
    remarks = source.remarks

    # 1. The decoder layers: at the top level of config.json, or in an object of speculators'.
    native = source.form == "eagle3"
    eagle_config = (keys["eagle_config"] or {}) if native else {}
    nested = source.read(EAGLE_CONFIG, eagle_config, "eagle_config")
    layer = keys if native else layer_keys(source)
    options = llama_options(layer, source, windows=True)
    options["sliding_window"] = _one_window(layer)
    options["attention_bias"] = attention_bias(source)
    options["qk_norm"] = any(name.endswith("q_norm.weight") for name in tensors)

    # 2. The draft vocabulary, by the rows of the LM head where no size is written.
    size = keys["draft_vocab_size"]
    if size is None and "lm_head.weight" in tensors:
        size = len(tensors["lm_head.weight"])
    options["draft_vocab_size"] = size

    # 3. A norm that two places may name.
    options["norm_before_fc"] = bool(keys["norm_before_fc"] or nested["norm_before_fc"])

    # 4. Feature layers, counted by inputs at the top level and by outputs in `eagle_config`; their
    #    number and width must fit the target and `fc`.
    inputs = keys["eagle_aux_hidden_state_layer_ids"]
    outputs = nested["eagle_aux_hidden_state_layer_ids"]
    options["feature_layers"] = feature_layers(inputs, outputs, target, remarks)
    width = keys["target_hidden_size"]
    count = len(options["feature_layers"])
    if width not in (None, target.hidden_size):
        raise ValueError(
            f"target_hidden_size is {width}, and {target.hidden_size} in the target {target.name!r}"
        )
    if keys["num_aux_hidden_states"] not in (None, count):
        raise ValueError(
            f"num_aux_hidden_states is {keys['num_aux_hidden_states']}, and feature layers "
            f"{options['feature_layers']} are {count}"
        )
    weight = tensors.get("fc.weight")
    if weight is not None and weight.ndim == 2 and weight.shape[1] != count * target.hidden_size:
        raise ValueError(
            f"fc.weight reads {weight.shape[1]} values, and {count} feature layers of the target"
            f" {target.name!r} are {count} x {target.hidden_size}"
        )
    # 5. A default on which the projects disagree.
    if not native and "norm_before_residual" not in keys.config:
        remarks.append(
            "norm_before_residual is missing: read as false, speculators' own default; vLLM reads"
            " true"
        )
    return options


FORMATS: dict[str, Format] = {
    "eagle3": Format(
        ("eagle3",),
        {
            **LLAMA,
            **EAGLE3,
            "eagle_config": Key("more options", {}, kind="object"),
            "bias": Key("bias of fc", False, only=(False,)),
        },
        _tensors("midlayer"),
        read=eagle3_options,
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
        _tensors("layers.0"),
        read=eagle3_options,
    ),
}
"""By the name that `headstart import` reports."""
