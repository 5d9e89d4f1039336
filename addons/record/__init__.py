"""Recorded answers with the target's states, and heads that are adapted to them.

    from headstart.addons.record import record

    with record(lm, "recorded") as recording:
        lm.generate(...)
    print(recording.summary())

Names are imported at their first use: `headstart adapt --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .recording import Recording, record

__all__ = ["Recording", "record"]


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".recording", __name__), name)
