"""Multi-token prediction (MTP): see `head.py`."""

from .config import MtpConfig
from .head import MtpHead

__all__ = ["MtpConfig", "MtpHead"]
