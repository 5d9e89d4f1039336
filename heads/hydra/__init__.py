"""Hydra and Hydra++: see `head.py`."""

from .config import HydraConfig, HydraPlusPlusConfig
from .head import HydraHead, HydraPlusPlusHead

__all__ = ["HydraConfig", "HydraHead", "HydraPlusPlusConfig", "HydraPlusPlusHead"]
