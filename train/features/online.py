"""Sources of features: the frozen target's states, computed in every step or read from a cache.

`OnlineFeatures` is the interface and its plain implementation; `CachedFeatures` overrides all of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ...console import ProgressBar
from ...files import free_bytes
from ...heads.base import DraftHead, TargetFeatures
from ...inference.engines.target import Target
from ...inference.feature_cache import (
    FORMATS,
    FeatureCache,
    cache_manifest,
    decoded,
    kept_layers,
    key_of,
)
from ...stopping import Stopped, stop_on_signals
from ..config import FeaturesConfig
from ..data.batches import Batch, budgeted, collate
from ..data.chat_template import Example
from ..data.token_cache import lengths_of, tokens_of
from ..engines import all_agree, any_process
from .placement import is_sharded
from .sources import States

BATCH_TOKENS = 8192
"""Tokens of a batch, padding included, of states that are computed before training."""


def online_features(
    target: Target, head: DraftHead, batch: Batch, dtype: torch.dtype = torch.float32
) -> TargetFeatures:
    """Run the target over a batch of right-padded conversations; return features in `dtype`.

    `dtype` is the one in which the head reads them.
    """
    # The chosen layers side by side (F = layers * D), and the states after the final norm.
    features_BTF, last_BTD = target.read(
        batch.tokens_BT.to(target.device, non_blocking=True),
        head.feature_layers,
        batch.positions_BT,
    )
    return target_features(target, batch, features_BTF.to(dtype), last_BTD.to(dtype))


@dataclass
class OnlineFeatures:
    """Features that are computed in every step."""

    target: Target
    head: DraftHead

    def __call__(self, batch: Batch, dtype: torch.dtype = torch.float32) -> TargetFeatures:
        """Return the features of a batch."""
        return online_features(self.target, self.head, batch, dtype)

    def read_ahead(self, batches: list[Batch], epoch: int) -> list[Batch]:
        """Read the features of a step's batches ahead, if this process does not compute them.

        A worker of the loader does so before the step.
        """
        return batches

    def flush(self, accelerator: Accelerator) -> None:
        """Write all features computed so far to disk.

        Every process calls it before a checkpoint, and at the start of an epoch.
        """


class CachedFeatures(OnlineFeatures):
    """Features from a cache, to which missing states are added as they are computed.

    A batch is computed as a whole. Training reads back the stored states even right after they were
    computed, so that an interrupted run trains on the same numbers.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        cache: FeatureCache,
        accelerator: Accelerator | None = None,
    ) -> None:
        """Read from a cache, and fill it.

        `accelerator` joins the processes over which the target may be sharded.
        """
        super().__init__(target, head)
        self.cache = cache
        # The processes that run the target together; None if each runs its own.
        self._together = accelerator if is_sharded(target) else None
        self._epoch: int | None = None  # at whose beginning the cache was refreshed

    def __call__(self, batch: Batch, dtype: torch.dtype = torch.float32) -> TargetFeatures:
        missing = batch.states_BTLD is None
        # A sharded target runs on all processes or on none: one that lacks nothing still takes part
        # in the decision.
        if missing or self._together is not None:
            keys = self.fill(batch)
            batch = self._stored(batch, keys) if missing else batch
        return features_of_states(self.target, self.head, batch, self.cache.layers, dtype)

    def read_ahead(self, batches: list[Batch], epoch: int) -> list[Batch]:
        # A worker has a copy of the cache from when it was forked. Each epoch adds states.
        if epoch != self._epoch:
            self.cache.refresh()
            self._epoch = epoch
        # Batches of which the cache has all sequences get their states.
        ready = []
        for batch in batches:
            keys = [key_of(batch.tokens_BT[row, span]) for row, span in batch.places()]
            stored = all(key in self.cache for key in keys)
            ready.append(self._stored(batch, keys) if stored else batch)
        return ready

    def _stored(self, batch: Batch, keys: list[bytes]) -> Batch:
        """Return a batch with its states from the cache, in the cache's format."""
        states = [self.cache.stored(key) for key in keys]
        return with_states(batch, states, len(self.cache.layers), self.target.info.hidden_size)

    def write(self, accelerator: Accelerator, examples: Sequence[Example]) -> None:
        """Compute all missing states, each process its part.

        Raises:
            ValueError: they do not fit on the disk.
            Stopped: Ctrl-C or SIGTERM, once the states so far are written.
        """
        lengths = lengths_of(examples)
        lacking = lacking_in(accelerator, self.cache, examples)
        check_room(accelerator, self.cache, self.head, sum(lengths[i] for i in lacking))
        # Longest first: a batch that does not fit in memory fails at once.
        lacking.sort(key=lambda i: -lengths[i])
        # A process without a batch still calls `fill`, as a sharded target needs.
        fill_in_turns(
            accelerator,
            self.cache,
            lengths,
            budgeted(lacking, lengths, BATCH_TOKENS),
            lambda batch: self.fill(collate([examples[i] for i in batch])),
        )

    def flush(self, accelerator: Accelerator) -> None:
        exchange(accelerator, self.cache)

    def fill(self, batch: Batch) -> list[bytes]:
        """Compute a batch's states unless all are cached; return the keys of its sequences.

        All processes over which a target is sharded call this at the same time, and run the target
        if any process lacks states.
        """
        keys = [key_of(batch.tokens_BT[row, span]) for row, span in batch.places()]
        missing = any(key not in self.cache for key in keys)
        if self._together is not None:
            missing = any_process(self._together, missing)
        if missing:
            tokens_BT = batch.tokens_BT.to(self.target.device)
            layers = self.cache.layers
            states_BTF, _ = self.target.read(tokens_BT, layers, batch.positions_BT)
            states_BTLD = states_BTF.unflatten(-1, (len(layers), -1))
            # Each sequence is stored alone, without padding.
            for key, (row, span) in zip(keys, batch.places(), strict=True):
                self.cache.add(key, states_BTLD[row, span])
        return keys


