"""Attention of few queries over a long cache, and of a passage over itself and all before it.

Most models share keys and values between the query heads of a group. Spread over all heads, they are copied once a
head; here a group's queries lie side by side instead, and the cache is read where it lies.

Letters in tensor names: B batch, H query heads, G groups of them, N queries, S slots of the cache, E head size.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 256
"""Queries that lie side by side at most: their mask is repeated for every head of the group."""
BLOCK = 256
"""Queries of a passage that share a view of the cache: the last of them sees this many slots more than the first."""


def repeated(mask_BXNS: Tensor, heads: int) -> Tensor:
    """A mask for the queries of a group of so many heads side by side, if they are few; once for all layers."""
    return mask_BXNS.repeat(1, 1, heads, 1) if heads * mask_BXNS.shape[2] <= FEW else mask_BXNS


def masked_attention(
    query_BHNE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, mask_BXNS: Tensor, scale: float | None = None
) -> Tensor:
    """What queries find where a mask lets them look, [B, H, N, E].

    The mask is additive, or True where they look; one that is `repeated` already is taken as it is.
    """
    heads, queries = query_BHNE.shape[1] // key_BGSE.shape[1], query_BHNE.shape[2]

    def side_by_side(query_BHCE: Tensor, mask_BXCS: Tensor) -> Tensor:
        packed = query_BHCE.unflatten(1, (-1, heads)).flatten(2, 3)
        found = F.scaled_dot_product_attention(packed, key_BGSE, value_BGSE, attn_mask=mask_BXCS, scale=scale)
        return found.unflatten(2, (heads, -1)).flatten(1, 2)

    if mask_BXNS.shape[2] == heads * queries:
        return side_by_side(query_BHNE, mask_BXNS)
    mask_BXNS = mask_BXNS[:, :, :queries]  # it may be repeated for groups of another size
    size = max(1, FEW // heads)
    blocks = zip(query_BHNE.split(size, 2), mask_BXNS.split(size, 2), strict=True)
    return torch.cat([side_by_side(query, repeated(mask, heads)) for query, mask in blocks], dim=2)


def causal_attention(query_BHNE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, scale: float | None = None) -> Tensor:
    """What the last N of S tokens find, each in itself and all before; a block of them reads no more than it needs."""
    queries, slots = query_BHNE.shape[2], key_BGSE.shape[2]
    shared = query_BHNE.shape[1] != key_BGSE.shape[1]
    if queries == slots:
        return F.scaled_dot_product_attention(
            query_BHNE, key_BGSE, value_BGSE, is_causal=True, scale=scale, enable_gqa=shared
        )
    mask = _lower_right(-(-(slots + BLOCK) // 1024) * 1024, query_BHNE.dtype, query_BHNE.device)
    found = []
    for first in range(0, queries, BLOCK):
        block = query_BHNE[:, :, first : first + BLOCK]
        rows, stop = block.shape[2], slots - queries + first + block.shape[2]
        # Row i of the mask sees its columns up to i + columns - BLOCK; here that must be i + stop - rows.
        left = mask.shape[1] - BLOCK - stop + rows
        seen = mask[:rows, left : left + stop]
        key, value = key_BGSE[:, :, :stop], value_BGSE[:, :, :stop]
        found.append(F.scaled_dot_product_attention(block, key, value, seen, scale=scale, enable_gqa=shared))
    return torch.cat(found, dim=2)


@lru_cache(maxsize=4)
def _lower_right(columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An additive mask [BLOCK, columns] under which row i sees columns up to i + columns - BLOCK."""
    hidden = torch.full((BLOCK, columns), float("-inf"), dtype=dtype, device=device)
    return hidden.triu_(columns - BLOCK + 1)
