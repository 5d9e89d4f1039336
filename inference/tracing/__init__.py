"""Traces of a generation: recorded rounds, the page that plays them, and what they say of the drafts."""

from .trace import Trace

__all__ = ["Trace"]
