"""The target, the head and the data of a run, loaded and checked before its first step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..console import log
from ..heads.base import CheckpointMetadata, DraftHead
from ..heads.checkpoints.save_load import copy_weights, load_head
from ..heads.layers.draft_vocab import favouring
from ..heads.mtp.native import NATIVE
from ..heads.objective import Objective
from ..inference.engines.target import Target
from ..inference.head_loading import native_head
from ..inference.outer_modules import OuterTarget
from ..inference.replay import ReplayTarget
from ..inference.targets.loading import load_tokenizer, target_facts
from ..inference.text.chat_template import data_origin, warn_of_unread_variables
from .config import TrainConfig
from .data.bad_rows import report_unused_rows
from .data.batches import Order
from .data.chat_template import Example
from .data.conversations import Source, open_sources
from .data.split import check_renders, rendering, split_cache
from .data.token_cache import (
    Rendering,
    TokenCache,
    TokenizedSequences,
    cached_sequences,
    count_answer_tokens,
    digest_of,
    lengths_of,
)
from .evaluate import eval_prompts, judged
from .features.by_mode import check_source, needs_no_target, open_source
from .features.placement import load_target
from .features.sources import OpenSource, StateSource
from .features.stored import StoredReplay
from .head import check_head, head_of, objective_of


@dataclass(frozen=True)
class Inputs:
    """Target, head and data of a run, loaded and checked."""

    target: Target
    head: DraftHead
    objective: Objective
    provenance: dict[str, Any]
    """Identity of target and tokenizer, saved with the head."""
    training: Sequence[Example]
    """Read from the cache as they are accessed."""
    held_out: list[Example]
    order: Order
    """Order of the training sequences, by steps."""
    coverage: float
    """Share of the answers' tokens that are in the draft vocabulary."""
    digests: dict[str, str]
    """Of the sequences to train on, the target's weights and the tokenizer."""
    replay: ReplayTarget | None = None
    """The target for evaluations; None where training changes it."""
    source: StateSource | None = None
    """Where all states come from, if the target's blocks are not loaded."""


def load_inputs(
    config: TrainConfig,
    accelerator: Accelerator,
    folder: Path | None = None,
    outer: bool | None = None,
    outside: OpenSource | None = None,
) -> Inputs:
    """Load data, target and head.

    Args:
        folder: where rows that cannot be used are written to a file; None writes none.
        outer: True loads the target's outer modules only (no blocks), and opens no source of
            states; None does what `features.mode` says.
        outside: opens the source of states; None for what `features` names.

    Raises:
        ValueError: invalid options or data, before the target is loaded.
    """
    # 1. What costs nothing comes first: mistakes in the options are reported within seconds.
    objective = objective_of(config)
    check_head(config)
    sources = open_sources(config.data.sources, config.data.max_conversations)
    tokenizer = load_tokenizer(config.target, config.target_revision)
    check_renders(tokenizer, sources, config.target)
    if accelerator.is_main_process:
        warn_of_unread_variables(tokenizer, config.data.thinking, config.data.template_kwargs)

    # 2. The data, before the target, whose loading takes minutes. How they are rendered follows
    # from facts in the target's config files; if those say too little, the target comes first.
    without_blocks = needs_no_target(config) if outer is None else outer
    load = partial(load_target, config, accelerator, without_blocks)
    known = target_facts(config.target, config.target_revision) or load()
    how = rendering(config, known, tokenizer)
    cache, training, held_out = load_data(config, accelerator, sources, how, folder)

    # 3. The target. What it says once loaded outranks its config files.
    target = known if isinstance(known, Target) else load()
    actual = rendering(config, target, tokenizer)
    if actual != how:
        cache, training, held_out = load_data(config, accelerator, sources, actual, folder)

    # 4. The head, and whether this target can train it and decode with it. A head that starts from
    # another may draft tokens that these answers lack.
    counts_V = count_answer_tokens(training, target.info.vocab_size)
    most = int((counts_V > 0).sum()) if config.init_from is None else None
    head = head_of(config, target.info, target.config, most)
    asked = config.head.get("draft_vocab_size") or 0
    if head.draft_vocab_size < asked and accelerator.is_main_process:
        log.info(
            f"head.draft_vocab_size is {most} instead of {asked}: the answers have no more"
            " different tokens, and the head will draft no others"
        )
    head.recompute = config.loop.recompute
    target.check_layers(head.feature_layers)
    target.check_features()
    target.check_decoding()
    origin = data_origin(tokenizer, config.data.thinking, config.data.template_kwargs)
    provenance = {**target.provenance, **origin}

    # 5. The target as evaluations see it: its plain answers are computed once and replayed.
    replay: ReplayTarget | None = None
    source: StateSource | None = None
    if not isinstance(target, OuterTarget):
        # An adapter changes the target, and with it the answers, from one evaluation to the next.
        # A sharded target is replayed too: plain answers take a fixed number of forwards, whatever
        # a process computes. With drafts, a token that rounding decides would give one process a
        # round more than the others, in which it waits for ever.
        replay = None if config.adapter.rank > 0 else ReplayTarget(target)
    elif outer is None:
        # No blocks are here: the states come from elsewhere, for evaluations too.
        source = open_source(config, accelerator, target, head, provenance, outside)
        held_out = judged(held_out, config.eval)
        check_source(source, accelerator, target, held_out, training)
        replay = StoredReplay(target, source, held_out)
    # Called for its error too, which should come now and not at the first evaluation.
    prompts = eval_prompts(replay or target, held_out, config.eval)
    if len(prompts) < config.eval.prompts and accelerator.is_main_process:
        plural = "s"
        worth = "are wide"
        if len(prompts) == 1:
            plural = ""
            worth = "say nothing about other prompts"
        log.info(
            f"acceptance is measured on {len(prompts)} held-out prompt{plural}, and eval.prompts"
            f" asks for {config.eval.prompts}: the intervals of acceptance lengths {worth}; hold"
            f" out more than data.held_out {config.data.held_out}, or make more conversations"
        )

    # 6. The first weights, and the draft vocabulary: the most frequent tokens of the answers.
    if config.init_from is None:
        head.initialize(target.modules, counts_V)
    else:
        warm_start(head, config.init_from, target, counts_V, provenance)
    mask_token = getattr(head, "mask_token", None)
    if mask_token is not None and counts_V[mask_token]:
        log.info(
            f"the mask token, {mask_token}, stands {int(counts_V[mask_token])} times in the"
            " answers: better head.mask_token_id is a token that no text holds"
        )
    covered = counts_V[head.vocabulary()].sum() / counts_V.sum()

    # 7. The order of the sequences: which of them each step trains on.
    data = config.data
    loop = config.loop
    sources_of_rows: list[int] = cache.sources_N[training.chosen_N].tolist()
    lengths = lengths_of(training)
    order = Order(
        lengths,
        loop.batch_size,
        loop.seed,
        data.pack,
        sources_of_rows,
        data.weights,
        loop.batch_tokens,
    )

    # 8. Digests, by which a run that resumes notices that its inputs have changed. The source of a
    # sequence matters only where sources have weights.
    weighted = "" if data.weights is None else str(sources_of_rows)
    digests = {
        "data": hashlib.sha256(digest_of(training) + weighted.encode()).hexdigest()[:16],
        # Unknown where blocks are not loaded and the files name their weights differently.
        "weights": str(provenance.get("weights", "unknown")),
        "tokenizer": str(provenance["tokenizer"]),
    }
    return Inputs(
        target,
        head,
        objective,
        provenance,
        training,
        held_out,
        order,
        float(covered),
        digests,
        replay,
        source,
    )


