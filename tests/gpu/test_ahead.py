"""What is launched before the host has read a round's tokens: it changes no text, and a drafter can
take it back."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import Proposals, calls_of, continued

from headstart.inference import SpeculativeLM
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.drafters.draft_model_state import DraftModelState
from headstart.inference.rounds import loop

pytestmark = pytest.mark.gpu
ROWS = [torch.tensor([5, 6, 7, 5, 6, 7, 5, 6]), torch.tensor([9, 8, 7, 6, 5, 4, 3, 2])]


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_every_step_may_be_observed_twice(lms, monkeypatch, kind):
    """A step that is taken back leaves a drafter as it was: drafts and acceptance are the same."""
    _, lm = lms(kind, tree="dynamic:8:3:2")
    observe_ahead = DraftModelState.observe_ahead
    launched = []

    def twice(self, step):
        observe_ahead(self, step)
        launched.append(self.progress.ahead is not None)
        self.take_back()
        observe_ahead(self, step)

    def answer():
        proposals = Proposals()
        lm.observers[:] = [proposals]
        texts, _ = continued(lm, ROWS, max_new_tokens=40)
        return texts, proposals.drafts

    once = answer()
    monkeypatch.setattr(DraftModelState, "observe_ahead", twice)
    assert answer() == once
    assert launched and all(launched)


class Launched:
    """What is launched ahead, counted."""

    def __init__(self, monkeypatch) -> None:
        self.forwards = 0
        self.proposals = 0
        launch = loop.launch_ahead

        def counted(*arguments):
            ahead = launch(*arguments)
            self.proposals += ahead is not None
            self.forwards += ahead is not None and ahead.output is not None
            return ahead

        monkeypatch.setattr(loop, "launch_ahead", counted)


def nothing_ahead(call, cache, finished):
    """`launch_ahead` as if the host had to read every round first."""
    call.drafter.observe_ahead(loop.shown_to_drafter(call, finished))


def by_turns(lm: SpeculativeLM) -> None:
    """Let adaptive drafting change between plain steps and two trees, by a clock that it moves
    itself."""
    seconds = itertools.count()
    [adaptive] = [part for part in lm.drafter.nested() if isinstance(part, AdaptiveDrafter)]
    adaptive.clock = lambda: math.sqrt(next(seconds))  # later steps seem to be faster


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "temperature": 0.8},
        {"eos_token_id": 9},
        {"output_scores": True, "return_dict_in_generate": True},
        {"repetition_penalty": 1.3},
    ],
    ids=lambda settings: "-".join(settings) or "greedy",
)
@pytest.mark.parametrize("kind", ["none", "eagle3", "adaptive"])
def test_what_is_launched_ahead_changes_no_text(lms, monkeypatch, kind, settings):
    """Three rows in a batch of two, which end at different rounds: another takes the place of the
    first, and the batch shrinks."""
    rows = list(torch.tensor([[5, 6, 7, 5], [9, 8, 7, 6], [1, 2, 3, 4]]))
    options = {
        "none": {},
        "eagle3": {"kind": "eagle3", "tree": "dynamic:8:3:2"},
        "adaptive": {"kind": "eagle3", "adaptive": True},
    }[kind]

    def texts():
        torch.manual_seed(3)
        _, lm = lms(**options)
        if kind == "adaptive":
            by_turns(lm)
        return continued(lm, rows, max_new_tokens=24, max_batch_size=2, **settings)[0]

    launched = Launched(monkeypatch)
    written = texts()
    # Scores that are kept lie where the next forward writes; a head's drafts are drawn with the
    # noise of positions that the host must know first.
    if "output_scores" in settings or (kind == "eagle3" and "do_sample" in settings):
        assert not launched.proposals
    else:
        assert launched.proposals
        assert launched.forwards or kind == "eagle3"
    monkeypatch.setattr(loop, "launch_ahead", nothing_ahead)
    assert written == texts()


def test_a_plain_text_is_read_once(lms, monkeypatch):
    """Of 20 tokens the prompt gives the first, and 19 forwards the others: none is in vain."""
    _, lm = lms()
    forwards = calls_of(monkeypatch, lm.target.engine, "forward_tree")
    launched = Launched(monkeypatch)
    continued(lm, ROWS[:1], max_new_tokens=20)
    assert len(forwards) == 19
    assert launched.forwards == 18
