"""Attention of a few queries over a long cache, by a mask.

Letters in tensor names: B batch, N queries, X rows of a mask, H query heads, G heads of keys and
values, S slots, E head size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 256
"""Queries of a group that are packed side by side at most: their mask is repeated for every head of
the group."""


def masked_attention(
    query_BHNE: Tensor,
    key_BGSE: Tensor,
    value_BGSE: Tensor,
    mask_BXNS: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Grouped-query attention of few queries over a long cache, [B, H, N, E].

    The query heads of a group are packed side by side, so that its keys and values are read in
    place instead of being copied once a head. The mask is additive, or True where a query attends;
    one that already has a row for every head of a group and query, as packed, is used unchanged.
    `scale` defaults to 1 / sqrt(E).
    """
    heads = query_BHNE.shape[1] // key_BGSE.shape[1]  # of a group
    queries = query_BHNE.shape[2]

    # 1. Blocks of at most FEW packed queries, each with its mask repeated for the heads of a group.
    #    A mask that is packed already serves all queries in one block.
    blocks: Iterable[tuple[Tensor, Tensor]] = [(query_BHNE, mask_BXNS)]
    if mask_BXNS.shape[2] != heads * queries:
        size = max(1, FEW // heads)
        # The mask may have been repeated for groups of another size.
        masks = mask_BXNS[:, :, :queries].split(size, 2)
        masks = [
            mask.repeat(1, 1, heads, 1) if heads * mask.shape[2] <= FEW else mask for mask in masks
        ]
        blocks = zip(query_BHNE.split(size, 2), masks, strict=True)

    # 2. [B, H, N, E] to [B, G, heads * N, E] and back: one query head for each group.
    outputs = []
    for query, mask in blocks:
        packed = query.unflatten(1, (-1, heads)).flatten(2, 3)
        out = F.scaled_dot_product_attention(
            packed, key_BGSE, value_BGSE, attn_mask=mask, scale=scale
        )
        outputs.append(out.unflatten(2, (heads, -1)).flatten(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
