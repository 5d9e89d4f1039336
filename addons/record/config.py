"""Options of adapting a head to recorded answers, their defaults and units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...options import CommandOptions


@dataclass(frozen=True)
class AdaptConfig(CommandOptions):
    """A head that learns from recorded answers."""

    required = ("target", "head", "recorded", "output")
    most_used = ("target", "head", "recorded", "output", "replay")
    minimum: ClassVar[dict[str, float]] = {"steps": 1, "batch_size": 1, "new_tokens": 2}

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
    replay_share: float = 0.5
    """Share of the training sequences that are taken from `replay`."""
    first: str | None = None
    """The head before all adaptations, part of whose weights stay in the new one; null for what the
    checkpoint of `head` says, if an adaptation here wrote it, and otherwise `head`."""
    first_share: float = 0.5
    """Share of these weights in the new head, from 0 to 1: the rest are those that were trained. So
    it forgets less, and what one adaptation after another loses of other texts does not add up.
    Lower it where the target has changed since, as a policy does."""
    held_out: float = 0.2
    """Share of the answers that both heads are judged on, the newest ones of each kind."""
    steps: int = 100
    """Optimizer steps."""
    batch_size: int = 8
    """Sequences of a step."""
    lr: float = 4e-4
    """Peak learning rate of AdamW."""
    new_tokens: int = 64
    """Tokens of each answer along which the heads draft; shorter ones count if they end by
    themselves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("replay_share", "held_out"):
            share = getattr(self, name)
            if not 0 < share < 1:
                raise ValueError(f"{name} is a share between 0 and 1, not {share}")
        if not 0 <= self.first_share < 1:
            raise ValueError(f"first_share is a share from 0 to below 1, not {self.first_share}")
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, not {self.lr}")
