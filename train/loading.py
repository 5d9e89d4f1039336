"""The target and its tokenizer for commands: the tokenizer is loaded first."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from ..inference import SpeculativeLM, load_tokenizer
from .data.chat_template import check_tokenizer


def load_chat_tokenizer(target: str) -> PreTrainedTokenizerBase:
    """Load a target's tokenizer; a ValueError if it has no chat template."""
    tokenizer = load_tokenizer(target)
    check_tokenizer(tokenizer, target)
    return tokenizer


def load_speculative_lm(
    target: str, head: str | None, dtype: str, **options: Any
) -> tuple[SpeculativeLM, PreTrainedTokenizerBase]:
    """Load a tokenizer, a target, and a drafter for it."""
    tokenizer = load_chat_tokenizer(target)  # its errors come before a long download
    return SpeculativeLM.from_pretrained(target, head, dtype, **options), tokenizer
