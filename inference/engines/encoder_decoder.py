"""Encoder-decoders (T5, BART): the encoder runs once per text, the decoder acts as the target.

They have no position ids: a token's position is its slot in the cache, and one relative bias serves
the whole batch. So drafts form a chain and one row is decoded at a time; trees and batches are
refused. The case in the paper on speculative decoding (arXiv:2211.17192, section 4.1) is a T5 with
a smaller T5 as its draft model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..cache.kv_cache import CacheInterface, TreeCache
from ..targets.interface import cache_interface
from ..targets.loading import config_of
from .counting import CountingEngine
from .model_engine import Masks
from .target import Target

FAMILIES = (
    "t5",
    "mt5",
    "umt5",
    "longt5",
    "bart",
    "mbart",
    "pegasus",
    "pegasus_x",
    "bigbird_pegasus",
    "led",
    "marian",
    "blenderbot",
    "blenderbot-small",
    "plbart",
    "mvp",
)
"""Model types whose decoder derives positions from the cache alone."""


def is_encoder_decoder(
    source: Any, revision: str | None = None, options: dict[str, Any] | None = None
) -> bool:
    """Whether a loaded model, a folder or a Hub id is an encoder-decoder.

    False for a source that cannot be read: loading it gives the reason.
    """
    if isinstance(source, PreTrainedModel):
        return bool(source.config.is_encoder_decoder)
    try:
        config = config_of(source, revision, options)
    except ValueError:
        return False
    return config is not None and bool(config.is_encoder_decoder)


class Seq2SeqEngine(CountingEngine):
    """Forwards of the decoder, which attends to the encoder's outputs as well."""

    target: Seq2SeqTarget

    def new_cache(self, batch_size: int, tokens: int = 0, rows: int = 0) -> TreeCache:
        cache = super().new_cache(batch_size, tokens, rows)
        cache.cross_attention = DynamicCache()  # filled by the first forward, then read
        return cache

    def _model_inputs(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        masks: Masks,
        cache: TreeCache,
        logits_to_keep: int | Tensor,
    ) -> dict[str, Any]:
        target = self.target
        # sync: positions are counted from here
        cache.follow(int(cache.slots_BN[0, 0]), tokens_BN.shape[1])
        return {
            "encoder_outputs": target.encoded,
            "attention_mask": target.encoded_mask,
            "decoder_input_ids": tokens_BN,
            target.cache_interface.name: EncoderDecoderCache(cache, cache.cross_attention),
        }


class Seq2SeqTarget(Target):
    """Frozen encoder-decoder target."""

    engine_kind = Seq2SeqEngine
    shares_prompts = False

    def __init__(
        self,
        model: PreTrainedModel,
        name: str = "",
        commit: str | None = None,
        hub: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, name, commit, hub)
        self.was_tried()  # no trial: only `FAMILIES` are accepted, which are known to work
        self.encoded: BaseModelOutput | None = None
        self.encoded_mask: Tensor | None = None

    @staticmethod
    def kinds(model: PreTrainedModel) -> tuple[str, ...]:
        if model.config.model_type not in FAMILIES:
            raise ValueError(
                f"{type(model).__name__} is an encoder-decoder of type {model.config.model_type!r};"
                " choose from " + ", ".join(FAMILIES)
            )
        return ("full_attention",)

    def encode(self, input_ids: Tensor, mask: Tensor | None) -> BaseModelOutput:
        """Run the encoder on one row, which the decoder attends to from then on."""
        input_ids = input_ids.to(self.device)
        mask = torch.ones_like(input_ids) if mask is None else mask.to(self.device)
        with torch.inference_mode():
            encoded = self.model.get_encoder()(input_ids, attention_mask=mask, return_dict=True)
        self.set_encoder_outputs(encoded, mask)
        return encoded

    def set_encoder_outputs(self, encoded: BaseModelOutput, mask: Tensor | None) -> None:
        """Set the encoder's outputs for one row, which the decoder attends to from then on."""
        states_BTD = encoded.last_hidden_state
        assert states_BTD is not None
        if len(states_BTD) > 1:
            raise ValueError(
                f"{self.name!r} decodes one row at a time, not {len(states_BTD)}: one relative bias"
                " serves a batch, so its rows would have to be equally long"
            )
        self.encoded = encoded
        self.encoded_mask = mask

    @contextmanager
    def encoder_outputs_kept(self) -> Iterator[None]:
        """Put back the present encoder's outputs after the block, which may set others."""
        encoded = self.encoded
        mask = self.encoded_mask
        try:
            yield
        finally:
            self.encoded = encoded
            self.encoded_mask = mask

    def check_encoder_outputs(self) -> None:
        """Refuse to draft before `set_encoder_outputs`."""
        if self.encoded is None:
            raise ValueError(
                f"{self.name!r} drafts for an encoder-decoder and was not given its input; call"
                " SpeculativeLM.generate, which passes it on"
            )

    def check_layers(self, layers: tuple[int, ...]) -> None:
        if layers:
            raise ValueError(
                f"{self.name!r} is an encoder-decoder, which has no draft heads; give a drafter"
            )

    @cached_property
    def cache_interface(self) -> CacheInterface:
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        # A forward needs a token for the encoder, and one for the decoder.
        return cache_interface(self.model, input_ids=token_11, decoder_input_ids=token_11)
