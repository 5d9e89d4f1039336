"""Options of EAGLE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...options import limited
from ..config import LayersConfig


@dataclass(frozen=True)
class EagleConfig(LayersConfig):
    """Options of an EAGLE head."""

    name: ClassVar[str] = "eagle"
    train_steps: int = limited(1, minimum=1)
    """Steps of training-time test: 1 for true features only, as published; later ones read
    predicted features."""
    attention_bias: bool = False
    """Bias of queries, keys and values, as in Qwen2; servers do not read it."""
    fc_bias: bool = False
    """Bias in `fc`: some published heads have one, vLLM reads none."""
    noise: float = limited(0.1, minimum=0)
    """Maximum of the uniform noise on true features while training, times 512 / the batch's tokens
    per row."""
