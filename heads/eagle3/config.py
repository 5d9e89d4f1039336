"""Options of EAGLE-3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...options import limited
from ..base import LONGEST_DRAFT
from ..config import LayersConfig


@dataclass(frozen=True)
class Eagle3Config(LayersConfig):
    """Options of an EAGLE-3 head; null takes the target's own value."""

    name: ClassVar[str] = "eagle3"
    depth: int = limited(7, minimum=1, maximum=LONGEST_DRAFT)
    attention_bias: bool = False
    """Bias of queries, keys and values, as in Qwen2; servers do not read it."""
    feature_layers: list[int] | None = None
    """Blocks, counted from 0, whose outputs are fused; null for 1, L/2 - 1 and L - 4, of a target
    with fewer than seven blocks the first, a middle one and the last but one."""
    draft_vocab_size: int | None = None
    """Tokens that can be drafted, the most frequent in the training data; null for all."""
    hidden_size: int | None = limited(None, minimum=1)
    """Draft width; where it differs from the target's, the head learns its own embedding."""
    own_embedding: bool = False
    """Learn an own embedding at the target's width too, started from the target's."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, as in Qwen3."""
    fc_norm: bool = False
    """RMSNorm on each fused feature (EAGLE-3.1)."""
    norm_output: bool = False
    """Feed back the normalised output (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """One RMSNorm on all fused features together (speculators); not with fc_norm."""
    norm_before_residual: bool = False
    """Begin the residual stream after `hidden_norm` instead of before it (speculators)."""
    start_lm_head: bool = True
    """Start the LM head and the final norm from the target's."""
    sliding_window: int | None = None
    """Newest positions that drafts see, their own included, so that drafting takes no longer after
    a long text; null for all of the text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None and self.sliding_window < self.depth:
            raise ValueError(
                f"eagle3 sliding_window {self.sliding_window} is shorter than a draft; choose at"
                f" least the depth, {self.depth}, or null for no window"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "eagle3 fc_norm and norm_before_fc are two ways of one thing; choose one"
            )
