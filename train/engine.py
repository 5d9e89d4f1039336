"""What the commands that decode load: the engine of their options, and the tokenizer that it was trained with."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from ..inference import SpeculativeLM, load_tokenizer
from .commands import BenchConfig, GenerateConfig
from .config import dtype_of
from .data import check_tokenizer, warn_of_other_data


def load_engine(config: BenchConfig | GenerateConfig) -> tuple[SpeculativeLM, PreTrainedTokenizerBase]:
    """Load the tokenizer, whose mistakes are told first, then target and what drafts for it.

    Raises:
        ValueError: a target, head, drafter, tree or verifier that cannot be used.
    """
    tokenizer = load_tokenizer(config.target)
    check_tokenizer(tokenizer, config.target)
    lm = SpeculativeLM.from_pretrained(
        config.target,
        config.head,
        dtype_of(config.dtype),
        config.tree,
        config.verifier,
        lossy=config.lossy,
        compile=config.compile,
        drafter=config.drafter,
        fallback=config.fallback,
    )
    warn_of_other_data(lm.origin, tokenizer, config.thinking)
    return lm, tokenizer
