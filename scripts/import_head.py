"""Read a head of another project: `headstart import FOLDER_OR_ID --target MODEL --output FOLDER`.

FasterDecoding/Medusa, SafeAILab/EAGLE (1, 2 and 3), Hydra, SpecForge, speculators, ModelOpt, and what vLLM reads; told
apart by their files. What is unknown, missing or contradictory is an error that names it.
"""

from __future__ import annotations

import sys

from headstart.scripts.command import options, run
from headstart.train.commands import ImportConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse and import."""
    config = options(ImportConfig, "import", __doc__, arguments, first="head")
    from headstart.train.exchange import import_foreign  # not before the options are known to be good

    import_foreign(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
