"""Store a corpus for retrieval: `headstart datastore --target MODEL --sources FILE.jsonl --output FOLDER`.

Its texts, as tokens of the target, and the order of all their places: `--drafter retrieval:FOLDER` of the other
commands then guesses what followed the newest tokens there, and `ngram:3:FOLDER` counts in it.
"""

from __future__ import annotations

import sys

from headstart.scripts.command import options, run
from headstart.train.commands import DatastoreConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse and build."""
    config = options(DatastoreConfig, "datastore", __doc__, arguments)
    from headstart.train.datastore import build_datastore  # not before the options are known to be good

    build_datastore(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
