"""A target's model and all that is known of it: its parts, its dimensions, and its interface.

The interface is what the model's forward takes and returns. Engines run a model by these facts.

Letters in tensor names: B batch, T time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from ..cache.kv_cache import CacheInterface, Pool
from .as_loaded import as_loaded
from .info import (
    attention_kinds,
    before_lm_head,
    counts_positions,
    target_info,
    target_modules,
)
from .interface import cache_interface, first_block_index, fitting_logits
from .loading import end_tokens_of
from .segments import segments_of, tokens_read_at_border
from .states import keeps_states, stateful_interface


class TargetModel:
    """A loaded causal LM."""

    kinds = staticmethod(attention_kinds)
    """Kinds of attention masks that the model's layers need."""

    def __init__(self, model: PreTrainedModel, name: str = "") -> None:
        """Read off a model, which was loaded by `name`, what engines need to know.

        Raises:
            ValueError: an architecture that cannot run draft trees, with the reason.
        """
        # A function, so that `hold_weakly` can exchange it for a weak reference.
        self._model: Callable[[], Any] = lambda: model
        self.name = name or str(model.config._name_or_path or type(model).__name__)
        self.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.read_off(model)

    def read_off(self, model: PreTrainedModel) -> None:
        """Read off the model what engines need to know: at first, and after it has changed.

        Raises:
            ValueError: an architecture that cannot run draft trees, with the reason.
        """
        for name in ("cache_interface", "computes_logits", "first_block_index", "_read_at_border"):
            vars(self).pop(name, None)  # cached properties, found anew when asked
        self.config = model.config.get_text_config()
        self.max_positions: int = getattr(self.config, "max_position_embeddings", None) or 2**31 - 1
        self.attention_kinds = self.kinds(model)
        self.stateful = stateful_interface(model) if keeps_states(model) else None
        """What the model keeps besides keys and values; None where all layers are attention."""
        self.counted = "" if self.stateful else counts_positions(model)
        """Why the model's tokens must lie where its cache ends, as a clause; "" if it takes their
        positions as an input."""
        self.segments = segments_of(self.config)
        """Segments of positions that a forward must not cross; None where it may lie anywhere."""
        if self.segments is not None and self.stateful is not None:
            raise ValueError(
                f"{type(model).__name__} has layers that keep a state, and changes its computation"
                " at a position (longrope, or scaled queries); a target can have one of the two"
            )
        self.pool = Pool()
        """KV cache blocks of finished generations."""
        self.modules = target_modules(model)
        self.before_lm_head = before_lm_head(model)
        """Layers between the final norm and the LM head's matrix, whose output is then the feature
        of layer -1."""
        # Some configs count two layers, with a KV cache each, in every block.
        blocks = len(self.modules.blocks) or self.config.num_hidden_layers
        self.info = target_info(
            self.config, self.name, self.modules.lm_head.weight.shape[0], blocks
        )

    @property
    def model(self) -> Any:  # `generate` is mixed into its class, which no annotation says
        """The model."""
        return self._model()

    @model.setter
    def model(self, model: PreTrainedModel) -> None:
        self._model = lambda: model

    def hold_weakly(self) -> None:
        """Stop keeping the model alive: it is freed when its owner drops it.

        The caller must drop the target by then.
        """
        self._model = weakref.ref(self.model)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of attention of each layer, where all layers are attention."""
        return tuple(
            getattr(self.config, "layer_types", None) or self.attention_kinds * self.info.num_layers
        )

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens at which the model's generation config ends a text."""
        return end_tokens_of(self.model.generation_config)

    def check_layers(self, layers: tuple[int, ...]) -> None:
        """Refuse feature layers that the model does not have.

        Raises:
            ValueError: naming the layer and the valid range.
        """
        # The last block's state is only known after the final norm: that is layer -1.
        last = self.info.num_layers - 2
        for layer in layers:
            if not -1 <= layer <= last:
                raise ValueError(
                    f"feature layer {layer} is out of range for {self.name!r} with"
                    f" {self.info.num_layers} blocks; choose from 0 to {last} for a block's output,"
                    " or -1 for the state after the final norm"
                )

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Return the bytes of a KV cache for `rows` × `tokens`, with the rows' states if any.

        States count twice: the snapshots, and a forward's copies. A cache is allocated for more
        tokens than it holds: see `Engine.cache_slots`.
        """
        if self.stateful is not None:
            shapes = self.stateful.cache.state_shapes
            token_bytes = sum(shape.heads * shape.size * shape.dtype.itemsize for shape in shapes)
            return rows * (tokens * token_bytes + 2 * self.stateful.row_bytes())
        info = self.info
        return (
            2  # keys and values
            * self.dtype.itemsize
            * info.num_layers
            * rows
            * tokens
            * info.num_key_value_heads
            * info.head_dim
        )

    @cached_property
    def _read_at_border(self) -> int | None:
        """Result of `tokens_read_at_border`.

        Also None if no forward depends on the last position.
        """
        if self.segments is None or not self.segments.by_last:
            return None
        return tokens_read_at_border(self.model, self.cache_interface.name, self.segments.first)

    @property
    def rereads_at_border(self) -> bool:
        """Whether `model.generate` rereads the whole text where it crosses a segment border.

        Phi-3 does, so that all tokens get the second frequencies of its longrope embedding.
        """
        return self._read_at_border is not None

    def check_border(self, lengths: list[int], new_tokens: int) -> None:
        """Refuse texts of which `model.generate` would forget all but one token.

        `lengths` are those of their prompts.

        Raises:
            ValueError: Phi-3 before transformers 5.20 drops its cache at the border, and reads the
                newest token alone.
        """
        if self._read_at_border != 1 or self.segments is None:
            return
        border = self.segments.first
        # The last new token is returned and never read, hence the - 1.
        crossing = [length for length in lengths if length <= border < length + new_tokens - 1]
        if crossing:
            raise ValueError(
                f"{self.name!r} forgets its text after {border} tokens: {type(self.model).__name__}"
                f" of transformers {transformers_version} drops its cache there and reads the"
                f" newest token alone; with a prompt of {crossing[0]} tokens choose at most"
                f" {border + 1 - crossing[0]} new ones, not {new_tokens}, or update transformers to"
                " 5.20 or later"
            )

    @cached_property
    def cache_interface(self) -> CacheInterface:
        """How the model takes and returns its KV cache, found by a forward over one token."""
        if self.stateful is not None:
            return self.stateful.cache
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return cache_interface(self.model, input_ids=token_11)

    @cached_property
    def computes_logits(self) -> bool:
        """Whether `modules`, tried on two tokens, map features of layer -1 to the model's logits.

        Their scale and cap are those of the model from then on, whatever its config suggests.
        """
        vocab_size = self.info.vocab_size
        # Not 0, which is often padding: its embedding is 0, and so are its logits, whatever the
        # scale.
        tokens_12 = torch.tensor([[vocab_size // 2, vocab_size // 3]], device=self.device)
        with as_loaded(self.model):
            fitting = fitting_logits(self.model, self.modules, self.before_lm_head, tokens_12)
        if fitting is not None:
            self.modules = fitting
        return fitting is not None

    def check_features(self) -> None:
        """Refuse a model whose features a head cannot learn from.

        Raises:
            ValueError: its logits are not made by its LM head alone, or it does not return its
                blocks' states.
        """
        self.check_states_returned()
        if not self.computes_logits:
            raise ValueError(
                f"{type(self.model).__name__} ({self.name!r}) makes its logits by more than its LM"
                " head's matrix and the scale and soft cap of its config, so a head would learn"
                " from logits that are not the model's; train for a target of another family, or"
                " decode this one with a drafter without a head"
            )

    def check_states_returned(self) -> None:
        """Refuse a model whose forward does not return its blocks' states, by a ValueError."""
        self.first_block_index  # noqa: B018 - found now

    def last_features(self, states: Tensor) -> Tensor:
        """Return the features [..., D] of layer -1, from which the LM head's matrix makes logits.

        They are the final norm's output, `states`; in models with `before_lm_head` these layers are
        applied to it.
        """
        features: Tensor = states if self.before_lm_head is None else self.before_lm_head(states)
        return features

    @cached_property
    def first_block_index(self) -> int:
        """The index of the state after block 0 in `output_hidden_states`.

        It is found by forwards over one token.
        """
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return first_block_index(self.model, self.info.num_layers, input_ids=token_11)

    def hidden_state_indices(self, layers: tuple[int, ...]) -> list[int]:
        """The model's indices of these feature layers, for `output_hidden_states`."""
        # With 4 blocks and first_block_index 1: layers (0, 2, -1) are entries [1, 3, 4].
        return [self.first_block_index + layer % self.info.num_layers for layer in layers]
