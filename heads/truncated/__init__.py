"""A truncated model: see `head.py`."""

from .config import TruncatedConfig
from .head import TruncatedHead

__all__ = ["TruncatedConfig", "TruncatedHead"]
