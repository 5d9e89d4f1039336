"""Publish a head: `headstart push RUN --repo USER/NAME`.

The folder that training wrote is what vLLM and SGLang load; its model card is written for where it goes. A head that
shares the target's LM head gets a copy of it in the file, for servers.
"""

from __future__ import annotations

import sys

from headstart.scripts.command import options, run
from headstart.train.commands import PushConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse and push."""
    config = options(PushConfig, "push", __doc__, arguments, first="run")
    from headstart.train.exchange import push_head  # not before the options are known to be good

    push_head(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
