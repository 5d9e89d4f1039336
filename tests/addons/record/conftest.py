"""Recorded answers, and the adaptation of the head that wrote them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from messages import refused
from recordings import NEW_TOKENS, record_answers

from headstart.addons.record import adapt as adapting
from headstart.addons.record.config import AdaptConfig
from headstart.stopping import Stopped


@pytest.fixture(scope="session")
def begun(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `head`, `recorded` and `older`, which no test changes."""
    return record_answers(taught, tmp_path_factory.mktemp("adapting"))


@pytest.fixture
def config(begun: Path, taught: Path, tmp_path: Path) -> AdaptConfig:
    return AdaptConfig(
        target=str(taught),
        head=str(begun / "head"),
        recorded=str(begun / "recorded"),
        output=str(tmp_path / "new"),
        steps=30,
        batch_size=4,
        lr=1e-2,
        held_out=0.35,
        max_new_tokens=NEW_TOKENS,
    )


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[[AdaptConfig], Path]:
    """Adapts until training would begin; returns the folder of what it would learn and judge by."""

    def stop(_: object) -> None:
        raise Stopped("before training")

    def prepare(config: AdaptConfig) -> Path:
        monkeypatch.setattr(adapting, "train", stop)
        with refused("before training", error=Stopped):
            adapting.adapt(config)
        return Path(config.output) / "recorded"

    return prepare
