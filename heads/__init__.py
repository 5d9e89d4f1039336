"""What guesses: draft heads, their losses, their checkpoints. A new head is one file here and one row of `HEADS`."""

from .base import DraftHead, DraftState, HeadOutput, TargetEnds, TargetFeatures, TargetInfo
from .cut import CutConfig, CutHead
from .eagle import EagleConfig, EagleHead
from .eagle3 import Eagle3Config, Eagle3Head
from .hydra import HydraConfig, HydraHead, HydraPlusPlusConfig, HydraPlusPlusHead
from .medusa import MedusaConfig, MedusaHead

HEADS: dict[str, type[DraftHead]] = {
    "cut": CutHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "hydra": HydraHead,
    "hydra++": HydraPlusPlusHead,
    "medusa": MedusaHead,
}
"""The word in a YAML file or a checkpoint, and the head that it means."""

__all__ = [
    "HEADS",
    "CutConfig",
    "CutHead",
    "DraftHead",
    "DraftState",
    "Eagle3Config",
    "Eagle3Head",
    "EagleConfig",
    "EagleHead",
    "HeadOutput",
    "HydraConfig",
    "HydraHead",
    "HydraPlusPlusConfig",
    "HydraPlusPlusHead",
    "MedusaConfig",
    "MedusaHead",
    "TargetEnds",
    "TargetFeatures",
    "TargetInfo",
]
