"""What guesses: draft heads, their losses, their checkpoints. A new head is one file here and one row of `HEADS`."""

from .base import DraftHead, DraftState, HeadOutput, TargetEnds, TargetFeatures, TargetInfo
from .medusa import MedusaConfig, MedusaHead

HEADS: dict[str, type[DraftHead]] = {"medusa": MedusaHead}
"""The word in a YAML file or a checkpoint, and the head that it means."""

__all__ = [
    "HEADS",
    "DraftHead",
    "DraftState",
    "HeadOutput",
    "MedusaConfig",
    "MedusaHead",
    "TargetEnds",
    "TargetFeatures",
    "TargetInfo",
]
