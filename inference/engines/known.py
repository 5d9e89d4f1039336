"""Known decoders: models of Llama-like layers, which kernels of our own may run in place of transformers' code.

    x = embed(tokens)
    x = x + o_proj(attention(rotary(q, k), v))        of q_proj, k_proj, v_proj (input_layernorm(x))
    x = x + down_proj(silu(gate_proj(y)) * up_proj(y))        y = post_attention_layernorm(x)
    logits = lm_head(norm(x))

A model is recognised by its parts: RMSNorm, rotary embedding, gated MLP with SiLU; optionally biases, and norms of
queries and keys. Whoever runs it then tries it against the model, because the same parts may be put together in another
way (a scaled residual, a norm of 1 + weight).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

SILU = type(ACT2FN["silu"])
"""The activation that our kernels implement."""
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
ATTENTION_NORMS = {"q_norm", "k_norm"}
"""Norms of each head's queries and keys, which some families have."""
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(frozen=True)
class KnownDecoder:
    """The parts of a known decoder; its linear layers may be of any class, such as LoRA's."""

    embed: nn.Module
    rotary: nn.Module
    layers: Sequence[Any]
    norm: Any
    lm_head: nn.Module
    kinds: tuple[str, ...]
    """The kind of attention of each layer."""


def known_decoder(model: PreTrainedModel, kinds: Sequence[str]) -> KnownDecoder | None:
    """The parts of a model; None for one of another architecture. `kinds` are its layers' kinds of attention."""
    decoder = model.get_decoder()
    parts = ("embed_tokens", "rotary_emb", "layers", "norm")
    if not all(hasattr(decoder, part) for part in parts) or not _is_rms_norm(decoder.norm):
        return None
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if "mrope_section" in rope:  # positions in several dimensions
        return None
    lm_head = model.get_output_embeddings()
    if lm_head is None or len(kinds) != len(decoder.layers) or not all(map(_is_known_layer, decoder.layers)):
        return None
    return KnownDecoder(decoder.embed_tokens, decoder.rotary_emb, decoder.layers, decoder.norm, lm_head, tuple(kinds))


def has_attention_norms(layer: Any) -> bool:
    """Whether a layer normalises each head's queries and keys."""
    return hasattr(layer.self_attn, "q_norm")


def _is_known_layer(layer: nn.Module) -> bool:
    """Whether a decoder layer has the parts of Llama's, of the right shapes, and no others."""
    if not _consists_of(layer, LAYER_PARTS):
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    if not _consists_of(mlp, MLP_PARTS) or type(mlp.act_fn) is not SILU:
        return False
    if not _is_rms_norm(layer.input_layernorm) or not _is_rms_norm(layer.post_attention_layernorm):
        return False
    if _consists_of(attention, ATTENTION_PARTS):
        return True
    if not _consists_of(attention, ATTENTION_PARTS | ATTENTION_NORMS):
        return False
    norms = (attention.q_norm, attention.k_norm)
    return all(_is_rms_norm(norm) and norm.weight.shape == (attention.head_dim,) for norm in norms)


def _consists_of(module: nn.Module, parts: set[str]) -> bool:
    """Whether a module has these parts and nothing else, no weights of its own either."""
    names = {name for name, part in module.named_children() if part is not None}
    return names == parts and not any(True for _ in (*module.parameters(False), *module.buffers(False)))


def _is_rms_norm(module: Any) -> bool:
    """Whether a module looks like transformers' RMSNorm with a weight."""
    weights = [name for name, _ in module.named_parameters()]
    return weights == ["weight"] and hasattr(module, "variance_epsilon")
