"""Options of Medusa."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...options import limited
from ..config import HeadConfig


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """Options of a Medusa head."""

    name: ClassVar[str] = "medusa"

    num_heads: int = limited(4, minimum=1)
    """Draft length: tokens drafted after the root, one head each."""
    num_layers: int = limited(1, minimum=1)
    """Residual blocks per head."""
    bias: bool = True
    """Bias in the blocks' linears."""
    lm_head: Literal["own", "shared"] = "own"
    """own: each head trains an LM head, started from the target's; shared: all use the target's,
    frozen, which is not saved but added to a published Medusa checkpoint for vLLM."""
    draft_vocab_size: int | None = None
    """Tokens that own LM heads cover, the most frequent in the training data; null for all of
    them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size is not None and self.lm_head == "shared":
            raise ValueError(
                f"{self.name} draft_vocab_size needs lm_head: own; the shared LM head has all"
                " tokens"
            )
