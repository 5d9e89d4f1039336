"""DFlash: see `head.py`."""

from .config import DFlashConfig
from .head import DFlashHead

__all__ = ["DFlashConfig", "DFlashHead"]
