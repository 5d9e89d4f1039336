"""Train a draft head: `headstart train --config configs/smollm2-medusa.yaml --optim.lr 1e-3`.

Also `accelerate launch scripts/train.py --config ...`. Started again with the same options, a run goes on.
"""

from __future__ import annotations

import sys

from headstart.scripts.command import options, run
from headstart.train.config import TrainConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse and train."""
    config = options(TrainConfig, "train", __doc__, arguments)
    from headstart.train.loop import (
        train,
    )  # torch and transformers load only once the options are known to be good

    train(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
