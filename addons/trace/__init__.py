"""Traces of a generation: recorded rounds, a page that plays them, and a report on the drafts."""

from .page import Trace, trace

__all__ = ["Trace", "trace"]
