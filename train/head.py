"""The head of a training config, and its objective."""

from __future__ import annotations

import dataclasses

from ..heads.base import DraftHead, TargetInfo
from ..heads.by_name import build_head, build_objective
from ..heads.objective import Objective
from .config import TrainConfig, head_options


def head_of(config: TrainConfig, target: TargetInfo) -> DraftHead:
    """A new head; a ValueError for options that are invalid or do not fit the target."""
    name, options = head_options(config)
    return build_head(name, options, target)


def objective_of(config: TrainConfig) -> Objective:
    """The objective: the head's own where the config says nothing; a ValueError if it cannot be trained on it."""
    name, options = head_options(config)
    return build_objective(name, options, dataclasses.asdict(config.objective))
