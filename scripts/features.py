"""Store the target's hidden states: `headstart features --config configs/smollm2-eagle3.yaml`.

They are written to disk for training.

The options are those of the training run. The target computes the states, or a server does:
`features.server` is asked for them, and `features.from_server` is copied; then no more of the
target is loaded than its embedding, final norm and LM head. Written are the states of the sequences
to train on, and those of the evaluation, so that training with `features.mode stored` needs no
target. Started again, the command resumes; under `accelerate launch` the processes share the work.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.addons.serve.options import ServedTrainConfig, open_server
from headstart.scripts.command_line import options, run
from headstart.train.config import TrainConfig

if TYPE_CHECKING:
    from headstart.train.features.sources import OpenSource


def main(arguments: list[str]) -> None:
    """Run `headstart features` with these command-line arguments."""
    config = options(ServedTrainConfig, "features", __doc__, arguments)
    features = config.features
    if features.server is None and features.from_server is None:
        precompute(config)
    else:
        precompute(config, partial(open_server, features))


def precompute(config: TrainConfig, source: OpenSource | None = None) -> None:
    """Write the states of all training sequences, and of the evaluation, that the cache lacks.

    The target computes them, or `source` opens where they come from.
    """
    # Not before the options are known to be good: these imports take seconds.
    from headstart.console import log
    from headstart.train.data.token_cache import lengths_of
    from headstart.train.engines import check_launch, end_together, resolved, start
    from headstart.train.features.filling import fill_folder
    from headstart.train.features.online import cache_bytes, open_cache
    from headstart.train.inputs import load_inputs
    from headstart.train.run_folder import as_begun

    # 1. Load what a training run with these options would, in the same dtypes.
    config = as_begun(config)
    check_launch(config)
    accelerator, _ = start(config)
    config = resolved(config, accelerator)
    inputs = load_inputs(config, accelerator, outer=source is not None)

    # 2. Write what the folder lacks.
    cache = open_cache(
        accelerator, inputs.head, inputs.provenance, config.features, Path(config.output)
    )
    bytes_per_token = cache_bytes(inputs.head, config.features.format, cache.layers)
    total = bytes_per_token * sum(lengths_of(inputs.training))
    layers = ", ".join(map(str, cache.layers))
    log.info(f"{bytes_per_token:,} bytes a token for the layers {layers}: {total / 2**30:.2f} GiB")
    fill_folder(config, accelerator, inputs, cache, source)
    log.info(f"{cache.folder} holds the states of {len(inputs.training):,} sequences")
    end_together(accelerator)


if __name__ == "__main__":
    run(main, sys.argv[1:])
