"""Options of DSpark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...options import limited
from ..base import LONGEST_DRAFT
from ..dflash.config import DFlashConfig


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """Options of a DSpark head; null takes the target's own value."""

    name: ClassVar[str] = "dspark"
    block_size: int = limited(7, minimum=2, maximum=LONGEST_DRAFT)
    """Slots of a block, the root's included."""
    sample_from_anchor: bool = True
    """Whether the root's slot drafts too: block_size drafts instead of one fewer."""
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """How a draft depends on the token before it: vanilla, gated (by the slot's state) or rnn (on
    all before it)."""
    markov_rank: int = limited(256, minimum=1)
    """Width r of that dependence."""
    confidence: bool = True
    """Whether the head estimates its acceptance rate, trained by the loss `confidence`."""
    confidence_with_markov: bool = True
    """Whether the estimate sees the token before the draft."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov == "rnn" and not self.sample_from_anchor:
            raise ValueError(
                "dspark markov rnn needs sample_from_anchor: elsewhere its state begins at the"
                " root's slot"
            )
