"""The attention that the target's layers are given: a model is left as it was, and asked in its own words."""

import pytest
import torch
from transformers import LlamaConfig

from headstart.inference.attention import NAME, attending, attention


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
    causal, _ = attention(torch.nn.Module(), query, key, value, None)
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2).expand(2, 1, -1, -1)
    masked, weights = attention(torch.nn.Module(), query, key, value, seen)
    assert causal.shape == (2, 3, 6, 8) and weights is None
    torch.testing.assert_close(causal, masked)


def test_what_it_does_not_do_is_refused():
    states = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="Linear asks for softcap: load it with attn_implementation='eager'"):
        attention(torch.nn.Linear(1, 1), states, states, states, None, softcap=50.0)
