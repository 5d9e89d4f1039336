"""Heads that are swapped, and recordings, on an accelerator as on the CPU."""

from __future__ import annotations

import copy
import gc
import json
import weakref

import pytest
import torch
from helpers import Proposals, continued, head_for, pairs

from headstart.addons.record import record
from headstart.files import text_shards
from headstart.inference import RoundObserver, SpeculativeLM, speculative_lm
from headstart.inference.feature_cache import FeatureCache, decoded, key_of, text_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error:.*launched operation by operation"),
]
ROWS = list(torch.tensor([[9, 8, 7, 6, 5], [4, 3, 1, 2, 4], [7, 7, 2, 8, 1]]))
SETTINGS = {"max_new_tokens": 14, "eos_token_id": []}


def shuffled(head):
    """A head of the same shape that drafts otherwise."""
    changed = copy.deepcopy(head)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.copy_(weight[torch.randperm(len(weight))])
    return changed


@pytest.mark.parametrize("tree", ["chain:3", "dynamic:8:3:2"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_a_swapped_head_drafts_as_on_the_cpu(lms, kind, tree):
    """What was recorded with the old head's weights is not replayed."""
    decoders = lms(kind, tree=tree)
    old = copy.deepcopy(decoders[0].head)
    drafted = []
    for head in (old, shuffled(old), old):
        for lm in decoders:
            lm.use_head(copy.deepcopy(head))
        for _ in range(2):  # the second call replays
            answers = []
            for lm in decoders:
                proposals = Proposals()
                lm.observers[:] = [proposals]
                texts, _ = continued(lm, ROWS, **SETTINGS)
                answers.append((texts, proposals.drafts))
            assert answers[0] == answers[1]
            drafted.append(answers[1])
    assert drafted[0] == drafted[1] == drafted[4]
    assert drafted[0] != drafted[2], "the heads draft differently"


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_replaced_head_is_freed(on_cpu, there, head_there, kind):
    """With its caches, those of single calls' trees, and what was recorded of it."""
    old = head_there(kind)
    gone = weakref.ref(old)
    lm = SpeculativeLM.from_pretrained(there, old, tree="chain:3", adaptive=False, compile=True)
    del old
    for tree in (None, "branch:2x2"):
        for _ in range(3):  # the second call records
            continued(lm, ROWS, tree=tree, **SETTINGS)
    assert there.engine.runner.recordings
    lm.use_head(shuffled(head_for(on_cpu, kind)))
    gc.collect()
    assert gone() is None
    continued(lm, ROWS, **SETTINGS)


class DraftersUsed(RoundObserver):
    """Weak references to the drafters of all calls."""

    def __init__(self) -> None:
        self.drafters = []

    def begin(self, call) -> None:
        self.drafters.append(weakref.ref(call.drafter))


def test_trees_of_single_calls_are_freed_with_what_was_recorded_of_them(lms, monkeypatch):
    """All but the ones used last."""
    monkeypatch.setattr(speculative_lm, "KEPT_OF_CALLS", 2)
    _, lm = lms("eagle3", tree="chain:3")
    used = DraftersUsed()
    lm.observers.append(used)
    for tree in ("chain:1", "chain:2", "branch:2x2", "branch:3"):
        for _ in range(3):  # the second call records
            continued(lm, ROWS, tree=tree, **SETTINGS)
    gc.collect()
    assert [drafter() is None for drafter in used.drafters[::3]] == [True, True, False, False]


@pytest.mark.parametrize(
    ("kind", "mode", "slots"), pairs(["medusa", "eagle3"], [False, True], [None, 2])
)
def test_recorded_states_are_those_of_the_cpu(lms, tokenizer, tmp_path, kind, mode, slots):
    here, lm = lms(kind, mode, tree="chain:3")
    expected, _ = continued(SpeculativeLM(here.target), ROWS, **SETTINGS)
    for call in range(2):  # the second replays
        folder = tmp_path / str(call)
        with record(lm, folder, tokenizer=tokenizer, format="float32") as recording:
            texts, _ = continued(lm, ROWS, max_batch_size=slots, **SETTINGS)
        assert texts == expected
        assert recording.written == len(ROWS), recording.summary()
        cache = FeatureCache(folder, json.loads((folder / "manifest.json").read_text()))
        for path in text_shards(folder):
            tokens_T = torch.tensor(text_row(path)["input_ids"])
            states_TLD = decoded(*cache.stored(key_of(tokens_T)))
            expected_1TF, _ = here.target.read(tokens_T[None], cache.layers)
            states_TF = states_TLD.flatten(1)[:-1]
            torch.testing.assert_close(states_TF, expected_1TF[0, :-1].float(), atol=1e-4, rtol=0)
