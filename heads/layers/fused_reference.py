"""Three operations instead of thirty between the linear layers of a Llama-like block.

    normed, x = add_norm(x, out, weight)     x + out, and its RMSNorm
    query = rotary_store(...)                norms and rotary embedding of queries and keys;
                                             keys and values to a cache
    inner = silu_product(gate, up)           silu(gate) * up

and what follows a draft head's logits: `top_log_probs`.

Here they are written in torch, which says what the Triton kernels of fused_kernels.py compute. Both
round where transformers' modules round: a norm is computed in float32 and rounded before its weight
is applied, and each product of the rotary embedding, and silu(gate), before what follows.

Letters in tensor names: B batch, N tokens, D hidden size, H query heads, G heads of keys and
values, E head size, S slots, I inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .constants import counting


@dataclass(frozen=True)
class Norm:
    """An RMSNorm's weight and epsilon."""

    weight_D: Tensor
    epsilon: float


@dataclass(frozen=True)
class Projected:
    """Outputs of the linear layers of attention for N tokens."""

    query_BNX: Tensor
    """[B, N, H * E]"""
    key_BNX: Tensor
    """[B, N, G * E]"""
    value_BNX: Tensor


@dataclass(frozen=True)
class Place:
    """Where new keys and values go."""

    keys_BGSE: Tensor
    """The cache, which is written in place."""
    values_BGSE: Tensor
    slots_BN: Tensor
    finite: bool = False
    """Whether NaN and inf are stored as 0."""


def add_norm(x_BND: Tensor, out_BND: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + out, or of x alone, and that sum."""
    if out_BND is not None:
        x_BND = x_BND + out_BND
    return _normed(x_BND, norm), x_BND


def rotary_store(
    projected: Projected,
    rotary: tuple[Tensor, Tensor],
    place: Place,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Queries [B, H, N, E] after norm and rotary embedding; keys and values are stored.

    `rotary` holds cosines and sines [B, N, E], `norms` those of queries and keys.
    """
    # 1. Heads apart, normed where the model norms queries and keys.
    groups = place.keys_BGSE.shape[1]
    size = place.keys_BGSE.shape[3]
    query_BNHE = projected.query_BNX.unflatten(-1, (-1, size))
    key_BNGE = projected.key_BNX.unflatten(-1, (groups, size))
    value_BNGE = projected.value_BNX.unflatten(-1, (groups, size))
    if norms is not None:
        query_BNHE = _normed(query_BNHE, norms[0])
        key_BNGE = _normed(key_BNGE, norms[1])

    # 2. Rotary embedding, the same for all heads.
    cos_BN1E, sin_BN1E = (part[:, :, None] for part in rotary)
    query_BNHE = query_BNHE * cos_BN1E + _half_turned(query_BNHE) * sin_BN1E
    key_BNGE = key_BNGE * cos_BN1E + _half_turned(key_BNGE) * sin_BN1E

    # 3. Keys and values to their slots: [B, S, G, E] at [rows, slots] is [B, N, G, E].
    rows_B1 = counting(len(query_BNHE), query_BNHE.device, column=True)
    for states_BGSE, new_BNGE in ((place.keys_BGSE, key_BNGE), (place.values_BGSE, value_BNGE)):
        if place.finite:
            new_BNGE = new_BNGE.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        states_BGSE.transpose(1, 2)[rows_B1, place.slots_BN] = new_BNGE
    return query_BNHE.transpose(1, 2)


def silu_product(gate_BNI: Tensor, up_BNI: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate_BNI) * up_BNI


def top_log_probs(logits_BWV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return each node's `width` highest log-probabilities and their indices, [B, W, width].

    Log-probabilities are in float32, or in the dtype of the logits if it is wider. The values of a
    node are -inf where its logits hold NaN or inf. Which of equal ones come first is not said.
    """
    wide_BWV = logits_BWV.to(torch.promote_types(logits_BWV.dtype, torch.float32))
    best = wide_BWV.log_softmax(-1).topk(width, dim=-1)
    # One NaN or inf makes all log-probabilities of its node NaN.
    values = best.values.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    return values, best.indices


def _normed(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm over the last dimension, in float32 as transformers computes it."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon)
    return norm.weight_D * scaled.to(x.dtype)


def _half_turned(x: Tensor) -> Tensor:
    """The second half of each head negated, before its first half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
