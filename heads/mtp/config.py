"""Options of multi-token prediction (MTP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...options import limited
from ..base import LONGEST_DRAFT
from ..config import LayersConfig

OF_LLAMA = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
)
"""Options of a layer that is Llama's, and not described by a config of the target."""


@dataclass(frozen=True)
class MtpConfig(LayersConfig):
    """Options of an MTP head."""

    name: ClassVar[str] = "mtp"
    num_layers: int = limited(1, minimum=1)
    """Decoder layers: one for all depths, or as many as the head drafts, one for each depth."""
    depth: int = limited(3, minimum=1, maximum=LONGEST_DRAFT)
    """Maximum draft length: tokens drafted after the root."""
    train_steps: int | None = limited(None, minimum=1)
    """Steps of training-time test; null for 3, or `depth` if that is less."""
    layer: dict[str, Any] | None = None
    """The target's text config with its model_type, which says of what kind the layers are; null
    for the target's own kind in training, and else for Llama's, with the target's dimensions or
    those of the options above."""
    qk_norm: bool = False
    """With `layer` null: norms of queries and keys, which makes it Qwen3's layer."""
    hidden_first: bool = False
    """Join norm_h(h) and norm_e(E) in this order, as MiMo and Inkling do."""
    zero_first: bool = False
    """Read zeros in the place of the embedding that goes with the text's first state, as MiMo
    does."""
    norm_output: bool = True
    """Feed back y, the output after `final_layernorm`; false for the output before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers > 1 and self.depth != self.num_layers:
            raise ValueError(
                "with several layers each drafts one depth, so mtp depth must be num_layers, not"
                f" {self.depth} and {self.num_layers}; one layer drafts to any depth"
            )
        if self.num_layers > 1 and self.train_steps not in (None, self.depth):
            raise ValueError(
                f"mtp train_steps must be the depth {self.depth}, or some layers would not be"
                " trained"
            )
        # `layer` describes a whole layer, and these options another one.
        of_llama = [
            name for name in (*OF_LLAMA, "qk_norm") if getattr(self, name) not in (None, False)
        ]
        if self.layer is not None and of_llama:
            raise ValueError(
                f"mtp layer says of what kind and size the layers are; leave {of_llama[0]} out, or"
                " layer"
            )
