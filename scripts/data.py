"""Make conversations to train on: `headstart data --target MODEL --output FILE.jsonl`.

Without any data set, the model generates prompts after the start of its chat template and then
answers them. With `--prompts FILE` it answers those. Started again with the same options, the
command resumes where it stopped.
"""

from __future__ import annotations

from headstart.addons.serve.options import AnswersConfig, without_servers
from headstart.scripts.command_line import options
from headstart.train.config import SelfMadeConfig


def main(arguments: list[str]) -> None:
    """Run `headstart data` with these command-line arguments."""
    config = options(AnswersConfig, "data", __doc__, arguments)
    if config.server is not None:
        from headstart.addons.serve.answers import ask_servers

        ask_servers(config)
        return
    # Not before the options are known to be good.
    from headstart.train.data.self_made import make_conversations

    make_conversations(without_servers(config, SelfMadeConfig))
