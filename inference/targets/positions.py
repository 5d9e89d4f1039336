"""Models whose token positions are indices in the cache: they decode in chains.

Such a model cannot be told that two nodes of a tree have the same position; see `engines.counting`.
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

    Return "" for a model that takes the positions of its tokens as an input.
    """
    config: Any = model.config.get_text_config()
    if model.config.is_encoder_decoder or keeps_states(model):
        return ""
    # ALiBi adds a bias to scores by the distance of two slots, whatever their positions.
    if getattr(config, "alibi", False):
        return "uses ALiBi, which counts places in the cache"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids"
    # A table of masks, such as GPT-Neo's, is cut by the number of cached tokens.
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
