"""What several tests of drafters need: a head, and a clock that forwards move."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import head_for

from headstart.heads import DraftHead
from headstart.inference import Target
from headstart.inference.drafters.draft_model_state import DraftModelState

STEP = 1.0
NODE = 0.1


class Clock:
    """A forward takes a step, and a tenth of one for each node beyond the first; a token that a
    head reads takes `reading`."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.reading = 0.0
        self.read = 0
        for name in ("forward_tree", "forward_nodes"):
            monkeypatch.setattr(target.engine, name, self.slowed(getattr(target.engine, name)))
        read = DraftModelState.read

        def reads(state: DraftModelState, chunk: Any) -> None:
            self.read += chunk.tokens_BT.numel()
            self.now += self.reading * chunk.tokens_BT.numel()
            read(state, chunk)

        monkeypatch.setattr(DraftModelState, "read", reads)

    def slowed(self, forward: Any) -> Any:
        def wrapped(nodes: Any, *rest: Any) -> Any:
            self.now += STEP + NODE * (nodes.tokens_BN.shape[1] - 1)
            return forward(nodes, *rest)

        return wrapped

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(target: Target, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(target, monkeypatch)


@pytest.fixture
def medusa_head(target: Target) -> DraftHead:
    return head_for(target, "medusa", num_heads=3)
