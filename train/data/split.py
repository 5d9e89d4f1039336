"""Conversations of a run as tokens, split into those to train on and those that are held out."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...inference import Target
from ..config import TrainConfig
from .chat_template import Example, encode
from .token_cache import Rendering, TokenCache, TokenizedSequences, split_held_out


def rendering(config: TrainConfig, target: Target, tokenizer: PreTrainedTokenizerBase) -> Rendering:
    """Return how the config's conversations become tokens for this target."""
    eos = {token for token in (*target.end_tokens, tokenizer.eos_token_id) if token is not None}
    return Rendering(tokenizer, frozenset(eos), min(config.data.max_length, target.max_positions), config.data.thinking)


def split_cache(cache: TokenCache, config: TrainConfig) -> tuple[TokenizedSequences, list[Example]]:
    """Split sequences into those to train on and those that are held out, whole conversations on either side."""
    data = config.data
    groups = cache.conversation_groups()
    parts = split_held_out(groups, data.held_out, config.loop.seed, data.held_out_limit)
    training, held_out = (TokenizedSequences(cache, np.concatenate(part)) for part in parts)
    return training, held_out[:]


def split_examples(
    conversations: list[dict[str, Any]],
    config: TrainConfig,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[Example], list[Example]]:
    """Tokenize and split conversations that are in memory, without a cache."""
    how = rendering(config, target, tokenizer)
    encoded = []
    for number, row in enumerate(conversations):
        try:
            examples = encode(row, how.tokenizer, how.eos, how.max_length, how.thinking)
            encoded.append([dataclasses.replace(example, conversation=number) for example in examples])
        except ValueError as error:
            raise ValueError(f"conversation {number}: {error}") from error
    training, held_out = split_held_out(
        [examples for examples in encoded if examples],
        config.data.held_out,
        config.loop.seed,
        config.data.held_out_limit,
    )
    return list(itertools.chain.from_iterable(training)), list(itertools.chain.from_iterable(held_out))
