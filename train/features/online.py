"""What a head trains on: the frozen target's states, computed on the way or read from a cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from ...heads import DraftHead, TargetFeatures
from ...inference import Target
from ..config import TrainConfig
from ..console import ProgressBar, Stopped, StopRequest, log
from ..data.batches import Batch, collate
from ..data.chat_template import Example
from ..data.token_cache import lengths_of
from ..engines import alone, any_process
from .cached import FORMATS, FeatureCache, bytes_per_token, corrupt_shards, decoded, key_of
from .placement import cut_over_processes
from .server_states import take_server_states

BATCH_TOKENS = 8192
"""Tokens of a batch, padding included, when states are computed before training."""


class FeatureSource(Protocol):
    """What gives a batch's features."""

    def __call__(self, batch: Batch) -> TargetFeatures:
        """The features of a batch."""

    def read_ahead(self, batch: Batch, epoch: int) -> Batch:
        """A batch with what of its features can be read before its step, by a worker of the loader."""

    def settle(self, accelerator: Accelerator) -> None:
        """Called on every process, where a run may go on from: what was computed so far is on disk afterwards."""


def online_features(
    target: Target, head: DraftHead, batch: Batch, dtype: torch.dtype = torch.float32
) -> TargetFeatures:
    """Run the target over a batch.

    Args:
        target: the frozen model.
        head: says which layers it wants.
        batch: right-padded conversations.
        dtype: of the features, as the head's weights.
    """
    features_BTF, last_BTD = target.read(
        batch.tokens_BT.to(target.device, non_blocking=True), head.feature_layers, _on(target, batch.positions_BT)
    )
    return together(target, batch, features_BTF.to(dtype), last_BTD.to(dtype))


@dataclass(frozen=True)
class OnlineFeatures:
    """Computed in every epoch anew."""

    target: Target
    head: DraftHead

    def __call__(self, batch: Batch) -> TargetFeatures:
        """See `online_features`."""
        return online_features(self.target, self.head, batch)

    def read_ahead(self, batch: Batch, epoch: int) -> Batch:
        """Nothing is kept."""
        return batch

    def settle(self, accelerator: Accelerator) -> None:
        """Nothing is kept."""


