"""Options of Hydra and Hydra++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..medusa.config import MedusaConfig


@dataclass(frozen=True)
class HydraConfig(MedusaConfig):
    """Options of a Hydra head: Medusa's, and more.

    The block that joins state and tokens counts in `num_layers`.
    """

    name: ClassVar[str] = "hydra"

    bias: bool = False
    """Bias in the joining blocks' residuals and own LM heads, as in the authors' code."""
    prefix_layer: bool = False
    """A decoder layer of the target's dimensions before the heads, which share it (Hydra++)."""
    prefix_norm: bool = False
    """RMSNorm after the prefix layer, as in the authors' code."""


@dataclass(frozen=True)
class HydraPlusPlusConfig(HydraConfig):
    """Options of a Hydra++ head: Hydra's with other defaults."""

    name: ClassVar[str] = "hydra++"
    num_layers: int = 4
    prefix_layer: bool = True
