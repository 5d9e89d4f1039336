"""Options of DFlash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...options import limited
from ..base import LONGEST_DRAFT
from ..config import BlocksConfig


@dataclass(frozen=True)
class DFlashConfig(BlocksConfig):
    """Options of a DFlash head; null takes the target's own value."""

    name: ClassVar[str] = "dflash"
    mask_token_id: int | None = None
    """Token that stands for what is to be drafted, which texts should not hold; null for the last
    of the vocabulary."""
    block_size: int = limited(8, minimum=2, maximum=LONGEST_DRAFT)
    """Slots of a block, the root's included."""
    sample_from_anchor: bool = False
    """Whether the root's slot drafts too (DSpark): block_size drafts instead of one fewer."""
    num_layers: int = limited(2, minimum=1)
    """Decoder layers."""
    feature_layers: list[int] | None = None
    """Blocks, counted from 0, whose outputs are the context; null for as many as there are layers,
    spread out."""
    draft_vocab_size: int | None = None
    """Tokens that can be drafted, the most frequent in the training data; null for all, by the
    target's LM head."""
    max_anchors: int = limited(128, minimum=1)
    """Anchors of a sequence at most, in a packed row too, drawn anew in every step; an evaluation
    draws as many, always the same."""
    sliding_window: int | None = limited(None, minimum=1)
    """Tokens of the context, the root left out, that sliding layers see; null for layers that see
    all of it."""
    sliding_layers: list[int] | None = None
    """Layers, counted from 0, with the sliding window; null for all of them if there is one."""
    sliding_causal: bool = True
    """Whether a slot of a sliding layer sees only the slots of its block before it."""
    qk_norm: bool = True
    """RMSNorm on queries and keys, as in Qwen3, which servers expect."""
    start: str | int = "random"
    """Starting values of the decoder layers: random, last (the target's last blocks), or a block's
    number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sliding = self.sliding_layers or []
        in_range = set(sliding) <= set(range(self.num_layers))
        if (self.sliding_window is None and sliding) or not in_range:
            raise ValueError(
                f"{self.name} sliding_layers {sliding} need a sliding_window, and are numbers from"
                f" 0 to {self.num_layers - 1}"
            )