def exchange(accelerator: Accelerator, cache: FeatureCache) -> None:
    """Write the states that this process has added, and read what the others have written."""
    cache.flush()
    accelerator.wait_for_everyone()
    cache.refresh()


def fill_in_turns(
    accelerator: Accelerator,
    cache: FeatureCache,
    lengths: Sequence[int],
    batches: Sequence[list[int]],
    add: Callable[[list[int]], object],
) -> None:
    """Add the states of batches to a cache, each process one batch at a time.

    Args:
        lengths: tokens of all sequences.
        batches: the sequences of each batch, as indices in `lengths`.
        add: adds the states of a batch, which may be empty.

    Raises:
        Stopped: Ctrl-C or SIGTERM, once the states so far are written.
    """
    processes = accelerator.num_processes
    total = sum(lengths[index] for batch in batches for index in batch)
    stopping = False
    with stop_on_signals() as stop, ProgressBar("tokens", total) as bar:
        for start in range(0, len(batches), processes):
            # The last group may be smaller than the number of processes.
            group = batches[start : start + processes]
            stopping = any_process(accelerator, stop.wanted)
            if stopping:
                break
            process = accelerator.process_index
            add(group[process] if process < len(group) else [])
            bar.update(bar.done + sum(lengths[index] for batch in group for index in batch))
        exchange(accelerator, cache)
    if stopping:
        raise Stopped("stopped; the same command resumes from there")


def with_states(batch: Batch, states: Sequence[States], layers: int, width: int) -> Batch:
    """Return a batch with the states [T, L, D] of its sequences, in their own dtype.

    `states` follows the order of the sequences in the batch.
    """
    shape = (*batch.tokens_BT.shape, layers)  # [B, T, L]
    # Zeros in the padding, and in all of a batch without sequences.
    nothing = (torch.zeros(0, dtype=torch.float32), None)
    first_states, first_scales = states[0] if states else nothing
    states_BTLD = torch.zeros((*shape, width), dtype=first_states.dtype)
    scales_BTL = None if first_scales is None else torch.zeros(shape, dtype=torch.float32)
    for (states_TLD, scales_TL), (row, span) in zip(states, batch.places(), strict=False):
        states_BTLD[row, span] = states_TLD
        if scales_BTL is not None and scales_TL is not None:
            scales_BTL[row, span] = scales_TL
    return replace(batch, states_BTLD=states_BTLD, scales_BTL=scales_BTL)


def lacking_in(
    accelerator: Accelerator, cache: FeatureCache, examples: Sequence[Example]
) -> list[int]:
    """Indices of the sequences whose states a cache lacks, each text once.

    Processes share the work. Every process gets the same list, even while another job fills the
    folder.
    """
    # 1. Hash this process's share, in which a text may come more than once.
    share = range(accelerator.process_index, len(examples), accelerator.num_processes)
    index_of_key = {key_of(tokens_of(examples, index)): index for index in share}
    lacking = [(key, index) for key, index in index_of_key.items() if key not in cache]
    # 2. Exchange what each process lacks. Processes may have found the same text.
    parts: list[list[tuple[bytes, int]]] = gather_object([lacking])
    together: dict[bytes, int] = {}
    for part in parts:
        for key, index in reversed(part):
            together[key] = index
    return sorted(together.values())


