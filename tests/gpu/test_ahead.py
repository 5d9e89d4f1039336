"""What is launched before the host has read a round's tokens: it changes no text, and a drafter can
take it back."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from helpers import head_for

from headstart.inference import SpeculativeLM
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.drafters.draft_model_state import DraftModelState
from headstart.inference.rounds import loop

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


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_every_step_may_be_observed_twice(on_cpu, recorded, device, monkeypatch, kind):
    """A step that is taken back leaves a drafter as it was: drafts and acceptance are the same."""
    head = copy.deepcopy(head_for(on_cpu, kind)).to(device)
    lm = SpeculativeLM.from_pretrained(recorded, head, tree="dynamic:8:3:2", adaptive=False)
    expected = text_of(lm, device)
    proposed = []
    plain_ahead = DraftModelState.observe_ahead
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
    monkeypatch.setattr(DraftModelState, "observe_ahead", twice)
    assert text_of(lm, device) == expected
    assert calls and all(calls)
    assert proposed == once


class Plain:
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


def adaptive_by_turns(lm: SpeculativeLM) -> AdaptiveDrafter:
    """A drafter that changes between plain steps and two trees, by a clock that it moves itself."""
    seconds = itertools.count()
    [adaptive] = [part for part in lm.drafter.nested() if isinstance(part, AdaptiveDrafter)]
    adaptive.clock = lambda: math.sqrt(next(seconds))  # later steps seem to be faster
    return adaptive


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "temperature": 0.8, "seed": 3},
        {"eos_token_id": 9},
        {"output_scores": True, "return_dict_in_generate": True},
        {"repetition_penalty": 1.3},
    ],
    ids=lambda settings: "-".join(settings) or "greedy",
)
@pytest.mark.parametrize("kind", ["none", "eagle3", "adaptive"])
def test_what_is_launched_ahead_changes_no_text(
    on_cpu, recorded, device, monkeypatch, kind, settings
):
    """Three rows in a batch of two, which end at different rounds: another takes the place of the
    first, and the batch shrinks."""
    prompts = torch.tensor([[5, 6, 7, 5], [9, 8, 7, 6], [1, 2, 3, 4]]).to(device)

    def texts() -> list[list[int]]:
        more = dict(settings)
        torch.manual_seed(more.pop("seed", 0))
        if kind == "none":
            lm = SpeculativeLM(recorded)
        else:
            head = copy.deepcopy(head_for(on_cpu, "eagle3")).to(device)
            adaptive = kind == "adaptive"
            tree = "auto" if adaptive else "dynamic:8:3:2"
            lm = SpeculativeLM.from_pretrained(recorded, head, tree=tree, adaptive=adaptive)
            if adaptive:
                adaptive_by_turns(lm)
        output = lm.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=24,
            max_batch_size=2,
            **{"do_sample": False} | more,
        )
        return output.sequences.tolist()

    plain = Plain(monkeypatch)
    written = texts()
    # Scores that are kept lie where the next forward writes; a head's drafts are drawn with the
    # noise of positions that the host must know first.
    if "output_scores" in settings or (kind == "eagle3" and "do_sample" in settings):
        assert not plain.proposals
    else:
        assert plain.proposals
        assert plain.forwards or kind == "eagle3"
    monkeypatch.setattr(loop, "launch_ahead", nothing_ahead)
    assert written == texts()


def test_a_plain_text_is_read_once(recorded, device, monkeypatch):
    """Of 20 tokens the prompt gives the first, and 19 forwards the others: none is in vain."""
    forwards = []
    forward = type(recorded.engine).forward_tree
    monkeypatch.setattr(
        type(recorded.engine),
        "forward_tree",
        lambda *arguments: forwards.append(0) or forward(*arguments),
    )
    plain = Plain(monkeypatch)
    prompt = PROMPTS[:1].to(device)
    SpeculativeLM(recorded).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False
    )
    assert len(forwards) == 19
    assert plain.forwards == 18
