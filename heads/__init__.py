"""What guesses: draft heads, their losses, their checkpoints. A new head is one file here and one row of `HEADS`."""

from .base import DraftHead, DraftState, HeadOutput, TargetFeatures, TargetInfo, TargetModules
from .eagle import EagleConfig, EagleHead
from .eagle3 import Eagle3Config, Eagle3Head
from .hydra import HydraConfig, HydraHead, HydraPlusPlusConfig, HydraPlusPlusHead
from .medusa import MedusaConfig, MedusaHead
from .truncated import TruncatedConfig, TruncatedHead

HEADS: dict[str, type[DraftHead]] = {
    "cut": TruncatedHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "hydra": HydraHead,
    "hydra++": HydraPlusPlusHead,
    "medusa": MedusaHead,
}
"""The word in a YAML file or a checkpoint, and the head that it means."""

CutConfig, CutHead, TargetEnds = TruncatedConfig, TruncatedHead, TargetModules
"""Earlier names, which keep working."""

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
    "TargetModules",
    "TruncatedConfig",
    "TruncatedHead",
]
