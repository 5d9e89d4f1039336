"""Options of Medusa."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class MedusaConfig:
    """Options of a Medusa head."""

    name: ClassVar[str] = "medusa"

    num_heads: int = 4
    """Draft length: tokens drafted after the root, one head each."""
    num_layers: int = 1
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
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(
                f"{self.name} needs num_heads and num_layers of at least 1, not {self.num_heads}"
                f" and {self.num_layers}"
            )
        if self.draft_vocab_size is not None and self.lm_head == "shared":
            raise ValueError(
                f"{self.name} draft_vocab_size needs lm_head: own; the shared LM head has all"
                " tokens"
            )
