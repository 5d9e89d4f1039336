"""The target and the decoder of tests that need no other ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headstart.inference import SpeculativeLM, Target


@pytest.fixture
def target(tiny_target: Callable[..., Target]) -> Target:
    """A tiny target of 20 tokens."""
    return tiny_target(vocab_size=20)


@pytest.fixture
def lookup(target: Target) -> SpeculativeLM:
    """It, with drafts by prompt lookup."""
    return SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False)
