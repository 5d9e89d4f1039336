"""The target of tests that need no other one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headstart.inference import Target


@pytest.fixture
def target(tiny_target: Callable[..., Target]) -> Target:
    """A tiny target of 20 tokens."""
    return tiny_target(vocab_size=20)
