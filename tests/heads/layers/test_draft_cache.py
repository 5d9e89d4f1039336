"""The draft's KV cache, and attention over it, against softmax written out."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from headstart.heads.base import DraftTreeState
from headstart.heads.layers import draft_cache
from headstart.heads.layers.draft_cache import DraftCache
from headstart.heads.layers.masked_attention import masked_attention

SIZE, SLOTS = 8, 23


def masked_softmax(
    query: Tensor, key: Tensor, value: Tensor, seen_BNS: Tensor, scale: float
) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query @ key.mT * scale).masked_fill(~seen_BNS[:, None], float("-inf"))
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("few", [1, 6, 256])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("before", [1, 2, 3], ids="repeated {}".format)
def test_masked_queries_find_what_softmax_finds(
    monkeypatch: pytest.MonkeyPatch, few: int, heads: int, groups: int, queries: int, before: int
) -> None:
    """Also where the mask was repeated before, for groups of this size or of another."""
    monkeypatch.setattr(sys.modules[masked_attention.__module__], "FEW", few)
    random = torch.Generator().manual_seed(heads + queries)
    query, key, value = (
        torch.randn(2, *shape, SIZE, generator=random, dtype=torch.float64)
        for shape in ((heads, queries), (groups, SLOTS), (groups, SLOTS))
    )
    seen = torch.rand(2, queries, SLOTS, generator=torch.Generator().manual_seed(1)) < 0.4
    seen[..., 0] = True
    mask = torch.zeros_like(seen, dtype=torch.float64).masked_fill(~seen, -1e300)[:, None]
    mask = mask.repeat(1, 1, before, 1) if before * queries <= few else mask
    found = masked_attention(query, key, value, mask, 0.3)
    torch.testing.assert_close(
        found, masked_softmax(query, key, value, seen, 0.3), rtol=1e-12, atol=1e-12
    )


WINDOW, MOST_NEW = 4, 3


def committed(state: DraftTreeState, tokens: int) -> tuple[DraftTreeState, list[list[int]]]:
    """The state of one row after new tokens, and the positions that each of them sees."""
    positions_1A, kv = state.cache.commit(state.lengths_B, tokens, state.first_B)
    entries = positions_1A.double()[:, None, :, None]  # what lies in a slot is its position
    keys, _ = kv.store(0, entries, entries)
    seen = [keys[0, 0, mask_S, 0].int().sort().values.tolist() for mask_S in kv.mask_BTS[0]]
    return state.committed(torch.zeros(1, tokens, 1), torch.tensor([tokens])), seen


@pytest.mark.parametrize(
    ("lengths", "first"),
    [([10], 7), ([8], 7), ([5], 5), ([9, 8], 7), ([8, 6], 6)],
    ids=["no crop", "within the window", "before it", "twice", "twice, before it"],
)
def test_a_window_shows_no_token_that_was_overwritten_before_a_crop(
    lengths: list[int], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten tokens leave the last three in a ring of six slots; what is lost stays lost."""
    monkeypatch.setattr(draft_cache, "MOST_NEW_TOKENS", MOST_NEW)
    nodes = 2
    slots = nodes + DraftCache.slots_for(100, WINDOW)
    ring = [torch.zeros(1, 1, slots, 1, dtype=torch.float64) for _ in range(2)]
    state = DraftTreeState(
        None,  # type: ignore[arg-type]
        depth=0,
        cache=DraftCache(nodes, ring[:1], ring[1:], window=WINDOW),
        lengths_B=torch.zeros(1, dtype=torch.int64),
        hidden_BWD=torch.zeros(1, 1, 1),
        paths_BWN=torch.zeros(1, 1, nodes, dtype=torch.bool),
        first_B=torch.zeros(1, dtype=torch.int64),
    )
    for tokens in (3, 3, 3, 1):
        state, _ = committed(state, tokens)
    for length in lengths:
        state = state.resume(length, 0)
    _, seen = committed(state, MOST_NEW)
    for position, positions in enumerate(seen, start=lengths[-1]):
        assert positions == list(range(max(first, position - WINDOW + 1), position + 1))
