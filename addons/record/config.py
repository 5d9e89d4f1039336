"""Options of adapting a head to recorded answers, their defaults and units."""

from __future__ import annotations

from dataclasses import dataclass

from ...options import CommandOptions, limited


@dataclass(frozen=True)
class AdaptConfig(CommandOptions):
    """A head that learns from recorded answers."""

    required = ("target", "head", "recorded", "output")
    most_used = ("target", "head", "recorded", "output", "replay")

    target: str = ""
    """The model whose answers were recorded: a folder, a Hub id, a GGUF file, or package:NAME."""
    head: str = ""
    """The head that drafts now, which the new one replaces if it is better: a checkpoint folder or
    Hub id."""
    recorded: str = ""
    """Folder of recorded answers (`headstart chat --record`, or `record`)."""
    output: str = ""
    """Folder to write: the head, if it is better, to OUTPUT/best. Started again, the command
    resumes."""
    replay: str | None = None
    """Older data to train on as well, so that what the head knew is kept: a folder of an older
    recording, or a file of conversations such as the head was trained on, whose states the target
    then computes; null for nothing."""
    replay_share: float = limited(0.5, above=0, below=1)
    """Share of the training sequences that are taken from `replay`."""
    first: str | None = None
    """The head before all adaptations, part of whose weights stay in the new one; null for what the
    checkpoint of `head` says, if an adaptation here wrote it, and otherwise `head`."""
    first_share: float = limited(0.5, minimum=0, below=1)
    """Share of these weights in the new head, from 0 to 1: the rest are those that were trained. So
    it forgets less, and what one adaptation after another loses of other texts does not add up.
    Lower it where the target has changed since, as a policy does."""
    held_out: float = limited(0.2, above=0, below=1)
    """Share of the answers that both heads are judged on, the newest ones of each kind."""
    steps: int = limited(100, minimum=1)
    """Optimizer steps."""
    batch_size: int = limited(8, minimum=1)
    """Sequences of a step."""
    lr: float = limited(4e-4, above=0)
    """Peak learning rate of AdamW."""
    max_new_tokens: int = limited(64, minimum=2)
    """Tokens of each answer along which the heads draft; shorter ones count if they end by
    themselves."""
