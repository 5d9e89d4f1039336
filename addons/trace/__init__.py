"""Traces of a generation: recorded rounds, the page that plays them, and what they say of the drafts."""

from .page import Trace, trace

__all__ = ["Trace", "trace"]
