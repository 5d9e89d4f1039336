"""DSpark: see `head.py`."""

from .config import DSparkConfig
from .head import DSparkHead

__all__ = ["DSparkConfig", "DSparkHead"]
