"""Runs on the states of a server, and on those that one has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import changed

from headstart.addons.serve.options import ServedFeaturesConfig, ServedTrainConfig, training_source
from headstart.train.config import TrainConfig
from headstart.train.loop import train


@pytest.fixture
def served_run(short: TrainConfig) -> Callable[..., ServedTrainConfig]:
    """Builds the options of a short run by those of its states: `served_run(mode=..., ...)`."""
    head = {"type": "eagle3", "feature_layers": [0, -1], "depth": 3, "train_steps": 2}

    def build(**features: Any) -> ServedTrainConfig:
        given = {"head": head, "features": ServedFeaturesConfig(**features)}
        return ServedTrainConfig(**{**vars(short), **given})

    return build


@pytest.fixture
def train_served() -> Callable[[ServedTrainConfig], Path]:
    """Trains as `headstart train` does; returns the run's folder."""

    def run(config: ServedTrainConfig) -> Path:
        run_config, source = training_source(config)
        return train(run_config, source=source)

    return run


@pytest.fixture
def train_with_target(
    train_served: Callable[[ServedTrainConfig], Path],
) -> Callable[[ServedTrainConfig], Path]:
    """Makes the same run in another folder, with states that the target computes in each step."""

    def run(config: ServedTrainConfig) -> Path:
        return train_served(
            changed(config, output=f"{config.output}-online", features=ServedFeaturesConfig())
        )

    return run
