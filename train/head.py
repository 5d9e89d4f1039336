"""The head of a training config, and its objective."""

from __future__ import annotations

import dataclasses

import torch
from transformers import PreTrainedConfig

from ..heads.base import DraftHead, TargetInfo
from ..heads.by_name import HEADS, build_head, build_objective, head_config
from ..heads.layers.target_layer import described
from ..heads.objective import Objective
from ..inference.targets.info import target_info
from ..inference.targets.loading import config_of
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


def check_head(config: TrainConfig) -> None:
    """Refuse a head that does not fit the target by its config file, before weights are read.

    A GGUF file, an encoder-decoder and a config without the dimensions are not checked: loading
    them says what is wrong, if anything.

    Raises:
        ValueError: options are invalid, or do not fit the target.
    """
    try:
        file = config_of(config.target, config.target_revision)
    except ValueError:  # a folder with an adapter alone: loading the target says what it is
        return
    if file is None or getattr(file, "is_encoder_decoder", False):
        return
    text = file.get_text_config()
    if not all(hasattr(text, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")):
        return
    info = target_info(text, config.target, text.vocab_size, text.num_hidden_layers)
    with torch.device("meta"):
        head_of(config, info, text, text.vocab_size)


def objective_of(config: TrainConfig) -> Objective:
    """Return the config's objective; where the config says nothing, the head's own.

    Raises:
        ValueError: the head cannot be trained on this objective.
    """
    name, options = head_options(config)
    return build_objective(name, options, dataclasses.asdict(config.objective))
