"""The sdpa function of the target's layers: our attention over trees and prompt chunks.

It applies where the mask is ours.

Given a mask, transformers copies keys and values for every query head of their group, at every
layer of every round. Ours are not copied, and a prompt chunk is read causally without a mask in
memory. The function is registered once, under transformers' name "sdpa", and hands on every call
whose mask it did not mark: neither a model's config nor its modules change, and a forward of the
user's own, in another thread or from a hook, runs what it always ran.

Letters in tensor names: B batch, N queries, H query heads, G heads of keys and values, S slots, E
head size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...heads.layers.masked_attention import masked_attention
from ...heads.layers.tree_attention import attend_to_slots
from ...heads.layers.tree_slots import TreeSlots
from .base import Runner

BLOCK = 256
"""Queries of a prompt that share a mask."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention options of some layers: a bound on scores, a sink, a bias by distance."""
MARK = "headstart_mask"
"""Attribute of the masks that are ours; a model that makes another tensor of a mask loses it, and
gets plain sdpa."""
WITHOUT_PLANS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""All kernels but cuDNN's, which builds a plan of 20 to 80 ms for every new shape: shapes of
prompts keep changing."""


@dataclass
class Mark:
    """Says that a mask is ours, and how it is to be read."""

    slots: TreeSlots | None = None
    """What the mask stands for, if it has no values; None for a causal one."""
    groups: list[int] | None = None
    """The query heads for each head of keys, of each layer that asks for attention with the mask,
    are added here."""


def kernels_without_plans(device: torch.device) -> AbstractContextManager[Any]:
    """Attention in the block is computed by kernels that start at once for a new shape."""
    return sdpa_kernel([*WITHOUT_PLANS]) if device.type == "cuda" else nullcontext()


class PlanlessRunner(Runner):
    """Runs functions as they are, by kernels that take shapes that keep changing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, function: Callable[..., Any], fixed: tuple[Any, ...], *inputs: Any) -> Any:
        with kernels_without_plans(self.device):
            return function(*fixed, *inputs)

    def run_unrecorded(self, function: Callable[..., Any], *inputs: Any) -> Any:
        return self(function, (), *inputs)


def marked(mask: Tensor, mark: Mark | None = None) -> Tensor:
    """Return the same additive mask [B, 1, N, S], marked for our attention.

    Its rows may be repeated for every head of a group.
    """
    setattr(mask, MARK, mark or Mark())
    return mask


def causal_mask(tokens: int, slots: int) -> Tensor:
    """Return a stand-in for the causal mask of the last `tokens` of `slots`.

    It has no values that other code could use.
    """
    return marked(torch.empty(1, 1, tokens, slots, device="meta"))


def tree_mask(slots: TreeSlots) -> Tensor:
    """Stands for the mask of the nodes of a tree."""
    batch, nodes, uncommitted = slots.ancestors_BNM.shape
    return marked(torch.empty(batch, 1, nodes, uncommitted, device="meta"), Mark(slots))


def attention(
    module: torch.nn.Module,
    query_BHNE: Tensor,
    key_BGSE: Tensor,
    value_BGSE: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers' sdpa; with a mask of ours, our attention: returns [B, N, H, E], and no weights.

    Slots beyond the mask are not read.

    Raises:
        ValueError: with a mask of ours, a layer that needs an option that sdpa does not support
            either.
    """
    if not hasattr(attention_mask, MARK):
        return sdpa_attention_forward(
            module, query_BHNE, key_BGSE, value_BGSE, attention_mask, **options
        )
    assert attention_mask is not None
    mark: Mark = getattr(attention_mask, MARK)
    if mark.groups is not None:
        mark.groups.append(query_BHNE.shape[1] // key_BGSE.shape[1])
    unsupported = [name for name in UNSUPPORTED if options.get(name) is not None]
    if unsupported:
        raise ValueError(
            f"{type(module).__name__} asks for {unsupported[0]}: load it with"
            " attn_implementation='eager'"
        )
    scale = options.get("scaling")
    if mark.slots is not None:
        return attend_to_slots(query_BHNE, key_BGSE, value_BGSE, mark.slots, scale), None
    if attention_mask.is_meta:
        output_BHNE = causal_attention(query_BHNE, key_BGSE, value_BGSE, scale)
    else:
        slots = attention_mask.shape[-1]
        key_BGSE = key_BGSE[:, :, :slots]
        value_BGSE = value_BGSE[:, :, :slots]
        output_BHNE = masked_attention(query_BHNE, key_BGSE, value_BGSE, attention_mask, scale)
    return output_BHNE.transpose(1, 2).contiguous(), None


def causal_attention(
    query_BHNE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, scale: float | None = None
) -> Tensor:
    """Causal attention of the last N of S tokens, [B, H, N, E]."""
    queries, slots = query_BHNE.shape[2], key_BGSE.shape[2]
    grouped = query_BHNE.shape[1] != key_BGSE.shape[1]
    if queries == slots:
        return F.scaled_dot_product_attention(
            query_BHNE, key_BGSE, value_BGSE, is_causal=True, scale=scale, enable_gqa=grouped
        )
    # Flash attention needs no mask; on CUDA it takes 16-bit numbers only.
    if query_BHNE.is_cuda and query_BHNE.dtype in (torch.float16, torch.bfloat16):
        return F.scaled_dot_product_attention(
            query_BHNE,
            key_BGSE,
            value_BGSE,
            causal_lower_right(queries, slots),
            scale=scale,
            enable_gqa=grouped,
        )
    return _causal_in_blocks(query_BHNE, key_BGSE, value_BGSE, scale, grouped)


def _causal_in_blocks(
    query_BHNE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, scale: float | None, grouped: bool
) -> Tensor:
    """Block by block of queries, each of which reads only the keys that it needs.

    A block's mask begins at an address of its own: kernels on CUDA require a multiple of 16 bytes,
    and a slice of a larger mask begins anywhere.
    """
    queries, slots = query_BHNE.shape[2], key_BGSE.shape[2]
    outputs = []
    for first in range(0, queries, BLOCK):
        block = query_BHNE[:, :, first : first + BLOCK]
        rows = block.shape[2]
        stop = slots - queries + first + rows
        mask = torch.ones(rows, stop, dtype=torch.bool, device=block.device).tril_(stop - rows)
        outputs.append(
            F.scaled_dot_product_attention(
                block,
                key_BGSE[:, :, :stop],
                value_BGSE[:, :, :stop],
                mask,
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, dim=2)


AttentionInterface.register("sdpa", attention)
