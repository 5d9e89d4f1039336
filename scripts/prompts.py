"""Make a mix of prompts by kind, for `headstart data` to answer: `headstart prompts --config MIX.yaml`.

Prompts are taken from files, or made from passages in them. Some of each kind are held out to
measure on.
"""

from __future__ import annotations

from headstart.scripts.command_line import options
from headstart.train.config import PromptMixConfig


def main(arguments: list[str]) -> None:
    """Run `headstart prompts` with these command-line arguments."""
    config = options(PromptMixConfig, "prompts", __doc__, arguments)
    from headstart.train.data.prompt_mix import write_prompts  # not before the options are known to be good

    write_prompts(config)
