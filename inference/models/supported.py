"""Which models can be asked for trees of tokens, and the reason where one cannot.

A tree needs attention alone, with a mask and positions that we give: every node then sees what it would see if its
path were the text.
"""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel


def attention_kinds(model: PreTrainedModel) -> tuple[str, ...]:
    """Which masks the model's layers need: full_attention, sliding_attention or both.

    Raises:
        ValueError: an architecture that cannot be asked for trees, with the reason.
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
    if getattr(config, "alibi", False):
        raise ValueError(
            f"{name} uses ALiBi, which counts places in the cache and not positions in the text, so a tree of tokens "
            "would not see what single tokens see"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{name} takes no position_ids, so it cannot be asked for a tree of tokens")
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
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    changing = [part["rope_type"] for part in by_layer if part.get("rope_type") in ("dynamic", "longrope")]
    if changing:
        raise ValueError(
            f"{name} uses {changing[0]!r} rotary embeddings, whose angles depend on the longest position of a "
            "forward, so a tree of tokens would not see what single tokens see"
        )
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        sliding = getattr(config, "sliding_window", None) is not None
        return ("sliding_attention",) if sliding else ("full_attention",)
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"{name} has layers of kind {unknown[0]!r}; a target's layers must be full_attention or sliding_attention"
        )
    return tuple(sorted(set(layer_types)))
