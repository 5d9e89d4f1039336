"""Medusa: see `head.py`."""

from .config import MedusaConfig
from .head import MedusaHead

__all__ = ["MedusaConfig", "MedusaHead"]
