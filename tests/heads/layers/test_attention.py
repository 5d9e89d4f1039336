"""Attention against softmax written out."""

import pytest
import torch

from headstart.heads.layers import attention
from headstart.heads.layers.attention import causal_attention, masked_attention, repeated

SIZE, SLOTS = 8, 23


def written_out(query, key, value, seen_BNS, scale):
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query @ key.mT * scale).masked_fill(~seen_BNS[:, None], float("-inf"))
    return scores.softmax(-1) @ value


def states(heads, groups, queries, slots=SLOTS):
    random = torch.Generator().manual_seed(heads + queries)

    def draw(*shape):
        return torch.randn(*shape, SIZE, generator=random, dtype=torch.float64)

    return draw(2, heads, queries), draw(2, groups, slots), draw(2, groups, slots)


@pytest.mark.parametrize("few", [1, 6, 256])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("before", [1, 2, 3], ids="repeated {}".format)
def test_masked_queries_find_what_softmax_finds(monkeypatch, few, heads, groups, queries, before):
    """Also where the mask was repeated before, for groups of this size or of another."""
    monkeypatch.setattr(attention, "FEW", few)
    query, key, value = states(heads, groups, queries)
    seen = torch.rand(2, queries, SLOTS, generator=torch.Generator().manual_seed(1)) < 0.4
    seen[..., 0] = True
    mask = torch.zeros_like(seen, dtype=torch.float64).masked_fill(~seen, -1e300)[:, None]
    found = masked_attention(query, key, value, repeated(mask, before), 0.3)
    torch.testing.assert_close(found, written_out(query, key, value, seen, 0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("queries", [1, 6, 7, SLOTS - 1, SLOTS])
def test_a_passage_sees_itself_and_all_before_it(monkeypatch, block, heads, groups, queries):
    monkeypatch.setattr(attention, "BLOCK", block)
    attention._lower_right.cache_clear()
    query, key, value = states(heads, groups, queries)
    seen = torch.ones(queries, SLOTS, dtype=torch.bool).tril(SLOTS - queries).expand(2, -1, -1)
    found = causal_attention(query, key, value, 0.3)
    attention._lower_right.cache_clear()
    torch.testing.assert_close(found, written_out(query, key, value, seen, 0.3), rtol=1e-12, atol=1e-12)
