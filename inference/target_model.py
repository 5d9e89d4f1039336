"""The model of a target, and all that is known of it: parts, dimensions, what its forward takes and returns.

Engines run a model by what stands here.

Letters in tensor names: B batch, T time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from .kv_cache import Pool, StateShape, TreeCache
from .models.info import attention_kinds, target_info, target_modules
from .models.interface import CacheInterface, cache_interface, first_block_index
from .models.loading import end_tokens_of
from .models.positions import counts_positions
from .models.segments import segments_of


class TargetModel:
    """A loaded causal LM."""

    kinds = staticmethod(attention_kinds)
    """Kinds of attention masks that the model's layers need."""

    def __init__(self, model: PreTrainedModel, name: str = "") -> None:
        """Look at a model, which was loaded by `name`.

        Raises:
            ValueError: an architecture that cannot run draft trees, with the reason.
        """
        self._model: Callable[[], Any] = lambda: model
        self.config = model.config.get_text_config()
        self.name = name or str(model.config._name_or_path or type(model).__name__)
        self.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.max_positions: int = getattr(self.config, "max_position_embeddings", 2**31 - 1)
        self.attention_kinds = self.kinds(model)
        self.counted = counts_positions(model)
        """Why the model's tokens lie where its cache ends, and nowhere else; "" if it takes their positions."""
        self.segments = segments_of(self.config)
        """Positions between which a forward must lie; None where it may lie anywhere."""
        self.pool = Pool()
        """KV cache blocks of finished generations."""
        self.modules = target_modules(model)
        self.info = target_info(self.config, self.name, self.modules.lm_head.weight.shape[0])

    @property
    def model(self) -> Any:  # `generate` is mixed into its class, which no annotation says
        """The model."""
        return self._model()

    @model.setter
    def model(self, model: PreTrainedModel) -> None:
        self._model = lambda: model

    def hold_weakly(self) -> None:
        """Keep the model alive no longer: its owner frees it, and whoever calls this frees the target then."""
        self._model = weakref.ref(self.model)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens at which the model's generation config ends a text."""
        return end_tokens_of(self.model.generation_config)

    def check_layers(self, layers: tuple[int, ...]) -> None:
        """Refuse feature layers that the model does not have.

        Raises:
            ValueError: naming the layer and the valid range.
        """
        last = self.info.num_layers - 2
        for layer in layers:
            if not -1 <= layer <= last:
                raise ValueError(
                    f"feature layer {layer} is out of range for {self.name!r} with {self.info.num_layers} blocks; "
                    f"choose from 0 to {last} for a block's output, or -1 for the state after the final norm"
                )

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of KV cache for `rows` × `tokens`."""
        info, size = self.info, torch.finfo(self.dtype).bits // 8
        return 2 * size * info.num_layers * rows * tokens * info.num_key_value_heads * info.head_dim

    @cached_property
    def rereads_at_border(self) -> bool:
        """Whether `model.generate` reads the whole text again when it crosses the border of two segments.

        Phi-3 does, and so gives all tokens the second frequencies of its longrope embedding: tried on a cache that is
        as long as the first segment.
        """
        if self.segments is None or not self.segments.by_last:
            return False
        border = self.segments.first
        cache = TreeCache([StateShape(1, 1, self.dtype, self.device)] * 2, 1, self.device)
        cache.start = border
        text_1T = torch.zeros(1, border + 1, dtype=torch.int64, device=self.device)
        prepared = self.model.prepare_inputs_for_generation(
            text_1T,
            next_sequence_length=1,
            past_key_values=cache,
            attention_mask=torch.ones_like(text_1T),
            use_cache=True,
        )
        return prepared.get("past_key_values") is None

    @cached_property
    def cache_interface(self) -> CacheInterface:
        """How the model takes and returns its KV cache, found by a forward over one token."""
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return cache_interface(self.model, input_ids=token_11)

    @cached_property
    def first_block_index(self) -> int:
        """The index of the state after block 0 in `output_hidden_states`, found by forwards over one token."""
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return first_block_index(self.model, self.info.num_layers, input_ids=token_11)

    def hidden_state_indices(self, layers: tuple[int, ...]) -> list[int]:
        """The model's indices of these feature layers, for `output_hidden_states`."""
        return [self.first_block_index + layer % self.info.num_layers for layer in layers]
