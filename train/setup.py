"""What a config names, loaded and checked before any long work: the target, the head, the sequences to train on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ..heads import DraftHead, build_head
from ..heads.by_name import head_config
from ..heads.checkpoints.save_load import copy_weights
from ..inference import Target, load_tokenizer
from .config import TrainConfig
from .data.chat_template import Example, check_tokenizer, data_origin, encode
from .data.conversations import open_sources
from .data.token_cache import (
    Rendering,
    TokenCache,
    TokenizedSequences,
    cached_sequences,
    count_answer_tokens,
    split_held_out,
)
from .engine import Shared
from .evaluate import eval_prompts
from .features.placement import load_target
from .run_folder import earlier_options


@dataclass(frozen=True)
class Setup:
    """All that training needs besides an engine."""

    target: Target
    head: DraftHead
    provenance: dict[str, Any]
    """What the head will remember of target and tokenizer."""
    training: Sequence[Example]
    """Read from the cache when they are asked for."""
    held_out: list[Example]
    sources: list[int]
    """For each sequence to train on, which of the sources it is from."""
    coverage: float
    """The share of the answers' tokens that are in the draft vocabulary."""


def set_up(config: TrainConfig, accelerator: Accelerator, shared: Shared | None = None) -> Setup:
    """Load, what `shared` does not have, and check.

    Raises:
        ValueError: anything wrong with the options or the data.
    """
    kind, options = head_options(config)
    head_config(kind, options)  # a mistake in the options or the data is told before a model is loaded
    sources = open_sources(config.data.sources, config.data.max_conversations)
    target = shared.target if shared else load_target(config, accelerator)
    head = build_head(kind, options, target.info)
    head.recompute = config.loop.recompute
    target.check_layers(head.feature_layers)
    tokenizer = shared.tokenizer if shared else load_tokenizer(config.target, config.target_revision)
    check_tokenizer(tokenizer, config.target)
    provenance = {**target.provenance, **data_origin(tokenizer, config.data.thinking)}
    cache = cached_sequences(sources, rendering(config, target, tokenizer), config.data.cache, config.data.num_proc)
    training, held_out = split_cache(cache, config)
    eval_prompts(target, held_out, config.eval)  # told now and not at the first evaluation, if there are none
    counts_V = count_answer_tokens(training, target.info.vocab_size)
    if config.init_from is None:
        head.initialize(target.modules, counts_V)
    else:
        warm_start(head, config.init_from, provenance)
    covered = counts_V[head.target_tokens(torch.arange(head.draft_vocab_size))].sum() / counts_V.sum()
    own = cache.sources_of(training.conversations)
    return Setup(target, head, provenance, training, held_out, own, float(covered))


def head_options(config: TrainConfig) -> tuple[str, dict[str, Any]]:
    """The head's word and its own options."""
    return config.head["type"], {name: value for name, value in config.head.items() if name != "type"}


def rendering(config: TrainConfig, target: Target, tokenizer: PreTrainedTokenizerBase) -> Rendering:
    """How the config's conversations become tokens for this target."""
    eos = {token for token in (*target.end_tokens, tokenizer.eos_token_id) if token is not None}
    return Rendering(tokenizer, frozenset(eos), min(config.data.max_length, target.max_positions), config.data.thinking)


def split_cache(cache: TokenCache, config: TrainConfig) -> tuple[TokenizedSequences, list[Example]]:
    """TokenizedSequences to train on, and those that are held out, all of a conversation on the same side.

    Raises:
        ValueError: fewer than two conversations.
    """
    data = config.data
    groups = cache.conversation_groups()
    parts = split_held_out(groups, data.held_out, config.loop.seed, data.held_out_limit)
    training, held_out = (TokenizedSequences(cache, np.concatenate(part)) for part in parts)
    return training, held_out[:]


def split_as_begun(config: TrainConfig) -> TrainConfig:
    """The config of a run that goes on: one that began before there was a limit has none."""
    before = earlier_options(Path(config.output))
    if not before or "data.held_out_limit" in before:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, held_out_limit=None))


def split_examples(
    conversations: list[dict[str, Any]],
    config: TrainConfig,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[Example], list[Example]]:
    """As `set_up`, of conversations in memory, and without a cache.

    Raises:
        ValueError: data that cannot be used; named.
    """
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


def warm_start(head: DraftHead, source: str, provenance: dict[str, Any]) -> None:
    """Take the weights and the draft vocabulary of another head.

    Raises:
        ValueError: it does not fit, or its vocabulary belongs to another tokenizer.
    """
    metadata = copy_weights(head, source)
    trained = metadata.provenance.get("tokenizer")
    if trained not in (None, provenance["tokenizer"]):
        raise ValueError(
            f"init_from {source!r} was trained with tokenizer {trained}, not {provenance['tokenizer']}: its draft "
            "vocabulary means other tokens; choose a head of the same tokenizer, or null"
        )
