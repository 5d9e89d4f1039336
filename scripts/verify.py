"""Check a head against its target: `headstart verify HEAD --target MODEL`.

Its tensors and their values, whether it was trained against this target, and what it gets right on a few built-in
prompts beside what a healthy head would; where it gets little right, which misreading would explain it.
"""

from __future__ import annotations

import sys

from headstart.scripts.command import options, run
from headstart.train.commands import VerifyConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse and verify."""
    config = options(VerifyConfig, "verify", __doc__, arguments, first="head")
    from headstart.train.checkup import verify_head  # not before the options are known to be good

    verify_head(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
