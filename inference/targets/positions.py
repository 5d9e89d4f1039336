"""Models that take a token's index in the cache for its position: they decode in chains.

See `engines.counting`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .states import keeps_states


def counts_positions(model: PreTrainedModel) -> str:
    """Return a clause that says why a decoder-only model ties positions to its cache.

    Return "" for a model that takes the positions of its tokens.
    """
    config: Any = model.config.get_text_config()
    if model.config.is_encoder_decoder or keeps_states(model):
        return ""
    if getattr(config, "alibi", False):
        return "uses ALiBi, which counts places in the cache"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids"
    if any(_is_causal_mask(buffer, config) for buffer in _buffers(model)):
        return "cuts its masks out of a table by places in the cache"
    return ""


def _buffers(model: PreTrainedModel) -> list[torch.Tensor]:
    """The buffers of a model's blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [buffer for blocks in lists for buffer in blocks.buffers()]


def _is_causal_mask(buffer: torch.Tensor, config: Any) -> bool:
    """Whether a buffer is a mask [..., P, P] by positions, with or without a local window."""
    positions = getattr(config, "max_position_embeddings", None)
    return (
        buffer.dtype == torch.bool
        and buffer.ndim >= 2
        and buffer.shape[-2:] == (positions, positions)
    )
