"""Model info: dimensions, modules by usual names, weight fingerprint, support for token trees."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from ...heads.base import TargetInfo, TargetModules
from .states import keeps_states, kinds_beside_states

HEAD_SIZE = 128
"""Assumed width of an attention head, for drafting for a model that has no attention."""
WITHOUT_MIXING = frozenset({"mlp", "moe"})
"""Kinds of layers in which no token sees another."""
FINGERPRINTED = 64
"""Values of each weight that its fingerprint is made of."""


def target_info(config: Any, name: str, vocab_size: int, num_layers: int) -> TargetInfo:
    """Read a model's dimensions from its transformers config, with Llama's names and defaults."""
    heads = layer_fact(config, "num_attention_heads") or max(1, config.hidden_size // HEAD_SIZE)
    return TargetInfo(
        name=name,
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        num_layers=num_layers,
        intermediate_size=layer_fact(config, "intermediate_size") or 4 * config.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=layer_fact(config, "num_key_value_heads") or heads,
        head_dim=layer_fact(config, "head_dim") or config.hidden_size // heads,
        hidden_act=_first_of(config, ("hidden_act", "hidden_activation"), "silu"),
        rms_norm_eps=_first_of(config, ("rms_norm_eps", "layer_norm_eps"), 1e-5),
        max_positions=getattr(config, "max_position_embeddings", None) or 2**31 - 1,
        rope_parameters=_rope_of_heads(rope_of(config)),
    )


def _first_of(holder: Any, names: Sequence[str], default: Any) -> Any:
    """Return the first of these attributes that a config or module has, else `default`."""
    for name in names:
        if hasattr(holder, name):
            return getattr(holder, name)
    return default


def layer_fact(config: Any, name: str) -> Any:
    """Return a value of a config, the first layer's where layers differ; None without such a key.

    Layers may differ by a list of values, or by a config for each layer. The common config then
    refuses to tell.
    """
    try:
        value = getattr(config, name, None)
    # transformers' AmbiguousGlobalPerLayerAttributeError: older versions lack the class.
    except RuntimeError:
        value = getattr(config.per_layer_config[0], name, None)
    if isinstance(value, list | tuple):
        return value[0] if value else None
    return value


def rope_of(config: Any) -> dict[str, Any]:
    """Return the rotary embedding of a config.

    Where kinds of layers differ, it is that of full attention, else the first.

    Empty for a model, or a kind of layer, without one.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # One for all layers: {"rope_type": "default", "rope_theta": 10000.0}.
    if "rope_type" in rope or "rope_theta" in rope:
        return dict(rope)
    # One for each kind: {"full_attention": {...}, "sliding_attention": {...}}.
    by_kind = {kind: part for kind, part in rope.items() if isinstance(part, dict)}
    if "full_attention" in rope:
        return dict(rope["full_attention"] or {})
    return dict(next(iter(by_kind.values()), rope))


