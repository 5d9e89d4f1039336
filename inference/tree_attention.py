"""The attention function that the target's own layers call in place of transformers' sdpa.

Given a mask, transformers copies keys and values for every query head of their group, at every layer of every round.
This function does not copy, and reads a prompt chunk without a mask, causally.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..heads.layers.draft_cache import masked_attention

NAME = "headstart"
"""Name under which the function is registered."""
BLOCK = 256
"""Queries of a prompt that share a view of the cache."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention options of some layers: a bound on scores, a sink, a bias by distance."""


_here = threading.local()
"""`inside`: whether this thread is in one of our forwards."""
_forwards: Counter[int] = Counter()
"""Number of our running forwards, by the id of the model's config."""
_counting = threading.Lock()


@contextmanager
def attending(config: PreTrainedConfig) -> Iterator[None]:
    """In this thread the model of this config calls our function; in others it still runs sdpa."""
    with _counting:
        _forwards[id(config)] += 1
        config._attn_implementation = NAME
    before, _here.inside = getattr(_here, "inside", False), True
    try:
        yield
    finally:
        _here.inside = before
        with _counting:
            _forwards[id(config)] -= 1
            if not _forwards[id(config)]:
                del _forwards[id(config)]
                config._attn_implementation = "sdpa"  # as `Target` found it


def masks(*given: Any, **named: Any) -> Any:
    """Mask function for transformers: None in our forwards, which bring their own mask; else sdpa's."""
    return None if getattr(_here, "inside", False) else sdpa_mask(*given, **named)


def attention(
    module: torch.nn.Module,
    query_BHNE: Tensor,
    key_BGSE: Tensor,
    value_BGSE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: returns [B, N, H, E], and no weights.

    Without a mask, the queries are the last N of S tokens, with causal attention. Slots beyond the mask are not read.

    Raises:
        ValueError: the model needs an option that sdpa does not support either.
    """
    if not getattr(_here, "inside", False):  # the user's own forward, while one of ours runs in another thread
        return sdpa_attention_forward(
            module, query_BHNE, key_BGSE, value_BGSE, attention_mask, scaling=scaling, **options
        )
    unsupported = [name for name in UNSUPPORTED if options.get(name) is not None]
    if unsupported:
        raise ValueError(f"{type(module).__name__} asks for {unsupported[0]}: load it with attn_implementation='eager'")
    if attention_mask is None:
        output_BHNE = causal_attention(query_BHNE, key_BGSE, value_BGSE, scaling)
    else:
        slots = attention_mask.shape[-1]
        key_BGSE, value_BGSE = key_BGSE[:, :, :slots], value_BGSE[:, :, :slots]
        output_BHNE = masked_attention(query_BHNE, key_BGSE, value_BGSE, attention_mask, scaling)
    return output_BHNE.transpose(1, 2).contiguous(), None


def causal_attention(query_BHNE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of the last N of S tokens; each block of queries reads only the keys that it needs."""
    queries, slots = query_BHNE.shape[2], key_BGSE.shape[2]
    shared = query_BHNE.shape[1] != key_BGSE.shape[1]
    if queries == slots:
        return F.scaled_dot_product_attention(
            query_BHNE, key_BGSE, value_BGSE, is_causal=True, scale=scale, enable_gqa=shared
        )
    mask = _lower_right(-(-(slots + BLOCK) // 1024) * 1024, query_BHNE.dtype, query_BHNE.device)
    outputs = []
    for first in range(0, queries, BLOCK):
        block = query_BHNE[:, :, first : first + BLOCK]
        rows, stop = block.shape[2], slots - queries + first + block.shape[2]
        # Row i of the mask attends to columns up to i + columns - BLOCK; here that must be i + stop - rows.
        left = mask.shape[1] - BLOCK - stop + rows
        part = mask[:rows, left : left + stop]
        key, value = key_BGSE[:, :, :stop], value_BGSE[:, :, :stop]
        outputs.append(F.scaled_dot_product_attention(block, key, value, part, scale=scale, enable_gqa=shared))
    return torch.cat(outputs, dim=2)


@lru_cache(maxsize=4)
def _lower_right(columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An additive mask [BLOCK, columns]: row i attends to columns up to i + columns - BLOCK."""
    hidden = torch.full((BLOCK, columns), float("-inf"), dtype=dtype, device=device)
    return hidden.triu_(columns - BLOCK + 1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, masks)
