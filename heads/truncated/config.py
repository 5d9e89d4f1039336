"""Options of a truncated model."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import LONGEST_DRAFT


@dataclass(frozen=True)
class TruncatedConfig:
    """Options of a truncated draft model."""

    depth: int = 8
    """Maximum draft length: tokens drafted after the root."""
    num_layers: int | None = None
    """Blocks; null for a seventh of the target's."""
    start: str = "first"
    """Starting values: first (the target's first blocks, and its final norm) or random."""

    def __post_init__(self) -> None:
        if self.depth < 1 or (self.num_layers is not None and self.num_layers < 1):
            raise ValueError(
                f"cut needs a depth and num_layers of at least 1, not {self.depth} and"
                f" {self.num_layers}"
            )
        if self.depth > LONGEST_DRAFT:
            raise ValueError(
                f"cut depth {self.depth} is too large: a draft has at most {LONGEST_DRAFT} tokens"
            )
        if self.start not in ("first", "random"):
            raise ValueError(f"cut start must be first or random, not {self.start!r}")
