"""Sources of features: the frozen target's states, computed in every step or read from a cache.

`OnlineFeatures` is the interface and its plain implementation; `CachedFeatures` overrides all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ...console import ProgressBar, log
from ...files import file_sizes, require_free
from ...heads.base import DraftHead, TargetFeatures
from ...inference.target import Target
from ...stopping import Stopped, stop_on_signals
from ..config import FeaturesConfig, TrainConfig
from ..data.batches import Batch, budgeted, collate
from ..data.chat_template import Example
from ..data.token_cache import lengths_of
from ..engines import any_process, from_main
from .cached import FORMATS, MANIFEST, FeatureCache, corrupt_shards, decoded, key_of
from .placement import is_sharded
from .server_states import take_server_states

BATCH_TOKENS = 8192
"""Tokens of a batch, padding included, of states that are computed before training."""


def online_features(
    target: Target, head: DraftHead, batch: Batch, dtype: torch.dtype = torch.float32
) -> TargetFeatures:
    """Run the target over a batch of right-padded conversations; `dtype` is that of the head's weights."""
    features_BTF, last_BTD = target.read(
        batch.tokens_BT.to(target.device, non_blocking=True), head.feature_layers, _on(target, batch.positions_BT)
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

    def read_ahead(self, batch: Batch, epoch: int) -> Batch:
        """Read the features of a batch that are on disk, in a worker of the loader, before its step."""
        return batch

    def settle(self, accelerator: Accelerator) -> None:
        """Write all features computed so far to disk; called on every process before a checkpoint."""


def kept_layers(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Layers whose states a cache holds for a head that reads `layers`: these, and the state after the final norm."""
    return tuple(dict.fromkeys((*layers, -1)))


class CachedFeatures(OnlineFeatures):
    """Features from a cache, to which missing states are added as they are computed.

    A batch is computed as a whole. Training reads back the stored states even right after they were computed, so that
    an interrupted run trains on the same numbers.
    """

    def __init__(
        self, target: Target, head: DraftHead, cache: FeatureCache, accelerator: Accelerator | None = None
    ) -> None:
        """Read and fill a cache; `accelerator` joins the processes over which the target may be sharded."""
        super().__init__(target, head)
        self.cache = cache
        self._together = accelerator if is_sharded(target) else None
        self._chosen = [cache.layers.index(layer) for layer in head.feature_layers]
        self._last = cache.layers.index(-1)
        self._epoch: int | None = None

    def __call__(self, batch: Batch, dtype: torch.dtype = torch.float32) -> TargetFeatures:
        missing = batch.states_BTLD is None
        # A sharded target runs on all processes or on none: one that lacks nothing still takes part in the decision.
        if missing or self._together is not None:
            keys = self.fill(batch)
            batch = self._stored(batch, keys) if missing else batch
        # Decoded on the device, so that fewer bytes are copied.
        states_BTLD = decoded(_on(self.target, batch.states_BTLD), _on(self.target, batch.scales_BTL)).to(dtype)
        features_BTF = states_BTLD[:, :, self._chosen].flatten(2)
        return target_features(self.target, batch, features_BTF, states_BTLD[:, :, self._last])

    def read_ahead(self, batch: Batch, epoch: int) -> Batch:
        if epoch != self._epoch:  # a worker forked the cache as it was then
            self.cache.refresh()
            self._epoch = epoch
        keys = [key_of(batch.tokens_BT[row, place]) for row, place in batch.places()]
        return self._stored(batch, keys) if all(key in self.cache for key in keys) else batch

    def _stored(self, batch: Batch, keys: list[bytes]) -> Batch:
        """Return a batch with its states from the cache, in the cache's format."""
        shape = (*batch.tokens_BT.shape, len(self.cache.layers))
        states_BTLD = torch.zeros((*shape, self.target.info.hidden_size), dtype=FORMATS[self.cache.format])
        scales_BTL = torch.zeros(shape) if self.cache.format == "int8" else None
        for key, (row, place) in zip(keys, batch.places(), strict=True):
            states_TLD, scales_TL = self.cache.stored(key)
            states_BTLD[row, place] = states_TLD
            if scales_BTL is not None and scales_TL is not None:
                scales_BTL[row, place] = scales_TL
        return replace(batch, states_BTLD=states_BTLD, scales_BTL=scales_BTL)

    def write(self, accelerator: Accelerator, examples: Sequence[Example]) -> None:
        """Compute all missing states, each process its part.

        Raises:
            Stopped: Ctrl-C or SIGTERM, once the states so far are written.
        """
        lengths = lengths_of(examples)
        scanned = range(len(lengths)) if accelerator.is_main_process else ()
        found = {key_of(torch.tensor(examples[i].tokens)): i for i in scanned}
        lacking = [i for key, i in found.items() if key not in self.cache]
        lacking = from_main(accelerator, lacking)  # another job may be writing: the processes need one list
        lacking.sort(key=lambda i: -lengths[i])
        batches = budgeted(lacking, lengths, BATCH_TOKENS)
        with stop_on_signals() as stop:
            stopping = False
            with ProgressBar("tokens", sum(lengths[i] for i in lacking)) as bar:
                for start in range(0, len(batches), accelerator.num_processes):
                    group = batches[start : start + accelerator.num_processes]
                    stopping = any_process(accelerator, stop.wanted)
                    if stopping:
                        break
                    own = group[accelerator.process_index :][:1]  # empty, if the last group has none for this process
                    self.fill(collate([examples[i] for batch in own for i in batch]))
                    bar.update(bar.done + sum(lengths[i] for batch in group for i in batch))
            self.settle(accelerator)
            if stopping:
                raise Stopped("stopped; the same command resumes from there")

    def settle(self, accelerator: Accelerator) -> None:
        self.cache.flush()
        accelerator.wait_for_everyone()
        self.cache.refresh()

    def fill(self, batch: Batch) -> list[bytes]:
        """Compute the states of a batch, unless the cache holds all of them; return the keys of its sequences.

        All processes over which a target is sharded call this at the same time, and run the target if any process
        lacks states.
        """
        keys = [key_of(batch.tokens_BT[row, place]) for row, place in batch.places()]
        missing = any(key not in self.cache for key in keys)
        if missing if self._together is None else any_process(self._together, missing):
            tokens_BT = batch.tokens_BT.to(self.target.device)
            layers = self.cache.layers
            states_BTF, _ = self.target.read(tokens_BT, layers, _on(self.target, batch.positions_BT))
            states_BTLD = states_BTF.unflatten(-1, (len(layers), -1))
            for key, (row, place) in zip(keys, batch.places(), strict=True):
                self.cache.add(key, states_BTLD[row, place])
        return keys


def feature_source(
    accelerator: Accelerator,
    target: Target,
    head: DraftHead,
    provenance: dict[str, Any],
    examples: Sequence[Example],
    config: TrainConfig,
    epochs: float,
) -> OnlineFeatures:
    """Build the source that `features.mode` names.

    `auto` caches states that fit in its limit and are read again, or are there already.
    """
    options = config.features
    tokens = sum(lengths_of(examples))
    gib = cache_bytes(head, options.format) * tokens / 2**30
    # The main process's answer: a folder that another job begins now would divide the processes.
    begun = from_main(accelerator, options.folder is not None and (Path(options.folder) / MANIFEST).exists())
    if options.mode == "online" or (options.mode == "auto" and (gib > options.limit or (epochs <= 1 and not begun))):
        return OnlineFeatures(target, head)
    folder = Path(options.folder or Path(config.output) / "features")
    lacking = gib * 2**30 - file_sizes(folder)
    if accelerator.is_main_process:  # it ends the run for all
        require_free(folder, int(lacking), f"what features.mode {options.mode} keeps of the target's states")
    cache = open_cache(accelerator, head, provenance, options, Path(config.output))
    cached = CachedFeatures(target, head, cache, accelerator)
    gib = cache_bytes(head, options.format, cache.layers) * tokens / 2**30
    log.info(f"the target's states: {gib:.2f} GiB in {cache.folder}")
    if options.from_server is not None:
        if accelerator.is_main_process:
            folder = Path(options.from_server)
            added = take_server_states(cache, target, examples, folder, options.server_layers)
            log.info(f"states of {added} sequences from {folder}")
        cached.settle(accelerator)
    if options.mode == "cached":
        cached.write(accelerator, examples)
    return cached


def open_cache(
    accelerator: Accelerator, head: DraftHead, provenance: dict[str, Any], options: FeaturesConfig, output: Path
) -> FeatureCache:
    """Open a run's cache, created by the main process; one of another model or tokenizer raises a ValueError."""
    model = {name: provenance[name] for name in ("target", "revision", "dtype", "quantization", "weights", "tokenizer")}
    manifest = {
        **model,
        "layers": list(kept_layers(head.feature_layers)),
        "hidden_size": head.target.hidden_size,
        "format": options.format,
    }
    folder = Path(options.folder or output / "features")
    with accelerator.main_process_first():
        if options.repair and accelerator.is_main_process:
            for path in corrupt_shards(folder):
                log.info(f"{path} is corrupt and was removed")
                path.unlink()
        return FeatureCache(folder, manifest)


def cache_bytes(head: DraftHead, storage: str, layers: Sequence[int] = ()) -> int:
    """Bytes that a token's states take on disk in a format; int8 has a float32 scale for each layer.

    `layers` are those that a folder has, if not only what the head reads.
    """
    bytes_per_layer = head.target.hidden_size * FORMATS[storage].itemsize + (4 if storage == "int8" else 0)
    return len(layers or kept_layers(head.feature_layers)) * bytes_per_layer


def target_features(target: Target, batch: Batch, features_BTF: Tensor, last_BTD: Tensor) -> TargetFeatures:
    """Combine a batch with its states, on the target's device."""
    return TargetFeatures(
        features_BTF=features_BTF,
        last_BTD=last_BTD,
        tokens_BT=batch.tokens_BT.to(target.device, non_blocking=True),
        loss_mask_BT=batch.loss_mask_BT,
        modules=target.modules,
        positions_BT=_on(target, batch.positions_BT),
        documents_BT=batch.documents_BT,
    )


def _on(target: Target, tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.to(target.device, non_blocking=True)
