"""Make conversations to train on: `headstart data --target MODEL --output FILE.jsonl`.

With no data set at all: the model writes prompts from its own cut chat template and then answers them. With
`--prompts FILE` it answers those. Started again with the same options, the command goes on where it stopped.
"""

from __future__ import annotations

import sys

from headstart.scripts.command import options, run
from headstart.train.commands import SelfMadeConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse and make conversations."""
    config = options(SelfMadeConfig, "data", __doc__, arguments)
    from headstart.train.data.self_made import make_conversations  # not before the options are known to be good

    make_conversations(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