def _rope_of_heads(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters for draft heads, from the target's.

    Draft heads rotate all dimensions of an attention head. longrope has one factor for each rotated
    pair, so factors of a target that rotates only a part of the dimensions do not fit: the default
    embedding is used instead.
    """
    default = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    partial = rope.get("partial_rotary_factor") or 1.0
    if rope.get("rope_type") == "longrope" and partial != 1.0:
        return default
    return {
        **default,
        **{key: value for key, value in rope.items() if key != "partial_rotary_factor"},
    }


def fingerprint(model: PreTrainedModel) -> str:
    """Hash a few values of every weight, rounded to bfloat16.

    The hash is equal in all dtypes and differs after training.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        parts: list[Tensor] = [weight]
        # Weight-only quantization (torchao): a tensor with few operations.
        if is_traceable_wrapper_subclass(weight):
            try:
                parts = [weight.dequantize()]
            # Packed for one kernel alone: hash the parts that it is packed in.
            except NotImplementedError:
                parts = [getattr(weight, part) for part in weight.__tensor_flatten__()[0]]
        for part in parts:
            # A few values are read, so that a large model is hashed in a moment.
            first = part.detach().flatten()[:FINGERPRINTED].to(torch.bfloat16).float().cpu()
            digest.update(name.encode() + first.numpy().tobytes())
    return digest.hexdigest()[:16]


BLOCKS = ("layers", "h", "blocks")
"""Names of a decoder's blocks."""
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")
"""Names of its final norm."""
TRANSFORMS = ("lm_head", "cls.predictions.transform", "generator_predictions")
"""Names of the layers before an LM head's matrix, in models whose `get_output_embeddings` is the
matrix alone."""


def target_modules(model: PreTrainedModel) -> TargetModules:
    """Return a model's modules by their transformers names.

    The scale and soft cap of its logits come with them.
    """
    # A multimodal model has its language model inside, by one of two names.
    body = getattr(model.base_model, "language_model", model.base_model)
    if not any(hasattr(body, name) for name in BLOCKS):  # a causal LM in a multimodal one
        body = model.get_decoder()
    config: Any = model.config.get_text_config()
    # Families multiply (Cohere, Falcon-H1) or divide (Granite) logits; `computes_logits` tries it.
    scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
    return TargetModules(
        embed=model.get_input_embeddings(),
        lm_head=cast(torch.nn.Linear, model.get_output_embeddings()),
        norm=_first_of(body, NORMS, torch.nn.Identity()),
        blocks=_first_of(body, BLOCKS, ()),
        logit_scale=float(scale or 1 / (getattr(config, "logits_scaling", None) or 1)),
        logit_cap=getattr(config, "final_logit_softcapping", None),
    )


def before_lm_head(model: PreTrainedModel) -> torch.nn.Module | None:
    """Return the layers between the final norm and the LM head's matrix; None without any.

    BERT's relatives have such layers.
    """
    for path in TRANSFORMS:
        # "cls.predictions.transform" is the attribute of an attribute of an attribute.
        part: Any = model
        for name in path.split("."):
            part = getattr(part, name, None)
        # A part that contains the matrix is the LM head itself, not layers before it.
        lm_head = model.get_output_embeddings()
        if part is not None and all(module is not lm_head for module in part.modules()):
            return cast(torch.nn.Module, part)
    return None


KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers whose masks are known."""


def attention_kinds(model: PreTrainedModel) -> tuple[str, ...]:
    """Attention masks that the model's layers need, some of `KINDS`.

    A tree of tokens needs layers of attention, whose mask and positions are inputs: each node then
    attends to what it would attend to if its path were the text. For layers with a state see
    `states`.

    Raises:
        ValueError: an architecture that cannot process trees, with the reason.
    """
    config = model.config.get_text_config()
    name = type(model).__name__

    # 1. Models that cannot read a tree, or any draft.
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; a target must be a decoder-only causal LM")
    # The decoder makes its masks by its own config, transformers' cache is made by the model's.
    decoder_config = getattr(model.get_decoder(), "config", model.config).get_text_config()
    for key in ("layer_types", "sliding_window", "attention_chunk_size"):
        values = [getattr(each, key, None) for each in (config, decoder_config)]
        if values[0] != values[1]:
            raise ValueError(
                f"{key} is {values[0]} in the config of {name} and {values[1]} in that of its"
                " decoder; set it in both, as loading does"
            )
    stateful = keeps_states(model)
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ValueError(
            f"{name} reads a prompt in both directions (use_bidirectional_attention), so tokens"
            " that are read later change what was computed for earlier ones; a target must read"
            " causally"
        )
    if not stateful and counts_positions(model):
        return ("full_attention",)  # not used: the model makes its masks itself

    # 2. Implementations of attention that take no 4-D mask.
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager", "flex_attention"):
        raise ValueError(
            f"{name} was loaded with attention {attention!r}, which takes no mask of our own; load"
            " it with attn_implementation sdpa or eager, or on a GPU flex_attention"
        )
    if attention == "flex_attention" and model.device.type == "cpu":
        raise ValueError(
            f"{name} was loaded with attention 'flex_attention', whose CPU kernels (torch 2.13) do"
            " not compile for masks that change; load it with attn_implementation sdpa or eager"
        )

    # 3. The kinds of its layers.
    if stateful:
        return kinds_beside_states(model)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        # A window over all positions has no effect, and some models with one make no mask for it.
        window = getattr(config, "sliding_window", None)
        sliding = window is not None and window < (
            getattr(config, "max_position_embeddings", None) or math.inf
        )
        return ("sliding_attention",) if sliding else ("full_attention",)
    kinds = set(layer_types) - WITHOUT_MIXING
    unknown = sorted(kinds - set(KINDS))
    if unknown:
        raise ValueError(
            f"{name} has layers of kind {unknown[0]!r}; a target's layers must be"
            f" {' or '.join(KINDS)}"
        )
    return tuple(sorted(kinds))


def counts_positions(model: PreTrainedModel) -> str:
    """Return a clause that says why a decoder-only model ties positions to its cache.

    Such a model cannot be told that two nodes of a tree have the same position, and decodes in
    chains; see `engines.counting`. Return "" for a model that takes positions as an input.
    """
    config: Any = model.config.get_text_config()
    if model.config.is_encoder_decoder or keeps_states(model):
        return ""
    # ALiBi adds a bias to scores by the distance of two slots, whatever their positions.
    if getattr(config, "alibi", False):
        return "uses ALiBi, which counts places in the cache"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids"
    # A table of masks, such as GPT-Neo's, is cut by the number of cached tokens.
    if any(_is_causal_mask(buffer, config) for buffer in _buffers(model)):
        return "cuts its masks out of a table by places in the cache"
    return ""


def _buffers(model: PreTrainedModel) -> list[Tensor]:
    """The buffers of a model's blocks."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return [buffer for blocks in lists for buffer in blocks.buffers()]


def _is_causal_mask(buffer: Tensor, config: Any) -> bool:
    """Whether a buffer is a mask [..., P, P] by positions, with or without a local window."""
    positions = getattr(config, "max_position_embeddings", None)
    return (
        buffer.dtype == torch.bool
        and buffer.ndim >= 2
        and buffer.shape[-2:] == (positions, positions)
    )
