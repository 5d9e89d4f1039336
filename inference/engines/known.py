"""Known decoders: Llama-like models, which our kernels may run in place of transformers' code.

    x = embed(tokens)
    x = x + o_proj(attention(rotary(q, k), v))        of q_proj, k_proj, v_proj (input_layernorm(x))
    x = x + down_proj(silu(gate_proj(y)) * up_proj(y))        y = post_attention_layernorm(x)
    logits = lm_head(norm(x))

A model is recognised by its parts: RMSNorm, rotary embedding, gated MLP with SiLU; optionally
biases, and norms of queries and keys. It is then tried against the model (`agrees`), because the
same parts may be put together in another way (a scaled residual, a norm of 1 + weight). The CPU
kernels and the fused decoder of a GPU run such models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ..cache.kv_cache import StateShape, TreeCache

SILU = type(ACT2FN["silu"])
"""The activation that our kernels implement."""
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
ATTENTION_NORMS = {"q_norm", "k_norm"}
"""Norms of each head's queries and keys, which some families have."""
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
TRIED_PARTS = (7, 5)
"""Tokens of the text that a decoder is tried on, read by two forwards: the second one finds tokens
in the cache."""


@dataclass(frozen=True)
class KnownDecoder:
    """The parts of a known decoder; its linear layers may be of any class, such as LoRA's."""

    embed: nn.Module
    rotary: nn.Module
    layers: Sequence[Any]
    norm: Any
    lm_head: Any
    kinds: tuple[str, ...]
    """The kind of attention of each layer."""


def known_decoder(model: PreTrainedModel, kinds: Sequence[str]) -> KnownDecoder | None:
    """Return the parts of a model; None for a model of another architecture.

    `kinds` are its layers' kinds of attention.
    """
    decoder = model.get_decoder()
    parts = ("embed_tokens", "rotary_emb", "layers", "norm")
    if not all(hasattr(decoder, part) for part in parts) or not _is_rms_norm(decoder.norm):
        return None
    lm_head = model.get_output_embeddings()
    if lm_head is None or len(kinds) != len(decoder.layers):
        return None
    if not all(map(_is_known_layer, decoder.layers)):
        return None
    return KnownDecoder(
        decoder.embed_tokens,
        decoder.rotary_emb,
        decoder.layers,
        decoder.norm,
        lm_head,
        tuple(kinds),
    )


@torch.inference_mode()
def agrees(
    model: PreTrainedModel,
    state_shapes: list[StateShape],
    forward: Callable[[Tensor, TreeCache], tuple[Tensor, Tensor]],
    tolerance: float,
    layers: tuple[int, ...] = (),
) -> bool:
    """Whether a text read in two parts yields the model's logits, and its states after `layers`.

    Args:
        model: the model, which reads the text at once.
        state_shapes: of the cache.
        forward: returns logits [1, N, V] and features [1, N, F] of tokens [1, N], which go to the
            cache's `slots_BN` and attend to themselves and all before them.
        tolerance: relative to the largest of the model's numbers: sums are taken in another order.
        layers: whose features are compared.
    """
    # 1. The model reads the whole text.
    device = model.device
    vocab_size = model.config.get_text_config().vocab_size
    tokens_1T = (torch.arange(1, sum(TRIED_PARTS) + 1, device=device) * 37 % vocab_size)[None]
    expected: Any = model(tokens_1T, use_cache=False, output_hidden_states=bool(layers))

    # 2. `forward` reads it in two parts, with our cache.
    cache = TreeCache(state_shapes, 1, device)
    logits: list[Tensor] = []
    features: list[Tensor] = []
    for part_1N in tokens_1T.split(TRIED_PARTS, dim=1):
        size = part_1N.shape[1]
        cache.reserve(size, cache.prefilled)
        logits_1NV, features_1NF = forward(part_1N, cache)
        logits.append(logits_1NV)
        features.append(features_1NF)
        cache.advance_prompt(size)

    # 3. Compare. hidden_states[0] is the embedding, so [1:] has the state after block i at i, and
    # that after the final norm at -1.
    pairs = [(torch.cat(logits, dim=1), expected.logits)]
    if layers:
        states = [expected.hidden_states[1:][layer] for layer in layers]
        pairs.append((torch.cat(features, dim=1), torch.cat(states, dim=-1)))
    return not any(differs(computed, wanted, tolerance) for computed, wanted in pairs)


def differs(computed: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Whether numbers differ by more than the tolerance, relative to the largest wanted one."""
    difference = (computed.double() - wanted.double()).abs().max()
    # Written so that NaN differs.
    return not difference <= tolerance * wanted.double().abs().max()


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
    """Whether a module has exactly these parts, dropout aside, and no direct weights or buffers."""
    names = {name for name, part in module.named_children() if not isinstance(part, nn.Dropout)}
    return names == parts and not any(
        True for _ in (*module.parameters(False), *module.buffers(False))
    )


def _is_rms_norm(module: Any) -> bool:
    """Whether a module looks like transformers' RMSNorm with a weight."""
    weights = [name for name, _ in module.named_parameters()]
    return weights == ["weight"] and hasattr(module, "variance_epsilon")
