"""Model info: dimensions, modules by their usual names, a fingerprint of the weights, and support for token trees."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from ...heads.base import TargetInfo, TargetModules
from .positions import counts_positions


def target_info(config: Any, name: str, vocab_size: int) -> TargetInfo:
    """A model's dimensions from its transformers config, with Llama's value for a key that it lacks."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # some models have one for each kind of attention
    eps = next((getattr(config, key) for key in ("rms_norm_eps", "layer_norm_eps") if hasattr(config, key)), 1e-5)
    act = next((getattr(config, key) for key in ("hidden_act", "hidden_activation") if hasattr(config, key)), "silu")
    return TargetInfo(
        name=name,
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        num_layers=config.num_hidden_layers,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_act=act,
        rms_norm_eps=eps,
        max_positions=getattr(config, "max_position_embeddings", 2**31 - 1),
        rope_parameters=_rope_of_heads(rope),
    )


def _rope_of_heads(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters for heads, which rotate all of a head's dimensions, by those of the target.

    The factors of longrope are one for each rotated pair: those for a part of the dimensions fit no head.
    """
    default = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    partial = rope.get("partial_rotary_factor") or 1.0
    if rope.get("rope_type") == "longrope" and partial != 1.0:
        return default
    return {**default, **{key: value for key, value in rope.items() if key != "partial_rotary_factor"}}


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of a few values of every weight, rounded to bfloat16: equal in all dtypes, different after training."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        parts: list[Tensor] = [weight]
        if is_traceable_wrapper_subclass(weight):  # weight-only quantization (torchao): a tensor with few operations
            try:
                parts = [weight.dequantize()]
            except NotImplementedError:  # packed for one kernel alone: the parts that it is packed in
                parts = [getattr(weight, part) for part in weight.__tensor_flatten__()[0]]
        for part in parts:
            first = part.detach().flatten()[:64].to(torch.bfloat16).float().cpu()
            digest.update(name.encode() + first.numpy().tobytes())
    return digest.hexdigest()[:16]


def target_modules(model: PreTrainedModel) -> TargetModules:
    """A model's modules by the names that transformers gives them, with the scale and soft cap of its logits."""
    body = getattr(model.base_model, "language_model", model.base_model)
    norms = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
    config: Any = model.config.get_text_config()
    return TargetModules(
        embed=model.get_input_embeddings(),
        lm_head=cast(torch.nn.Linear, model.get_output_embeddings()),
        norm=next((getattr(body, name) for name in norms if hasattr(body, name)), torch.nn.Identity()),
        blocks=next((getattr(body, name) for name in ("layers", "h", "blocks") if hasattr(body, name)), ()),
        logit_scale=float(getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)),
        logit_cap=getattr(config, "final_logit_softcapping", None),
    )


def active_adapters(model: PreTrainedModel) -> Hashable:
    """For each layer, the peft adapters that are active and those that are merged into its weights."""
    if sys.modules.get("peft") is None:  # importing it takes a second, and a model with adapters has done so
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return tuple((tuple(each.active_adapters), each.disable_adapters, tuple(each.merged_adapters)) for each in layers)


KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers whose masks are known."""


def attention_kinds(model: PreTrainedModel) -> tuple[str, ...]:
    """Attention masks that the model's layers need, some of `KINDS`.

    A tree of tokens needs layers of attention alone, whose mask and positions are inputs: each node then attends to
    what it would attend to if its path were the text.

    Raises:
        ValueError: an architecture that cannot process trees, with the reason.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; a target must be a decoder-only causal LM")
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state, which follows one text and not the paths of a tree; a target's layers "
            "must all be attention"
        )
    if counts_positions(model):
        return ("full_attention",)  # whatever they are: its masks are its own
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager", "flex_attention"):
        raise ValueError(
            f"{name} was loaded with attention {attention!r}, which takes no mask of our own; load it with "
            "attn_implementation sdpa or eager, or on a GPU flex_attention"
        )
    if attention == "flex_attention" and model.device.type == "cpu":
        raise ValueError(
            f"{name} was loaded with attention 'flex_attention', whose CPU kernels (torch 2.13) do not compile for "
            "masks that change; load it with attn_implementation sdpa or eager"
        )
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        sliding = getattr(config, "sliding_window", None) is not None
        return ("sliding_attention",) if sliding else ("full_attention",)
    unknown = sorted(set(layer_types) - set(KINDS))
    if unknown:
        raise ValueError(f"{name} has layers of kind {unknown[0]!r}; a target's layers must be {' or '.join(KINDS)}")
    return tuple(sorted(set(layer_types)))
