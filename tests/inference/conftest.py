"""The target and the decoder of tests that need no other ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headstart.inference import SpeculativeLM, Target
from headstart.inference.tuning import machine


@pytest.fixture
def target(tiny_target: Callable[..., Target]) -> Target:
    """A tiny target of 20 tokens."""
    return tiny_target(vocab_size=20)


@pytest.fixture
def lookup(target: Target) -> SpeculativeLM:
    """It, with drafts by prompt lookup."""
    return SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False)


@pytest.fixture
def moved_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of all measurements, in seconds; it stands still."""
    now = [0.0]
    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    return now
