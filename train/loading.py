"""The target and its tokenizer for commands: loaded once in a process, the tokenizer first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..console import log
from ..inference import SpeculativeLM, Target, load_tokenizer
from ..inference.chat_template import check_tokenizer


@dataclass(frozen=True)
class SharedTarget:
    """A target and its tokenizer for several pieces of work in one process, loaded once, at their first use."""

    name: str
    dtype: str

    @cached_property
    def target(self) -> Target:
        """The model in inference mode."""
        self.tokenizer  # noqa: B018  # its errors come before a long download
        log.info(f"loading {self.name}")
        return Target.from_pretrained(self.name, self.dtype)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, checked to have a chat template."""
        tokenizer = load_tokenizer(self.name)
        check_tokenizer(tokenizer, self.name)
        return tokenizer


def load_speculative_lm(
    target: str, head: str | None, dtype: str, shared: SharedTarget | None = None, **options: Any
) -> tuple[SpeculativeLM, PreTrainedTokenizerBase]:
    """Load a tokenizer and a target, unless they are shared, and a drafter for it."""
    tokenizer = (shared or SharedTarget(target, dtype)).tokenizer  # first: its errors come before a long download
    if shared is not None:
        return SpeculativeLM.from_pretrained(shared.target, head, **options), tokenizer
    return SpeculativeLM.from_pretrained(target, head, dtype, **options), tokenizer
