"""Options of Hydra and Hydra++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...options import limited
from ..medusa.config import MedusaConfig


@dataclass(frozen=True)
class HydraConfig(MedusaConfig):
    """Options of a Hydra head: Medusa's, the joining block counting in `num_layers`, and more."""

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
    num_layers: int = limited(4, minimum=1)
    prefix_layer: bool = True
