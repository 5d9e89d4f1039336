"""EAGLE: see `head.py`."""

from .config import EagleConfig
from .head import EagleHead

__all__ = ["EagleConfig", "EagleHead"]
