"""Options that heads share, with their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..options import check_values, limited, shown
from .base import LONGEST_DRAFT


@dataclass(frozen=True)
class HeadConfig:
    """Options of a head; a ValueError refuses a value that no head can have."""

    name: ClassVar[str]
    """Of the head, for errors."""

    def __post_init__(self) -> None:
        check_values(self, f"{self.name} ")


@dataclass(frozen=True)
class BlocksConfig(HeadConfig):
    """Options of a head made of decoder layers; null takes the target's own value."""

    num_layers: int = limited(1, minimum=1)
    """Decoder layers; those after the first are Llama blocks."""
    intermediate_size: int | None = limited(None, minimum=1)
    """Width of the MLP."""
    num_attention_heads: int | None = limited(None, minimum=1)
    """Query heads."""
    num_key_value_heads: int | None = limited(None, minimum=1)
    """Key and value heads."""
    head_dim: int | None = limited(None, minimum=1)
    """Width of a head."""
    hidden_act: str | None = None
    """Activation of the MLP."""
    rms_norm_eps: float | None = None
    """Added to the variance in every norm."""
    rope_parameters: dict[str, Any] | None = None
    """Rotary positions, as in a transformers config; null for the target's."""
    start: str | int = "random"
    """Starting values of the decoder layers: random, last (the target's last block), or a block's
    number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.start, str) and self.start not in ("random", "last"):
            raise ValueError(
                f"{self.name} start must be random, last or the number of a block, not"
                f" {shown(self.start)}"
            )


@dataclass(frozen=True)
class LayersConfig(BlocksConfig):
    """Options of a head whose layers read their own outputs."""

    depth: int = limited(5, minimum=1, maximum=LONGEST_DRAFT)
    """Maximum draft length: tokens drafted after the root."""
    train_steps: int | None = limited(None, minimum=1)
    """Steps of training-time test; null for `depth`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_steps is not None and self.train_steps > self.depth:
            raise ValueError(
                f"{self.name} train_steps must be at most the depth {self.depth}, not"
                f" {self.train_steps}"
            )
