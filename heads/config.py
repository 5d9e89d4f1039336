"""Options that heads made of decoder layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..options import shown
from .base import LONGEST_DRAFT


@dataclass(frozen=True)
class BlocksConfig:
    """Options of a head made of decoder layers; null takes the target's own value."""

    num_layers: int = 1
    """Decoder layers; those after the first are Llama blocks."""
    intermediate_size: int | None = None
    """Width of the MLP."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads."""
    head_dim: int | None = None
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

    def check(self, head: str) -> None:
        """Refuse values that no head of this name can have."""
        if isinstance(self.start, str) and self.start not in ("random", "last"):
            raise ValueError(
                f"{head} start must be random, last or the number of a block, not"
                f" {shown(self.start)}"
            )


@dataclass(frozen=True)
class LayersConfig(BlocksConfig):
    """Options that EAGLE and EAGLE-3 share: their layers read their own outputs."""

    depth: int = 5
    """Maximum draft length: tokens drafted after the root."""
    train_steps: int | None = None
    """Steps of training-time test; null for `depth`."""
    attention_bias: bool = False
    """Bias of queries, keys and values, as in Qwen2; servers do not read it."""

    def check(self, head: str) -> None:
        depth, layers = self.depth, self.num_layers
        if depth < 1 or layers < 1:
            raise ValueError(
                f"{head} needs a depth and num_layers of at least 1, not {depth} and {layers}"
            )
        if depth > LONGEST_DRAFT:
            raise ValueError(
                f"{head} depth {depth} is too large: a draft has at most {LONGEST_DRAFT} tokens"
            )
        if self.train_steps is not None and not 1 <= self.train_steps <= depth:
            raise ValueError(
                f"{head} train_steps must be from 1 to the depth {depth}, not {self.train_steps}"
            )
        super().check(head)
