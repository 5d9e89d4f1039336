"""What a drafter launches before the host has read a step's tokens: the same state, and it can be
taken back."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import head_for

from headstart.inference import SpeculativeLM
from headstart.inference.drafters.model_rows import ModelRows

pytestmark = pytest.mark.gpu
PROMPTS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 3, 2]])


@pytest.fixture
def recorded(there):
    """The target, whose rounds are recorded."""
    there.compile(True)
    yield there
    there.compile(False)


def text_of(lm: SpeculativeLM, device) -> list[list[int]]:
    prompts = PROMPTS.to(device)
    output = lm.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False
    )
    return output.sequences.tolist()


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "cut"])
def test_every_step_may_be_observed_twice(on_cpu, recorded, device, monkeypatch, kind):
    """A step that is taken back leaves a drafter as it was: drafts and acceptance are the same."""
    head = copy.deepcopy(head_for(on_cpu, kind)).to(device)
    lm = SpeculativeLM.from_pretrained(recorded, head, tree="dynamic:8:3:2", fallback=False)
    expected = text_of(lm, device)
    proposed = []
    plain_ahead = ModelRows.observe_ahead
    draft = type(lm.drafter).propose

    def noted(self, roots_B):
        tree = draft(self, roots_B)
        proposed.append(tree.tokens_BN.tolist())
        return tree

    def twice(self, step):
        plain_ahead(self, step)
        calls.append(self.progress.ahead is not None)
        self.take_back()
        plain_ahead(self, step)

    calls: list[bool] = []
    monkeypatch.setattr(type(lm.drafter), "propose", noted)
    assert text_of(lm, device) == expected
    once = proposed.copy()
    proposed.clear()
    monkeypatch.setattr(ModelRows, "observe_ahead", twice)
    assert text_of(lm, device) == expected
    assert calls and all(calls)
    assert proposed == once
