"""An EAGLE-3 head with a sliding window: neither the ring of its cache nor what it leaves out of a
prompt changes a draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import accepted, calls_of, check_identity, generated, head_for, random_ids
from messages import refused

from headstart.heads import DraftHead
from headstart.heads.layers import draft_cache
from headstart.inference import Conversation, SpeculativeLM, Target
from headstart.inference.drafters import draft_model_state
from headstart.inference.drafters.draft_model_state import DraftModelState

VOCAB = 20
WINDOW = 5
SETTINGS: dict[str, Any] = {
    "max_new_tokens": 30,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": [3, 7],
}
CASES = pytest.mark.parametrize(("tree", "slots"), [("chain:3", 2), ("dynamic:9:3:3", None)])
"""Rows of a batch, and rows that take the places of those that have ended."""


def commit_at_most(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Rings of `WINDOW` + tokens - 1 slots."""
    monkeypatch.setattr(draft_cache, "MOST_NEW_TOKENS", tokens)
    monkeypatch.setattr(draft_model_state, "CHUNK_TOKENS", tokens)


def windowed_head(target: Target, window: int | None = WINDOW) -> DraftHead:
    """Two layers that see five tokens each: what the second sees depends on the last nine."""
    options = {"depth": 3, "sliding_window": window, "num_layers": 2}
    return head_for(target, "eagle3", 0.2, seed=2, **options)


PROMPTS = random_ids(VOCAB, 102, seed=1).split((3, 40, 11, 6, 25, 17))
"""Shorter and longer than the window and the ring."""


@CASES
def test_rows_are_generates_and_a_short_ring_accepts_what_a_long_one_does(
    tree, slots, target, monkeypatch
):
    def drafted(lm):
        return accepted(check_identity(lm, PROMPTS, max_batch_size=slots, **SETTINGS))

    found = []
    for tokens in (4, 512):  # of which the first is just what a round commits
        commit_at_most(monkeypatch, tokens)
        lm = SpeculativeLM.from_pretrained(target, windowed_head(target), tree=tree, adaptive=False)
        found.append(drafted(lm))
    assert found[0] == found[1]
    assert max(map(max, found[0])) > 0
    lm = SpeculativeLM.from_pretrained(
        target, windowed_head(target, None), tree=tree, adaptive=False
    )
    assert drafted(lm) != found[0], "the window hides nothing"


def test_a_draft_attends_to_no_more_slots_after_a_longer_text(target, monkeypatch):
    commit_at_most(monkeypatch, 4)
    attended = calls_of(monkeypatch, draft_cache.KVEntries, "attend")
    lm = SpeculativeLM.from_pretrained(
        target, windowed_head(target), tree="chain:3", adaptive=False, compile=False
    )
    for length in (40, 400):
        generated(lm, random_ids(VOCAB, 1, length), max_new_tokens=30)
    nodes = 3
    widest = max(entries.mask_BTS.shape[-1] for entries, *_ in attended)
    assert widest <= nodes + WINDOW + 4 - 1


@CASES
def test_a_head_with_a_window_reads_no_more_than_it_sees(tree, slots, target, monkeypatch):
    """It drafts as after the whole prompt."""
    read = calls_of(monkeypatch, DraftModelState, "read")
    lm = SpeculativeLM.from_pretrained(target, windowed_head(target), tree=tree, adaptive=False)
    assert lm.drafter.model_state.read_last == 9
    drafts = []
    for read_last, least, most in ((9, 1, 10), (None, 11, 99)):
        read.clear()
        lm.drafter.model_state.read_last = read_last
        drafts.append(accepted(check_identity(lm, PROMPTS, max_batch_size=slots, **SETTINGS)))
        tokens = sum(chunk.tokens_BT.numel() for _, chunk in read)
        assert least * len(PROMPTS) <= tokens <= most * len(PROMPTS)
    assert drafts[0] == drafts[1]


def test_conversations_go_on_after_a_prompt_of_which_the_end_was_read(target):
    """Turns that go on, that go back to before what was read, and that go on again."""
    lm = SpeculativeLM.from_pretrained(
        target, windowed_head(target), tree="chain:2", adaptive=False
    )
    past = Conversation()
    text = PROMPTS[1]
    for kept, added in ((40, []), (60, [4, 2]), (10, [7] * 3), (30, [1])):
        row = torch.cat([text[:kept], torch.tensor(added, dtype=torch.int64)])
        settings = {**SETTINGS, "eos_token_id": [], "past_key_values": past}
        text = check_identity(lm, [row], **settings).sequences[0]


@pytest.mark.parametrize("window", [0, 2])
def test_a_window_shorter_than_a_draft_is_refused(window, target):
    with refused("sliding_window", str(window), "depth 3"):
        windowed_head(target, window)
