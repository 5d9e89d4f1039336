"""An EAGLE-3 head with a sliding window: greedy text is the target's, and the ring of its cache
changes no draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import check_identity, head_for
from torch import Tensor

from headstart.heads import DraftHead
from headstart.heads.layers import draft_cache
from headstart.inference import SpeculativeLM, Target
from headstart.inference.drafters import model_rows

VOCAB = 20
WINDOW = 5
SETTINGS: dict[str, Any] = {
    "max_new_tokens": 30,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": [3, 7],
}
TREES = ["chain:3", "dynamic:9:3:3"]


@pytest.fixture
def target(tiny_target: Any) -> Target:
    return tiny_target(vocab_size=VOCAB)


def commit_at_most(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Rings of `WINDOW` + tokens - 1 slots."""
    monkeypatch.setattr(draft_cache, "MOST_NEW_TOKENS", tokens)
    monkeypatch.setattr(model_rows, "CHUNK_TOKENS", tokens)


def a_head(target: Target, window: int | None = WINDOW) -> DraftHead:
    options = {"depth": 3, "sliding_window": window, "num_layers": 2}
    return head_for(target, "eagle3", 0.2, seed=2, **options)


def prompts() -> list[Tensor]:
    """Shorter and longer than the window and the ring."""
    random = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=random) for length in (3, 40, 11, 6, 25, 17)]


def accepted(lm: SpeculativeLM, slots: int | None) -> list[list[int]]:
    """How many drafts each round accepted, of each row."""
    output = check_identity(lm, prompts(), max_batch_size=slots, **SETTINGS)
    return [[record.accepted for record in row] for row in output.stats.rows]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("slots", [None, 2])
def test_rows_are_generates_and_a_short_ring_accepts_what_a_long_one_does(
    tree: str, slots: int | None, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch, and where waiting rows take the places of those that have ended."""
    found = []
    for tokens in (4, 512):  # of which the first is just what a round commits
        commit_at_most(monkeypatch, tokens)
        lm = SpeculativeLM.from_pretrained(target, a_head(target), tree=tree, adaptive=False)
        found.append(accepted(lm, slots))
    assert found[0] == found[1]
    assert max(map(max, found[0])) > 0
    lm = SpeculativeLM.from_pretrained(target, a_head(target, None), tree=tree, adaptive=False)
    assert accepted(lm, slots) != found[0], "the window hides nothing"


def test_a_draft_attends_to_no_more_slots_after_a_longer_text(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_at_most(monkeypatch, 4)
    widest: list[int] = []
    attend = draft_cache.KVEntries.attend

    def watched(kv: draft_cache.KVEntries, *given: Any) -> Tensor:
        widest.append(kv.mask_BTS.shape[-1])
        return attend(kv, *given)

    monkeypatch.setattr(draft_cache.KVEntries, "attend", watched)
    lm = SpeculativeLM.from_pretrained(
        target, a_head(target), tree="chain:3", adaptive=False, compile=False
    )
    for length in (40, 400):
        text = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
        lm.generate(text, attention_mask=torch.ones_like(text), **SETTINGS)
    nodes = 3
    assert max(widest) <= nodes + WINDOW + 4 - 1


@pytest.mark.parametrize("window", [0, 2])
def test_a_window_shorter_than_a_draft_is_refused(window: int, target: Target) -> None:
    with pytest.raises(
        ValueError,
        match=rf"sliding_window {window} is shorter than a draft; choose at least the depth, 3",
    ):
        a_head(target, window)
