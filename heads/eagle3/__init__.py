"""EAGLE-3: see `head.py`."""

from .config import Eagle3Config
from .head import Eagle3Head, FusionLayer

__all__ = ["Eagle3Config", "Eagle3Head", "FusionLayer"]
