"""Conversations of a run as tokens, split into those to train on and those that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ...inference.engines.target import Target
from ...inference.targets.loading import TargetFacts
from ...inference.text.chat_template import check_tokenizer
from ..config import TrainConfig
from .chat_template import NEEDS_NO_TEMPLATE, Example
from .conversations import Source
from .token_cache import Rendering, TokenCache, TokenizedSequences, first_format

T = TypeVar("T")


def rendering(
    config: TrainConfig, target: Target | TargetFacts, tokenizer: PreTrainedTokenizerBase
) -> Rendering:
    """Return how the config's conversations become tokens for this target, loaded or not."""
    eos = {token for token in (*target.end_tokens, tokenizer.eos_token_id) if token is not None}
    data = config.data
    longest = min(data.max_length, target.max_positions)
    vocab_size = target.vocab_size if isinstance(target, TargetFacts) else target.info.vocab_size
    return Rendering(
        tokenizer, frozenset(eos), longest, data.thinking, data.template_kwargs, vocab_size
    )


def check_renders(tokenizer: PreTrainedTokenizerBase, sources: Sequence[Source], name: str) -> None:
    """Refuse a tokenizer without a chat template, unless no source needs one."""
    if tokenizer.chat_template:
        return
    for source in sources:
        # Rows of tokens, and of a prompt with its completion, need no template.
        if first_format(source) in ("messages", "conversations"):
            check_tokenizer(tokenizer, name, NEEDS_NO_TEMPLATE)


def split_held_out(
    examples: Sequence[T], share: float, seed: int, most: int | None = None
) -> tuple[list[T], list[T]]:
    """Shuffle once and split off a held-out share of at most `most` items.

    Each side gets at least one item; fewer than two items raise a ValueError.
    """
    if len(examples) < 2:
        raise ValueError(
            f"{len(examples)} conversations with assistant turns; training needs at least 2"
        )
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    # At least 1, at most `most`, and at least one is left to train on.
    count = min(max(1, round(share * len(examples))), len(examples) - 1, most or len(examples))
    held_out = [examples[i] for i in order[:count]]
    training = [examples[i] for i in order[count:]]
    return training, held_out


def split_cache(cache: TokenCache, config: TrainConfig) -> tuple[TokenizedSequences, list[Example]]:
    """Split a cache into training and held-out sequences, without splitting a conversation."""
    # One group of sequences for each conversation. Conversations 0 0 1 2 2 differ at the borders
    # 2 and 3: the groups are [0 1] [2] [3 4].
    numbers_N = np.arange(len(cache.conversations_N))
    borders = np.flatnonzero(np.diff(cache.conversations_N)) + 1
    groups = np.split(numbers_N, borders) if len(numbers_N) else []
    parts = split_held_out(
        groups, config.data.held_out, config.loop.seed, config.data.held_out_limit
    )
    training, held_out = (TokenizedSequences(cache, np.concatenate(part)) for part in parts)
    return training, held_out[:]  # the slice reads the held-out sequences into memory
