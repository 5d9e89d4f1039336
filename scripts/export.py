"""Write a head as another project does: `headstart export HEAD --to speculators --output FOLDER`.

vLLM and SGLang read a head as it is: nothing needs to be exported for them.
"""

from __future__ import annotations

import sys

from headstart.scripts.command import options, run
from headstart.train.commands import ExportConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse and export."""
    config = options(ExportConfig, "export", __doc__, arguments, first="head")
    from headstart.train.exchange import export_foreign  # not before the options are known to be good

    export_foreign(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
