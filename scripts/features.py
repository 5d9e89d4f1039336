"""Write the target's hidden states to disk for training: `headstart features --config configs/smollm2-eagle3.yaml`.

The options are those of the training run. The target computes the states, or a server does: `features.server` is asked
for them, and `features.from_server` is copied; then no more of the target is loaded than its embedding, final norm and
LM head. Written are the states of the sequences to train on, and those of the evaluation, so that training with
`features.mode stored` needs no target. Started again, the command resumes; under `accelerate launch` the processes
share the work.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headstart.scripts.command_line import options, run
from headstart.train.config import TrainConfig


def main(arguments: list[str]) -> None:
    """Run `headstart features` with these command-line arguments."""
    precompute(options(TrainConfig, "features", __doc__, arguments))


def precompute(config: TrainConfig) -> None:
    """Write the states of all training sequences, and of the evaluation, that the cache lacks."""
    # Not before the options are known to be good.
    from headstart.console import log
    from headstart.train.data.token_cache import lengths_of
    from headstart.train.engines import end_together, resolved, start
    from headstart.train.features.filling import fill_folder
    from headstart.train.features.online import cache_bytes, open_cache
    from headstart.train.loop import load_inputs
    from headstart.train.run_folder import as_begun

    config = as_begun(config)
    accelerator, _ = start(config)
    config = resolved(config, accelerator)
    from_a_server = config.features.server is not None or config.features.from_server is not None
    inputs = load_inputs(config, accelerator, outer=from_a_server)
    cache = open_cache(accelerator, inputs.head, inputs.provenance, config.features, Path(config.output))
    bytes_per_token = cache_bytes(inputs.head, config.features.format, cache.layers)
    total = bytes_per_token * sum(lengths_of(inputs.training))
    layers = ", ".join(map(str, cache.layers))
    log.info(f"{bytes_per_token:,} bytes a token for the layers {layers}: {total / 2**30:.2f} GiB")
    fill_folder(config, accelerator, inputs, cache)
    log.info(f"{cache.folder} holds the states of {len(inputs.training):,} sequences")
    end_together(accelerator)


if __name__ == "__main__":
    run(main, sys.argv[1:])