def load_data(
    config: TrainConfig,
    accelerator: Accelerator,
    sources: list[Source],
    how: Rendering,
    folder: Path | None,
) -> tuple[TokenCache, TokenizedSequences, list[Example]]:
    """Tokenize the sources, check their rows, and split off the held-out sequences."""
    cache = cached_sequences(sources, how, config.data.cache, config.data.num_proc)
    report_unused_rows(cache, config.data, how.max_length, folder, accelerator.is_main_process)
    training, held_out = split_cache(cache, config)
    check_same_everywhere(accelerator, training)
    return cache, training, held_out


def warm_start(
    head: DraftHead, source: str, target: Target, counts_V: Tensor, provenance: dict[str, Any]
) -> None:
    """Start from the weights of another head, or of the target's own MTP head ("mtp").

    The draft vocabulary follows the data: it is the most frequent tokens of these answers, then
    those of the other head. A token that the other head cannot draft begins with the weights that
    training is expected to have given it (`with_trained_rows`).

    Raises:
        ValueError: the other head does not fit this one.
    """
    if source == NATIVE:
        other: DraftHead = native_head(target)
        metadata = CheckpointMetadata()
    else:
        other, metadata = load_head(source, head.target)

    # Refuse a head of another algorithm, tokenizer or computation.
    if type(other) is not type(head):
        raise ValueError(f"{source!r} holds a {type(other).__name__}, not a {type(head).__name__}")
    trained = metadata.provenance.get("tokenizer")
    if trained not in (None, provenance["tokenizer"]):
        raise ValueError(
            f"init_from {source!r} was trained with tokenizer {trained}, not"
            f" {provenance['tokenizer']}: its draft vocabulary means other tokens; choose a head of"
            " the same tokenizer, or null"
        )
    if (
        head.draft_vocab_size < head.target.vocab_size
        or other.draft_vocab_size < other.target.vocab_size
    ):
        # Among tokens that the answers hold equally often, those of the other head come first.
        head.initialize(target.modules, favouring(counts_V, other.vocabulary()))
    # Options that change what a head computes, so that the weights would mean something else.
    for name in head.computes:
        ours = getattr(head.config, name)
        theirs = getattr(other.config, name)
        if ours != theirs:
            raise ValueError(
                f"init_from {source!r} was made with head.{name} {theirs!r}, and this head has"
                f" {ours!r}"
            )
    try:
        copy_weights(head, other)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def check_same_everywhere(accelerator: Accelerator, examples: Sequence[Example]) -> None:
    """Raise a ValueError if processes read different data: their shares would not make up steps."""
    # [number of sequences, digest of their tokens], gathered to [processes, 2]
    count_and_digest = torch.tensor(
        [len(examples), int.from_bytes(digest_of(examples), "big")], device=accelerator.device
    )
    everyone = accelerator.gather(count_and_digest).view(-1, 2).tolist()
    for process, (count, digest) in enumerate(everyone):
        if [count, digest] != everyone[0]:
            raise ValueError(
                f"process {process} reads other data than process 0: {count} and {everyone[0][0]}"
                " sequences to train on; give every process the same data.sources, tokenizer and"
                " options"
            )
