"""What the commands that decode load: the target and its tokenizer, and what drafts for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..inference import SpeculativeLM, Target, load_tokenizer
from .console import log
from .data.chat_template import check_tokenizer


@dataclass(frozen=True)
class Shared:
    """A target and its tokenizer for several commands in one process: loaded once, when first asked for."""

    name: str
    dtype: str

    @cached_property
    def target(self) -> Target:
        """See `Target.from_pretrained`."""
        self.tokenizer  # noqa: B018  # its mistakes are told first
        log.info(f"loading {self.name}")
        return Target.from_pretrained(self.name, self.dtype)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See `load_tokenizer`."""
        tokenizer = load_tokenizer(self.name)
        check_tokenizer(tokenizer, self.name)
        return tokenizer


def load(
    target: str, head: str | None, dtype: str, shared: Shared | None = None, **options: Any
) -> tuple[SpeculativeLM, PreTrainedTokenizerBase]:
    """Load the tokenizer, whose mistakes are told first, the target, if they are not loaded yet, and what drafts.

    Raises:
        ValueError: a target, head or option of `SpeculativeLM.from_pretrained` that cannot be used.
    """
    if shared is not None:
        return SpeculativeLM.from_pretrained(shared.target, head, **options), shared.tokenizer
    tokenizer = load_tokenizer(target)
    check_tokenizer(tokenizer, target)
    return SpeculativeLM.from_pretrained(target, head, dtype, **options), tokenizer
