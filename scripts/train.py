"""Train a draft head: `headstart train --config configs/smollm2-medusa.yaml --optim.lr 1e-3`.

Also `accelerate launch scripts/train.py --config ...`. Started again with the same options, a run
resumes.
"""

from __future__ import annotations

import sys

from headstart.addons.serve.options import ServedTrainConfig, training_source
from headstart.scripts.command_line import options, run


def main(arguments: list[str]) -> None:
    """Run `headstart train` with these command-line arguments."""
    config = options(ServedTrainConfig, "train", __doc__, arguments)
    # A plan is computed instead of training.
    if config.plan is not None:
        from headstart.train.memory_plan import show_plan

        show_plan(config, arguments)
        return
    from headstart.train.loop import train

    run_config, source = training_source(config)
    train(run_config, source=source)


if __name__ == "__main__":
    run(main, sys.argv[1:])
