"""A target with its tokenizer and what drafts for it, as commands need them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from .engines.encoder_decoder import is_encoder_decoder
from .speculative_lm import SpeculativeLM
from .targets.loading import load_tokenizer
from .text.chat_template import load_chat_tokenizer


def load_speculative_lm(
    target: str, head: str | None, dtype: str, **options: Any
) -> tuple[SpeculativeLM, PreTrainedTokenizerBase]:
    """Load a tokenizer, then a target and a drafter for it.

    The tokenizer must have a chat template, unless the target is an encoder-decoder. The arguments
    are those of `SpeculativeLM.from_pretrained`.
    """
    # The tokenizer first, so that its errors do not wait for the target's weights.
    if is_encoder_decoder(target):
        tokenizer = load_tokenizer(target)
    else:
        tokenizer = load_chat_tokenizer(target)
    return SpeculativeLM.from_pretrained(target, head, dtype, **options), tokenizer
