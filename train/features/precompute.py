"""The target's states, written before a training run that reads them."""

from __future__ import annotations

from pathlib import Path

from ..config import TrainConfig
from ..console import log
from ..data.token_cache import lengths_of
from ..engines import end_together, start
from ..precision import as_begun, resolved
from ..setup import set_up, split_as_begun
from .online import CachedFeatures, cache_bytes, kept_layers, open_cache


def precompute(config: TrainConfig) -> Path:
    """Write all that is missing; return the cache's folder.

    Raises:
        ValueError: anything wrong with the options, the data, or the cache that is there.
        Stopped: Ctrl-C or SIGTERM, once what was computed has been written.
    """
    config = split_as_begun(as_begun(config))
    accelerator, _ = start(config)
    config = resolved(config, accelerator)
    setup = set_up(config, accelerator)
    each = cache_bytes(setup.target, setup.head, config)
    total = each * sum(lengths_of(setup.training))
    layers = ", ".join(map(str, kept_layers(setup.head.feature_layers)))
    log.info(f"{each:,} bytes a token for the layers {layers}: {total / 2**30:.2f} GiB")
    cache = open_cache(accelerator, setup.target, setup.head, setup.provenance, config)
    CachedFeatures(setup.target, setup.head, cache, accelerator).write(accelerator, setup.training)
    log.info(f"{cache.folder} holds the states of {len(setup.training):,} sequences")
    end_together(accelerator)
    return cache.folder
