"""Choice of a run's features by `features.mode`, and the checks before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ...console import log
from ...files import free_bytes
from ...heads.base import DraftHead
from ...inference.engines.target import Target
from ...inference.feature_cache import MANIFEST, FeatureCache, kept_layers, key_of
from ...inference.outer_modules import OuterTarget
from ..config import TrainConfig
from ..data.chat_template import Example
from ..data.token_cache import lengths_of
from ..engines import all_agree, from_main
from .online import (
    CachedFeatures,
    OnlineFeatures,
    cache_bytes,
    check_room,
    fill_in_turns,
    lacking_in,
    open_cache,
)
from .sources import OpenSource, StateSource
from .stored import FILL, FolderStates, StoredFeatures

IMPORTED = 16
"""Sequences that a process takes from a source at once."""


def needs_no_target(config: TrainConfig) -> bool:
    """Whether a run computes no states, and so loads only the outer modules of the target."""
    return config.features.mode in ("stored", "served")


def check_outside_source(config: TrainConfig, outside: OpenSource | None) -> None:
    """Refuse a `features.mode` that does not fit the source passed to `train`, or its absence."""
    mode = config.features.mode
    if outside is None and mode == "served":
        raise ValueError("features.mode served needs a source of states, train(config, source=...)")
    if outside is not None and mode not in ("served", "stored", "cached"):
        raise ValueError(
            f"a source of states was given, and features.mode {mode} does not read it; choose from "
            "served, stored, cached"
        )


def open_source(
    config: TrainConfig,
    accelerator: Accelerator,
    target: OuterTarget,
    head: DraftHead,
    provenance: dict[str, Any],
    outside: OpenSource | None,
) -> StateSource:
    """Open the source of all states: the one from outside if it is given, else the folder.

    Raises:
        ValueError: the folder has no states, or those of another target.
    """
    if outside is not None:
        return outside(target.info, kept_layers(head.feature_layers))
    options = config.features
    folder = Path(options.folder or Path(config.output) / "features")
    if not (folder / MANIFEST).exists():
        raise ValueError(
            f"features.mode stored finds no states in {str(folder)!r} (features.folder); {FILL}"
        )
    cache = open_cache(accelerator, head, provenance, options, Path(config.output))
    return FolderStates(cache, min(config.data.max_length, target.max_positions))


def check_source(
    source: StateSource,
    accelerator: Accelerator,
    target: Target,
    held_out: list[Example],
    training: Sequence[Example] = (),
) -> None:
    """Check before long work that a source has all states that it needs, and the right ones."""

    def check() -> None:
        source.require(accelerator, training, "to train on")
        source.require(accelerator, held_out, "that are held out")
        source.try_first(target, held_out[0])

    all_agree(accelerator, check)


def feature_source(
    accelerator: Accelerator,
    target: Target,
    head: DraftHead,
    provenance: dict[str, Any],
    examples: Sequence[Example],
    config: TrainConfig,
    epochs: float,
    source: StateSource | None = None,
    outside: OpenSource | None = None,
) -> OnlineFeatures:
    """Build the features that `features.mode` names; `source` is that of a run without the target.

    `cached` copies the states of the source from `outside`, if one is given. `auto` caches states
    that fit in its limit and on the disk, and are read again or are there already.
    """
    # 1. Stored and served: nothing is computed here.
    if source is not None:
        return StoredFeatures(target, head, source)

    # 2. Online, and auto where a cache does not pay: too large, or read only once. In a folder that
    # has a manifest, another run has begun to cache these states already.
    options = config.features
    tokens = sum(lengths_of(examples))
    gib = cache_bytes(head, options.format) * tokens / 2**30
    # The main process looks: a folder that another job begins now would divide the processes.
    begun = from_main(
        accelerator, options.folder is not None and (Path(options.folder) / MANIFEST).exists()
    )
    if options.mode == "online" or (
        options.mode == "auto" and (gib > options.limit or (epochs <= 1 and not begun))
    ):
        return OnlineFeatures(target, head)

    # 3. A cache. Auto gives it up if the disk is too small for what is still lacking. A folder may
    # have more layers than this head reads.
    cache = open_cache(accelerator, head, provenance, options, Path(config.output))
    token_bytes = cache_bytes(head, options.format, cache.layers)
    if options.mode == "auto":
        lengths = lengths_of(examples)
        lacking = lacking_in(accelerator, cache, examples)
        needed = token_bytes * sum(lengths[index] for index in lacking)
        if from_main(accelerator, needed > free_bytes(cache.folder)):
            log.info(
                f"{needed / 2**30:.2f} GiB of states do not fit on the disk of {cache.folder}: none"
                " are kept"
            )
            return OnlineFeatures(target, head)
    cached = CachedFeatures(target, head, cache, accelerator)
    log.info(f"the target's states: {token_bytes * tokens / 2**30:.2f} GiB in {cache.folder}")
    if outside is not None:
        import_states(
            accelerator, cache, outside(target.info, cache.layers), target, head, examples
        )
    # Auto adds states in the first epoch, as it computes them.
    if options.mode == "cached":
        cached.write(accelerator, examples)
    return cached


def import_states(
    accelerator: Accelerator,
    cache: FeatureCache,
    source: StateSource,
    target: Target,
    head: DraftHead,
    examples: Sequence[Example],
) -> int:
    """Add a source's states of all sequences to the cache; return how many sequences were added.

    Each process adds its share.

    Raises:
        ValueError: sequences without states, or states that are not theirs.
        Stopped: Ctrl-C or SIGTERM, once the states so far are written.
    """
    lacking = lacking_in(accelerator, cache, examples)
    lengths = lengths_of(examples)
    check_room(accelerator, cache, head, sum(lengths[index] for index in lacking))
    source.require(accelerator, [examples[index] for index in lacking], "to train on")

    def take(batch: list[int]) -> None:
        chosen = [examples[index] for index in batch]
        sequences = [(torch.tensor(example.tokens), example.conversation) for example in chosen]
        for (tokens_T, _), (states_TLD, _) in zip(sequences, source.many(sequences), strict=True):
            cache.add(key_of(tokens_T), normed(source, target, states_TLD))

    # Few sequences are divided among the processes, too.
    share = math.ceil(len(lacking) / accelerator.num_processes)
    size = max(1, min(IMPORTED, share))
    batches = [lacking[begin : begin + size] for begin in range(0, len(lacking), size)]
    fill_in_turns(
        accelerator,
        cache,
        lengths,
        batches,
        lambda batch: all_agree(accelerator, partial(take, batch)),
    )
    log.info(f"states of {len(lacking)} sequences are in {cache.folder}")
    return len(lacking)


@torch.no_grad()
def normed(source: StateSource, target: Target, states_TLD: Tensor) -> Tensor:
    """Apply the final norm to layer -1 of a source's states, as a cache holds them."""
    if not source.before_norm:
        return states_TLD
    normed_TLD = states_TLD.to(target.device, target.dtype, copy=True)
    last = source.layers.index(-1)
    normed_TLD[:, last] = target.modules.norm(normed_TLD[:, last])
    return normed_TLD
