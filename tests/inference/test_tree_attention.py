"""The attention that the target's layers are given: a model is left as it was, and asked in its own words."""

import threading

import pytest
import torch
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask

from headstart.inference import tree_attention
from headstart.inference.tree_attention import NAME, attending, attention, causal_attention

SIZE, SLOTS = 8, 23


def test_the_model_calls_its_own_function_again_afterwards_also_after_an_error():
    config = LlamaConfig(attn_implementation="sdpa")

    def break_off() -> None:
        with attending(config):
            assert config._attn_implementation == NAME
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        break_off()
    assert config._attn_implementation == "sdpa"


def test_the_shape_is_the_one_that_transformers_expects():
    query, key, value = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2).expand(2, 1, -1, -1)
    with attending(LlamaConfig(attn_implementation="sdpa")):
        causal, _ = attention(torch.nn.Module(), query, key, value, None)
        masked, weights = attention(torch.nn.Module(), query, key, value, seen)
    assert causal.shape == (2, 3, 6, 8) and weights is None
    torch.testing.assert_close(causal, masked)


def test_what_it_does_not_do_is_refused():
    states = torch.randn(1, 2, 3, 8)
    refused = pytest.raises(ValueError, match="Linear asks for softcap: load it with attn_implementation='eager'")
    with attending(LlamaConfig(attn_implementation="sdpa")), refused:
        attention(torch.nn.Linear(1, 1), states, states, states, None, softcap=50.0)


def test_another_threads_forward_is_transformers_own():
    """While one of ours runs: with its mask, which ours does without."""
    config, found = LlamaConfig(attn_implementation="sdpa"), []
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 1, True
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))

    def elsewhere() -> None:
        text = {"config": config, "inputs_embeds": torch.zeros(1, 5, 8), "past_key_values": None, "position_ids": None}
        mask = create_causal_mask(attention_mask=torch.tensor([[0, 0, 1, 1, 1]]), **text)
        found.append(attention(module, query, key, value, mask)[0])
        found.append(sdpa_attention_forward(module, query, key, value, mask)[0])

    with attending(config):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with attending(config):
            assert config._attn_implementation == NAME
        assert config._attn_implementation == NAME
    assert config._attn_implementation == "sdpa"
    assert torch.equal(*found)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("queries", [1, 6, 7, SLOTS - 1, SLOTS])
def test_a_passage_sees_itself_and_all_before_it(monkeypatch, block, heads, groups, queries):
    monkeypatch.setattr(tree_attention, "BLOCK", block)
    tree_attention._lower_right.cache_clear()
    random = torch.Generator().manual_seed(heads + queries)
    query, key, value = (
        torch.randn(2, *shape, SIZE, generator=random, dtype=torch.float64)
        for shape in ((heads, queries), (groups, SLOTS), (groups, SLOTS))
    )
    seen = torch.ones(queries, SLOTS, dtype=torch.bool).tril(SLOTS - queries)
    found = causal_attention(query, key, value, 0.3)
    tree_attention._lower_right.cache_clear()
    key, value = (states.repeat_interleave(heads // groups, 1) for states in (key, value))
    expected = (query @ key.mT * 0.3).masked_fill(~seen, float("-inf")).softmax(-1) @ value
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
