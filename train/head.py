"""The head of a training config, and its objective."""

from __future__ import annotations

import dataclasses

from transformers import PreTrainedConfig

from ..heads.base import DraftHead, TargetInfo
from ..heads.by_name import HEADS, build_head, build_objective, head_config
from ..heads.layers.target_layer import described
from ..heads.objective import Objective
from .config import TrainConfig, head_options


def head_of(
    config: TrainConfig,
    target: TargetInfo,
    target_config: PreTrainedConfig,
    most_tokens: int | None = None,
) -> DraftHead:
    """Return a new head for a target with this text config.

    `most_tokens` is the largest draft vocabulary that the data can fill; None sets no limit.

    Raises:
        ValueError: options are invalid, or do not fit the target.
    """
    name, options = head_options(config)
    # Checks the options as given, before the target completes them.
    given = head_config(name, options)
    size = getattr(given, "draft_vocab_size", None)
    if size is not None and most_tokens is not None:
        options = {**options, "draft_vocab_size": min(size, most_tokens)}
    completed = HEADS[name].options_for(options, described(target_config))
    return build_head(name, completed, target)


def objective_of(config: TrainConfig) -> Objective:
    """Return the config's objective; where the config says nothing, the head's own.

    Raises:
        ValueError: the head cannot be trained on this objective.
    """
    name, options = head_options(config)
    return build_objective(name, options, dataclasses.asdict(config.objective))
