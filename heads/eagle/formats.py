"""How each project writes this head: every key of its config.json, every tensor, and the reader."""

from __future__ import annotations

from typing import Any

from ..checkpoints.reading import Source, attention_bias, layer_keys, llama_options
from ..checkpoints.tables import LLAMA, SPECULATORS, Format, Key, Row, layer_rows


def eagle_options(source: Source) -> dict[str, Any]:
    """Return the options of an EAGLE head from its config.json and tensors."""
    keys = source.keys
    tensors = source.tensors
    remarks = source.remarks
    native = source.form == "eagle"
    options = llama_options(keys if native else layer_keys(source), source)
    options["attention_bias"] = attention_bias(source)
    width = options.pop("hidden_size")
    if width is not None:
        raise ValueError(
            f"{keys.where}: hidden_size is {width}, and an EAGLE-1 head is as wide as its target "
            f"{source.target.name!r}, {source.target.hidden_size}"
        )
    # SafeAILab's `fc` has a bias by default. One of zeros is left out: vLLM reads none.
    name, key = ("fc.bias", "bias") if native else ("fusion_fc.bias", "fusion_bias")
    bias = tensors.get(name)
    if bias is not None and not bias.any():
        tensors.pop(name)
        remarks.append(f"{name} is zero and left out")
    elif bias is not None:
        options["fc_bias"] = True
        remarks.append("fc has a bias: SGLang reads such a head, vLLM does not")
    elif keys.config.get(key):
        raise ValueError(f"{keys.where}: {key} is true and the tensor {name!r} is missing")
    return options


FORMATS: dict[str, Format] = {
    "eagle": Format(
        ("eagle",),
        {
            **LLAMA,
            "bias": Key(
                "whether fc has a bias: SafeAILab's default, which vLLM does not read", True
            ),
        },
        {
            "fc.weight": Row("joins embedding and feature"),
            "fc.bias": Row("its bias"),
            **layer_rows("layers.{l}", "layers.{l}"),
        },
        ignored=("embed_tokens.",),
        read=eagle_options,
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
            "fusion_fc.weight": Row("joins embedding and feature", "fc.weight"),
            "fusion_fc.bias": Row("its bias", "fc.bias"),
            **layer_rows("transformer", "layers.0"),
        },
        ignored=("embed_tokens.", "lm_head."),
        read=eagle_options,
    ),
}
"""By the name that `headstart import` reports."""
