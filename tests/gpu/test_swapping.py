"""Heads that are swapped, and recordings, on an accelerator as on the CPU."""

from __future__ import annotations

import copy
import gc
import json
import weakref

import pytest
import torch
from helpers import head_for, pairs

from headstart.addons.record import record
from headstart.files import text_shards
from headstart.inference import RoundObserver, SpeculativeLM, speculative_lm
from headstart.inference.feature_cache import FeatureCache, decoded, key_of, text_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error:.*launched operation by operation"),
]
PROMPTS = torch.tensor([[9, 8, 7, 6, 5], [4, 3, 1, 2, 4], [7, 7, 2, 8, 1]])
SETTINGS = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}


def swapped_text(lm, prompts, **settings):
    prompts = prompts.to(lm.target.device)
    return lm.generate(prompts, attention_mask=torch.ones_like(prompts), **SETTINGS, **settings)


class Proposals(RoundObserver):
    """The tokens of all trees."""

    def __init__(self) -> None:
        self.drafts = []

    def round(self, finished) -> None:
        self.drafts.append(finished.proposed.tokens_BN.tolist())


def drafts_of(lm):
    """The output of a generation, and the tokens of all of its trees."""
    proposals = Proposals()
    lm.observers.append(proposals)
    output = swapped_text(lm, PROMPTS)
    lm.observers.remove(proposals)
    return output, proposals.drafts


def other(head):
    """A head of the same shape that drafts otherwise."""
    changed = copy.deepcopy(head)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.copy_(weight[torch.randperm(len(weight))])
    return changed


@pytest.mark.parametrize("tree", ["chain:3", "dynamic:8:3:2"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_a_swapped_head_drafts_as_on_the_cpu(on_cpu, there, kind, tree):
    """What was recorded with the old head's weights is not replayed."""
    old = head_for(on_cpu, kind)
    new = other(old)
    lms = []
    for target in (on_cpu, there):
        own = copy.deepcopy(old).to(target.device)
        mode = target is there
        lms.append(
            SpeculativeLM.from_pretrained(target, own, tree=tree, adaptive=False, compile=mode)
        )
    drafted = []
    for heads in ((None, None), (new, copy.deepcopy(new)), (old, copy.deepcopy(old))):
        for _ in range(2):  # the second call replays
            both = []
            for lm, head in zip(lms, heads, strict=True):
                if head is not None:
                    lm.use_head(head)
                output, drafts = drafts_of(lm)
                both.append((output.sequences.tolist(), drafts))
            here, away = both
            assert away == here
            drafted.append(away)
    assert drafted[0] == drafted[1] == drafted[4]
    assert drafted[0] != drafted[2], "the heads draft differently"
    there.compile(False)


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_replaced_head_is_freed(on_cpu, there, device, kind):
    """With its caches, those of single calls' trees, and what was recorded of it."""
    new = other(head_for(on_cpu, kind))
    old = copy.deepcopy(head_for(on_cpu, kind)).to(device)
    replaced = weakref.ref(old)
    lm = SpeculativeLM.from_pretrained(there, old, tree="chain:3", adaptive=False, compile=True)
    del old
    for tree in (None, "branch:2x2"):
        for _ in range(3):  # the second call records
            swapped_text(lm, PROMPTS, tree=tree)
    assert there.engine.runner.recordings
    lm.use_head(new)
    gc.collect()
    assert replaced() is None
    swapped_text(lm, PROMPTS)
    there.compile(False)


class DraftersUsed(RoundObserver):
    """Weak references to the drafters of all calls."""

    def __init__(self) -> None:
        self.drafters = []

    def begin(self, call) -> None:
        self.drafters.append(weakref.ref(call.drafter))


def test_trees_of_single_calls_are_freed_with_what_was_recorded_of_them(
    on_cpu, there, device, monkeypatch
):
    """All but the ones used last."""
    monkeypatch.setattr(speculative_lm, "KEPT_OF_CALLS", 2)
    head = copy.deepcopy(head_for(on_cpu, "eagle3")).to(device)
    lm = SpeculativeLM.from_pretrained(there, head, tree="chain:3", adaptive=False, compile=True)
    used = DraftersUsed()
    lm.observers.append(used)
    for tree in ("chain:1", "chain:2", "branch:2x2", "branch:3"):
        for _ in range(3):  # the second call records
            swapped_text(lm, PROMPTS, tree=tree)
    gc.collect()
    assert [drafter() is None for drafter in used.drafters[::3]] == [True, True, False, False]
    there.compile(False)


@pytest.mark.parametrize(
    ("kind", "mode", "slots"), pairs(["medusa", "eagle3"], [False, True], [None, 2])
)
def test_recorded_states_are_those_of_the_cpu(
    on_cpu, there, device, tokenizer, tmp_path, kind, mode, slots
):
    head = head_for(on_cpu, kind)
    expected = swapped_text(SpeculativeLM(on_cpu), PROMPTS).sequences
    lm = SpeculativeLM.from_pretrained(
        there, head.to(device), tree="chain:3", adaptive=False, compile=mode
    )
    for call in range(2):  # the second replays
        folder = tmp_path / str(call)
        with record(lm, folder, tokenizer=tokenizer, format="float32") as recording:
            found = swapped_text(lm, PROMPTS, max_batch_size=slots)
        assert torch.equal(found.sequences.cpu(), expected)
        assert recording.written == len(PROMPTS), recording.summary()
        cache = FeatureCache(folder, json.loads((folder / "manifest.json").read_text()))
        for path in text_shards(folder):
            tokens_T = torch.tensor(text_row(path)["input_ids"])
            states_TLD = decoded(*cache.stored(key_of(tokens_T)))
            expected_1TF, _ = on_cpu.read(tokens_T[None], cache.layers)
            found_TF = states_TLD.flatten(1)[:-1]
            torch.testing.assert_close(found_TF, expected_1TF[0, :-1].float(), atol=1e-4, rtol=0)
    there.compile(False)
