"""Our attention function against softmax written out, and that a model is left as it was."""

import pytest
import torch
from transformers import LlamaConfig

from headstart.inference import attention as module
from headstart.inference.attention import attending, attention

SIZE, SLOTS = 8, 23


def written_out(query, key, value, seen_BNS, scale):
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query @ key.mT * scale).masked_fill(~seen_BNS[:, None], float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def states(heads, groups, queries, slots=SLOTS):
    random = torch.Generator().manual_seed(heads + queries)

    def draw(*shape):
        return torch.randn(*shape, SIZE, generator=random, dtype=torch.float64)

    return draw(2, heads, queries), draw(2, groups, slots), draw(2, groups, slots)


@pytest.mark.parametrize("few", [1, 256], ids=["sdpa's own", "side by side"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("queries", [1, 5])
def test_masked_queries_find_what_softmax_finds(monkeypatch, few, heads, groups, queries):
    monkeypatch.setattr(module, "FEW", few)
    layer = torch.nn.Module()
    layer.num_key_value_groups = heads // groups
    query, key, value = states(heads, groups, queries)
    seen = torch.rand(2, queries, SLOTS, generator=torch.Generator().manual_seed(1)) < 0.4
    seen[..., 0] = True
    mask = torch.zeros_like(seen, dtype=torch.float64).masked_fill(~seen, -1e300)[:, None]
    found, _ = attention(layer, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, written_out(query, key, value, seen, 0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("queries", [1, 6, 7, SLOTS - 1, SLOTS])
def test_a_passage_sees_itself_and_all_before_it(monkeypatch, block, heads, groups, queries):
    monkeypatch.setattr(module, "BLOCK", block)
    module._lower_right.cache_clear()
    query, key, value = states(heads, groups, queries)
    seen = torch.ones(queries, SLOTS, dtype=torch.bool).tril(SLOTS - queries).expand(2, -1, -1)
    found, _ = attention(torch.nn.Module(), query, key, value, None, scaling=0.3)
    module._lower_right.cache_clear()
    torch.testing.assert_close(found, written_out(query, key, value, seen, 0.3), rtol=1e-12, atol=1e-12)


def test_the_model_calls_its_own_function_again_afterwards_also_after_an_error():
    config = LlamaConfig(attn_implementation="sdpa")
    with pytest.raises(RuntimeError, match="broken"), attending(config):
        assert config._attn_implementation == module.NAME
        raise RuntimeError("broken")
    assert config._attn_implementation == "sdpa"
