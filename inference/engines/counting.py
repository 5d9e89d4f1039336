"""Forwards of models that count positions by their cache: ALiBi, tables without `position_ids`.

Such a model cannot be told where the nodes of a tree lie. So a forward reads a chain of one row,
with the masks and positions that the model makes itself, as in `model.generate`.

Letters in tensor names: B batch (one row), N nodes.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..cache.kv_cache import TreeCache
from .model_engine import Masks, ModelEngine


class CountingEngine(ModelEngine):
    """Chains of one row, with the model's own masks and positions."""

    chains_only = True
    one_row = True
    own_attention = False
    recordable = False  # a recording would hold the position of its first token, which changes

    @cached_property
    def _slices_logits(self) -> bool:
        """Whether the model's forward can compute the logits of chosen tokens only."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def attention_masks(self, visible: dict[str, Tensor]) -> Masks:
        return next(iter(visible.values()))  # not used: the model makes its own

    def _model_inputs(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        masks: Masks,
        cache: TreeCache,
        logits_to_keep: int | Tensor,
    ) -> dict[str, Any]:
        """Arguments of a forward by which the model makes its own masks and positions."""
        assert len(tokens_BN) == 1
        start = int(cache.slots_BN[0, 0])  # sync: one row waits for its tokens anyway
        length = start + tokens_BN.shape[1]  # the mask covers the cached tokens, too
        cache.follow(start, tokens_BN.shape[1])
        inputs = {
            "input_ids": tokens_BN,
            "attention_mask": torch.ones(1, length, dtype=torch.int64, device=tokens_BN.device),
            self.target.cache_interface.name: cache,
        }
        if self._slices_logits:
            inputs["logits_to_keep"] = logits_to_keep
        return inputs
