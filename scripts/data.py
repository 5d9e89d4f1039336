"""Make conversations to train on: `headstart data --target MODEL --output FILE.jsonl`.

Without any data set, the model generates prompts after the start of its chat template and then
answers them. With `--prompts FILE` it answers those. Started again with the same options, the
command resumes where it stopped.
"""

from __future__ import annotations

from headstart.scripts.command_line import options
from headstart.train.config import SelfMadeConfig


def main(arguments: list[str]) -> None:
    """Run `headstart data` with these command-line arguments."""
    config = options(SelfMadeConfig, "data", __doc__, arguments)
    from headstart.train.data.self_made import make_conversations  # not before the options are known to be good

    make_conversations(config)
