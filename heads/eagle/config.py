"""Options of EAGLE."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import LayersConfig


@dataclass(frozen=True)
class EagleConfig(LayersConfig):
    """Options of an EAGLE head."""

    train_steps: int = 1
    """Steps of training-time test: 1 for true features only, as published; later ones read
    predicted features."""
    fc_bias: bool = False
    """Bias in `fc`: some published heads have one, vLLM reads none."""
    noise: float = 0.1
    """Maximum of the uniform noise on true features while training, times 512 / the batch's tokens
    per row."""

    def __post_init__(self) -> None:
        self.check("eagle")
        if self.noise < 0:
            raise ValueError(f"eagle noise must be at least 0, not {self.noise}")
