"""The work of `headstart features`: write the target's states before a training run reads them."""

from __future__ import annotations

from pathlib import Path

from ..config import TrainConfig
from ..console import log
from ..data.token_cache import lengths_of
from ..engines import end_together, resolved, start
from ..loop import load_inputs
from ..run_folder import as_begun
from .online import CachedFeatures, cache_bytes, kept_layers, open_cache


def precompute(config: TrainConfig) -> Path:
    """Write all missing states; return the cache's folder.

    Raises:
        ValueError: invalid options or data, or a cache of other states.
        Stopped: Ctrl-C or SIGTERM, once the computed states have been written.
    """
    config = as_begun(config)
    accelerator, _ = start(config)
    config = resolved(config, accelerator)
    inputs = load_inputs(config, accelerator)
    each = cache_bytes(inputs.target, inputs.head, config)
    total = each * sum(lengths_of(inputs.training))
    layers = ", ".join(map(str, kept_layers(inputs.head.feature_layers)))
    log.info(f"{each:,} bytes a token for the layers {layers}: {total / 2**30:.2f} GiB")
    cache = open_cache(accelerator, inputs.target, inputs.head, inputs.provenance, config)
    CachedFeatures(inputs.target, inputs.head, cache, accelerator).write(accelerator, inputs.training)
    log.info(f"{cache.folder} holds the states of {len(inputs.training):,} sequences")
    end_together(accelerator)
    return cache.folder
