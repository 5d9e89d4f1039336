"""Draft heads, their losses and their checkpoints.

A folder holds all of a head; a new one is such a folder and one row of `by_name.HEADS`.
"""

from .base import (
    CheckpointMetadata,
    DraftHead,
    DraftState,
    HeadOutput,
    TargetFeatures,
    TargetInfo,
    TargetModules,
)
from .by_name import HEADS, build_head
from .checkpoints.save_load import load_head, push_head, save_head
from .dflash import DFlashConfig, DFlashHead
from .dspark import DSparkConfig, DSparkHead
from .eagle import EagleConfig, EagleHead
from .eagle3 import Eagle3Config, Eagle3Head
from .hydra import HydraConfig, HydraHead, HydraPlusPlusConfig, HydraPlusPlusHead
from .medusa import MedusaConfig, MedusaHead
from .mtp import MtpConfig, MtpHead

__all__ = [
    "HEADS",
    "CheckpointMetadata",
    "DFlashConfig",
    "DFlashHead",
    "DSparkConfig",
    "DSparkHead",
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
    "MtpConfig",
    "MtpHead",
    "TargetFeatures",
    "TargetInfo",
    "TargetModules",
    "build_head",
    "load_head",
    "push_head",
    "save_head",
]
