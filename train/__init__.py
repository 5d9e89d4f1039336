"""Training of draft heads: conversations, features, the training loop, evaluation.

    from headstart.train import DataConfig, TrainConfig, train

    data = DataConfig(sources=["conversations.jsonl"])
    folder = train(TrainConfig(target="Qwen/Qwen3-8B", output="runs/x", data=data))

Names are imported at their first use: a command that shows its options does not wait for the
training loop.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..extras import named

if TYPE_CHECKING:
    from ..console import show_on_console
    from ..stopping import Stopped
    from .config import (
        AdapterConfig,
        DataConfig,
        EvalConfig,
        FeaturesConfig,
        LoopConfig,
        ObjectiveConfig,
        OptimConfig,
        TrackingConfig,
        TrainConfig,
    )
    from .loop import Callback, train
    from .run_folder import Progress

__all__ = [
    "AdapterConfig",
    "Callback",
    "DataConfig",
    "EvalConfig",
    "FeaturesConfig",
    "LoopConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "Progress",
    "Stopped",
    "TrackingConfig",
    "TrainConfig",
    "show_on_console",
    "train",
]

_MODULES = {
    "Callback": "loop",
    "Stopped": ".stopping",
    "show_on_console": ".console",
    "train": "loop",
    "Progress": "run_folder",
}
"""Where a name is defined, if not in config.py."""


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_MODULES.get(name, 'config')}", __name__)
    except ModuleNotFoundError as error:
        raise named(error, f"{__name__}.{name}") from error
    return getattr(module, name)