def check_room(accelerator: Accelerator, cache: FeatureCache, head: DraftHead, tokens: int) -> None:
    """Refuse states of `tokens` tokens that do not fit on the disk, before any are written."""
    needed = cache_bytes(head, cache.format, cache.layers) * tokens
    free = free_bytes(cache.folder)

    def check() -> None:
        if needed > free:
            raise ValueError(
                f"the states of {tokens:,} tokens take {needed / 2**30:.1f} GiB, and the disk of"
                f" {cache.folder} has {free / 2**30:.1f} GiB left; choose features.format int8,"
                " features.folder on another disk, features.mode online, or less data"
            )

    all_agree(accelerator, check)


def open_cache(
    accelerator: Accelerator,
    head: DraftHead,
    provenance: dict[str, Any],
    options: FeaturesConfig,
    output: Path,
) -> FeatureCache:
    """Open a run's cache, which the main process creates.

    Raises:
        ValueError: the folder holds states of another model or tokenizer.
    """
    layers = kept_layers(head.feature_layers)
    manifest = cache_manifest(provenance, layers, head.target.hidden_size, options.format)
    folder = Path(options.folder or output / "features")
    with accelerator.main_process_first():
        return FeatureCache(folder, manifest)


def cache_bytes(head: DraftHead, storage: str, layers: Sequence[int] = ()) -> int:
    """Return the bytes of a token's states on disk.

    `storage` names their format. `layers` are those of a folder that has others than the head
    reads.
    """
    bytes_per_layer = head.target.hidden_size * FORMATS[storage].itemsize
    if storage == "int8":
        bytes_per_layer += 4  # a float32 scale
    return len(layers or kept_layers(head.feature_layers)) * bytes_per_layer


def target_features(
    target: Target, batch: Batch, features_BTF: Tensor, last_BTD: Tensor
) -> TargetFeatures:
    """Combine a batch with its states, on the target's device."""
    return TargetFeatures(
        features_BTF=features_BTF,
        last_BTD=last_BTD,
        tokens_BT=batch.tokens_BT.to(target.device, non_blocking=True),
        loss_mask_BT=batch.loss_mask_BT,
        modules=target.modules,
        positions_BT=on_target(target, batch.positions_BT),
        documents_BT=batch.documents_BT,
    )


def features_of_states(
    target: Target,
    head: DraftHead,
    batch: Batch,
    layers: tuple[int, ...],
    dtype: torch.dtype,
    before_norm: bool = False,
) -> TargetFeatures:
    """Features of a batch with its states, which are those of `layers`, in this order.

    `before_norm` says that the norm is still to be applied to layer -1.
    """
    # Decoded on the device, so that fewer bytes are copied.
    states_BTLD = decoded(on_target(target, batch.states_BTLD), on_target(target, batch.scales_BTL))
    features_BTF, last_BTD = chosen_states(
        target, states_BTLD, layers, head.feature_layers, dtype, before_norm
    )
    return target_features(target, batch, features_BTF, last_BTD)


def chosen_states(
    target: Target,
    states: Tensor,
    layers: tuple[int, ...],
    chosen: tuple[int, ...],
    dtype: torch.dtype,
    before_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Select from states [..., L, D] the features [..., F] of chosen layers and the last states.

    The last states [..., D] are those after the final norm.
    """
    # Layers (2, 15, -1): a head that reads 15 and -1 takes numbers 1 and 2.
    last = states[..., layers.index(-1), :]
    if before_norm:
        with torch.no_grad():
            last = target.modules.norm(last.to(target.dtype))
    last = last.to(dtype)
    parts = [
        last if layer == -1 else states[..., layers.index(layer), :].to(dtype) for layer in chosen
    ]
    # A head may read no features but only the last states: then F is 0.
    features = torch.cat(parts, -1) if parts else last[..., :0]
    return features, last


def on_target(target: Target, tensor: Tensor | None) -> Any:
    """Copy a tensor, if there is one, to the target's device."""
    return None if tensor is None else tensor.to(target.device, non_blocking=True)
