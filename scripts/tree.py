"""Find a head's draft tree: `headstart tree --target MODEL --head FOLDER --prompts FILE.jsonl`.

The target answers the prompts, which shows how often the head's i-th best token is right at each depth; the tree with
the most expected tokens per second on this machine is saved with the head, and used wherever the tree is `auto`.
"""

from __future__ import annotations

import sys

from headstart.scripts.command import options, run
from headstart.train.commands import TreeConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse, then calibrate or explain."""
    config = options(TreeConfig, "tree", __doc__, arguments)
    # not before the options are known to be good
    from headstart.train.calibrate import calibrate
    from headstart.train.explain import explain_chains

    if config.explain:
        explain_chains(config)
    else:
        calibrate(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
