"""Write the target's hidden states to disk for training: `headstart features --config configs/smollm2-eagle3.yaml`.

The options are those of the training run. Started again, the command resumes; under `accelerate launch` the processes
share the work.
"""

from __future__ import annotations

import sys

from headstart.scripts.command_line import options, run
from headstart.train.config import TrainConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse and write."""
    config = options(TrainConfig, "features", __doc__, arguments)
    from headstart.train.features.precompute import precompute  # not before the options are known to be good

    precompute(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
