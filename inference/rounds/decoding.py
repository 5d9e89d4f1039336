"""The settings of a call of `generate`, as reading its prompts and its rounds need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..drafters.base import BatchDrafter
from ..engines.target import Target
from ..trees.logits import TreeLogitsProcessor
from ..trees.sampling import Sampler
from .noise import PositionNoise
from .observers import RoundObserver
from .verification import Verification


@dataclass(frozen=True)
class Decoding:
    """Everything that stays the same from a call's first token to its last."""

    target: Target
    verification: Verification
    process_logits: TreeLogitsProcessor
    sampler: Sampler
    """Source of randomness for drafts and for the acceptance rule."""
    noise: PositionNoise | None = None
    """Random numbers that are fixed for each position of each row, whatever was drafted; None where
    the rule draws anew in each round."""
    prompt_inputs: dict[str, Any] | None = None
    """What `model.generate` prepared for a prompt with images; None for text alone."""
    observers: Sequence[RoundObserver] = ()
    """What watches the call."""
    feature_layers: tuple[int, ...] = ()
    """Where observers read features: the layers that the target computes features of, the drafter's
    first. Empty for those of the drafter alone."""

    def layers_for(self, drafter: BatchDrafter) -> tuple[int, ...]:
        """The layers that the target computes features of."""
        return self.feature_layers or drafter.feature_layers

    def adds_layers_to(self, drafter: BatchDrafter) -> bool:
        """Whether observers read layers that the drafter does not."""
        return len(self.feature_layers) > len(drafter.feature_layers)

    def features_for(self, drafter: BatchDrafter, features: Tensor) -> Tensor:
        """The columns of features [..., F] that the drafter asked for: the first ones."""
        if not self.adds_layers_to(drafter):
            return features
        # Every layer has the same width: with layers (1, 12, 20), of which the drafter reads the
        # first two, its features are the first two thirds.
        width = features.shape[-1] // len(self.feature_layers)
        return features[..., : width * len(drafter.feature_layers)].contiguous()
