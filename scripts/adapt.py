"""Adapt a head to recordings: `headstart adapt --target T --head H --recorded FOLDER --output NEW`.

The head is trained on from its weights, on the states that were recorded. Then both heads draft
along the newest answers, which were held out: the new one is taken, as NEW/best, only if its
acceptance length is significantly longer, its predicted speed is higher, and no kind of prompt got
worse. Started again, the command resumes.
"""

from __future__ import annotations

from headstart.addons.record.config import AdaptConfig
from headstart.scripts.command_line import options


def main(arguments: list[str]) -> None:
    """Run `headstart adapt` with these command-line arguments."""
    config = options(AdaptConfig, "adapt", __doc__, arguments)
    from headstart.addons.record.adapt import adapt  # not before the options are known to be good

    adapt(config)