def kept_layers(layers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers whose states a cache holds for a head that reads `layers`: the last one is always among them."""
    return tuple(dict.fromkeys((*layers, -1)))


class CachedFeatures:
    """As `online_features`, of states that a cache holds; what it does not hold is computed and added.

    A batch is computed as a whole, and what is trained on is what the cache gives back, also right after it was
    computed: so a run that was interrupted trains on the same numbers.
    """

    def __init__(
        self, target: Target, head: DraftHead, cache: FeatureCache, accelerator: Accelerator | None = None
    ) -> None:
        """Begin.

        Args:
            target: the frozen model.
            head: says which layers it wants.
            cache: of this model and these layers.
            accelerator: of the processes that a target is cut over, each of whose forwards all of them take part in.
        """
        self.target, self.cache, self.layers = target, cache, kept_layers(head.feature_layers)
        self._together = accelerator if cut_over_processes(target) else None
        self._chosen = [self.layers.index(layer) for layer in head.feature_layers]
        self._last = self.layers.index(-1)
        self._epoch: int | None = None

    def __call__(self, batch: Batch, dtype: torch.dtype = torch.float32) -> TargetFeatures:
        """The features of a batch; on the device they get their dtype, so that few bytes travel."""
        if batch.states_BTLD is None:
            batch = self._stored(batch, self.fill(batch))
        states_BTLD = decoded(_on(self.target, batch.states_BTLD), _on(self.target, batch.scales_BTL)).to(dtype)
        features_BTF = states_BTLD[:, :, self._chosen].flatten(2)
        return together(self.target, batch, features_BTF, states_BTLD[:, :, self._last])

    def read_ahead(self, batch: Batch, epoch: int) -> Batch:
        """A batch with its states, if the cache holds all of them."""
        if epoch != self._epoch:  # a worker has the cache as it was when it was forked
            self.cache.refresh()
            self._epoch = epoch
        keys = keys_of(batch)
        return self._stored(batch, keys) if all(key in self.cache for key in keys) else batch

    def _stored(self, batch: Batch, keys: list[bytes]) -> Batch:
        """A batch with its states out of the cache, in the format in which it holds them."""
        shape = (*batch.tokens_BT.shape, len(self.layers))
        states_BTLD = torch.zeros((*shape, self.target.info.hidden_size), dtype=FORMATS[self.cache.format])
        scales_BTL = torch.zeros(shape) if self.cache.format == "int8" else None
        for key, (row, place) in zip(keys, batch.places(), strict=True):
            states_TLD, scales_TL = self.cache.stored(key)
            states_BTLD[row, place] = states_TLD
            if scales_BTL is not None and scales_TL is not None:
                scales_BTL[row, place] = scales_TL
        return replace(batch, states_BTLD=states_BTLD, scales_BTL=scales_BTL)

    def write(self, accelerator: Accelerator, examples: Sequence[Example]) -> None:
        """Compute all that is missing, every process its part of the batches; Ctrl-C and SIGTERM lose nothing.

        Raises:
            Stopped: once what was computed has been written.
        """
        lengths = lengths_of(examples)
        batches = by_length(lengths, BATCH_TOKENS)
        with StopRequest() as stop:
            with ProgressBar("tokens", sum(lengths)) as bar, suppress(Stopped):
                for start in range(0, len(batches), accelerator.num_processes):
                    group = batches[start : start + accelerator.num_processes]
                    if any_process(accelerator, stop.wanted):
                        break
                    own = group[accelerator.process_index :][:1]  # the last group may have none for this process
                    with stop.at_once(alone(accelerator)):
                        self.fill(collate([examples[i] for batch in own for i in batch]))
                    bar.update(bar.done + sum(lengths[i] for batch in group for i in batch))
            self.settle(accelerator)
            if any_process(accelerator, stop.wanted):
                raise Stopped("stopped; the same command goes on from there")

    def settle(self, accelerator: Accelerator) -> None:
        """Write what is new, and take in what other processes wrote."""
        self.cache.flush()
        accelerator.wait_for_everyone()
        self.cache.refresh()

    def fill(self, batch: Batch) -> list[bytes]:
        """Compute a batch of which the cache misses something; the keys of its sequences.

        With a target that is cut over processes, all of them call this at the same time, and run the target if the
        batch of any misses something.
        """
        keys = keys_of(batch)
        missing = any(key not in self.cache for key in keys)
        if missing if self._together is None else any_process(self._together, missing):
            tokens_BT = batch.tokens_BT.to(self.target.device)
            states_BTF, _ = self.target.read(tokens_BT, self.layers, _on(self.target, batch.positions_BT))
            states_BTLD = states_BTF.unflatten(-1, (len(self.layers), -1))
            for key, (row, place) in zip(keys, batch.places(), strict=True):
                self.cache.add(key, states_BTLD[row, place])
        return keys


def feature_source(
    accelerator: Accelerator,
    target: Target,
    head: DraftHead,
    origin: dict[str, Any],
    examples: Sequence[Example],
    config: TrainConfig,
    epochs: float,
) -> FeatureSource:
    """What `features.mode` asks for; `auto` keeps states if they are read again and take no more than its limit."""
    options = config.features
    gib = cache_bytes(target, head, config) * sum(lengths_of(examples)) / 2**30
    if options.mode == "online" or (options.mode == "auto" and (epochs <= 1 or gib > options.limit)):
        return OnlineFeatures(target, head)
    cached = CachedFeatures(target, head, open_cache(accelerator, target, head, origin, config), accelerator)
    log.info(f"the target's states: {gib:.2f} GiB in {cached.cache.folder}")
    if options.from_server is not None and accelerator.is_main_process:
        folder, layers = Path(options.from_server), options.server_layers
        added = take_server_states(cached.cache, target, cached.layers, examples, folder, layers)
        log.info(f"{added} sequences' states from {folder}")
    if options.from_server is not None:
        cached.settle(accelerator)
    if options.mode == "cached":
        cached.write(accelerator, examples)
    return cached


def open_cache(
    accelerator: Accelerator, target: Target, head: DraftHead, origin: dict[str, Any], config: TrainConfig
) -> FeatureCache:
    """The run's cache, begun by the first process.

    Raises:
        ValueError: what is there belongs to another target, head or tokenizer.
    """
    model = {name: origin[name] for name in ("target", "revision", "dtype", "quantization", "weights", "tokenizer")}
    manifest = {
        **model,
        "layers": list(kept_layers(head.feature_layers)),
        "hidden_size": target.info.hidden_size,
        "format": config.features.format,
    }
    folder = Path(config.features.folder or Path(config.output) / "features")
    with accelerator.main_process_first():
        if config.features.repair and accelerator.is_main_process:
            for path in corrupt_shards(folder):
                log.info(f"{path} is corrupt and was removed")
                path.unlink()
        return FeatureCache(folder, manifest)


def cache_bytes(target: Target, head: DraftHead, config: TrainConfig) -> int:
    """What a token's states take on disk."""
    return bytes_per_token(len(kept_layers(head.feature_layers)), target.info.hidden_size, config.features.format)


def together(target: Target, batch: Batch, features_BTF: Tensor, last_BTD: Tensor) -> TargetFeatures:
    """A batch with its states, on the target's device."""
    return TargetFeatures(
        features_BTF=features_BTF,
        last_BTD=last_BTD,
        tokens_BT=batch.tokens_BT.to(target.device, non_blocking=True),
        loss_mask_BT=batch.loss_mask_BT,
        modules=target.modules,
        positions_BT=_on(target, batch.positions_BT),
    )


def by_length(lengths: list[int], tokens: int) -> list[list[int]]:
    """Sequences of similar lengths in batches, the longest first, of at most so many tokens with their padding."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    first = 0
    while first < len(order):
        size = max(1, tokens // lengths[order[first]])
        batches.append(order[first : first + size])
        first += size
    return batches


def keys_of(batch: Batch) -> list[bytes]:
    """By what the cache finds the states of each sequence of a batch."""
    return [key_of(batch.tokens_BT[row, place]) for row, place in batch.places()]


def _on(target: Target, tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.to(target.device, non_blocking=True)
