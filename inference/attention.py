"""Attention over a preallocated cache, called by the target's own layers in place of transformers' sdpa function.

Most models share keys and values between the query heads of a group. transformers copies them once a head, at every
layer of every round; here a group's queries lie side by side instead, and the cache is read where it lies. A passage
of a prompt comes without a mask: each of its tokens sees all before it, so later tokens are skipped and not masked.

Letters in tensor names: B batch, H query heads, G groups of them, N queries, S slots of the cache, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "headstart"
"""What the function is registered as."""
FEW = 256
"""Queries of a group that are laid side by side at most: their mask is repeated for every head of the group."""
BLOCK = 256
"""Queries of a passage that share a view of the cache: the last of them sees this many slots more than the first."""


def usable(model: PreTrainedModel) -> bool:
    """Whether the model's layers would call our function: they ask transformers' table, and run sdpa now."""
    return model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation()


@contextmanager
def attending(config: PreTrainedConfig) -> Iterator[None]:
    """The model of this config calls our function; what it called before is put back."""
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def attention(
    module: torch.nn.Module,
    query_BHNE: Tensor,
    key_BGSE: Tensor,
    value_BGSE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers expects of an attention function: [B, N, H, E], and no weights.

    Without a mask the queries are the last N of S tokens, each seeing itself and all before.
    """
    batch, heads, queries, _ = query_BHNE.shape
    repeat = heads // key_BGSE.shape[1]
    if attention_mask is None:
        found = _causal(query_BHNE, key_BGSE, value_BGSE, scaling)
    elif queries * repeat <= FEW:
        packed = query_BHNE.reshape(batch, heads // repeat, repeat * queries, -1)
        mask = attention_mask.repeat(1, 1, repeat, 1)
        found = F.scaled_dot_product_attention(packed, key_BGSE, value_BGSE, attn_mask=mask, scale=scaling)
        found = found.reshape(batch, heads, queries, -1)
    else:
        return sdpa_attention_forward(
            module, query_BHNE, key_BGSE, value_BGSE, attention_mask, scaling=scaling, **options
        )
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)


def _causal(query_BHNE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, scale: float | None) -> Tensor:
    """Block by block of queries, with no more slots than the block's last query sees."""
    queries, slots = query_BHNE.shape[2], key_BGSE.shape[2]
    shared = {"scale": scale, "enable_gqa": query_BHNE.shape[1] != key_BGSE.shape[1]}
    if queries == slots:
        return F.scaled_dot_product_attention(query_BHNE, key_BGSE, value_BGSE, is_causal=True, **shared)
    mask = _lower_right(-(-(slots + BLOCK) // 1024) * 1024, query_BHNE.dtype, query_BHNE.device)
    found = []
    for first in range(0, queries, BLOCK):
        block = query_BHNE[:, :, first : first + BLOCK]
        rows, stop = block.shape[2], slots - queries + first + block.shape[2]
        # Row i of the mask sees its columns up to i + columns - BLOCK; here that must be i + stop - rows.
        left = mask.shape[1] - BLOCK - stop + rows
        seen = mask[:rows, left : left + stop]
        found.append(
            F.scaled_dot_product_attention(block, key_BGSE[:, :, :stop], value_BGSE[:, :, :stop], seen, **shared)
        )
    return torch.cat(found, dim=2)


@lru_cache(maxsize=4)
def _lower_right(columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An additive mask [BLOCK, columns] under which row i sees columns up to i + columns - BLOCK."""
    hidden = torch.full((BLOCK, columns), float("-inf"), dtype=dtype, device=device)
    return hidden.triu_(columns - BLOCK + 1)
