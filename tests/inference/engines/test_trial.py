"""Before its first token an architecture is tried: faults that no config tells are refused, and
known models pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from helpers import build_model, calls_of, generated, pairs
from messages import refused
from tiny_models import tiny_model
from torch import Tensor

from headstart.inference import SpeculativeLM, Target
from headstart.inference.engines import trial
from headstart.inference.tuning import machine

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("nothing_measured")]
VOCAB = 40
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
PROMPT = torch.tensor([[7, 8, 9, 7, 8]])


def depending_on_text(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose next token depends on its prefix."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1 if parameter.ndim > 1 else parameter.data
    model.generation_config = tf.GenerationConfig(pad_token_id=0)
    return model.to(dtype).eval()


def mistral(window: int | None, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    """A tiny Mistral."""
    config = tf.MistralConfig(**SMALL, head_dim=8, sliding_window=window)
    config._attn_implementation = attention
    return depending_on_text(tf.MistralForCausalLM(config), dtype)


def kept_trials(folder: Path) -> list[str]:
    """The trials in the machine's file."""
    path = folder / "machine.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return [name for entries in found.values() for name in entries if name.startswith("trial")]


FORMATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "attention", "window"), pairs(FORMATS, ["sdpa", "eager"], [None, 3, 12, 300, 1000])
)
def test_known_models_pass_in_every_format(dtype, attention, window):
    Target(mistral(window, dtype, attention)).check_decoding()


def test_an_architecture_is_tried_once_a_machine(nothing_measured, monkeypatch):
    tried = calls_of(monkeypatch, trial, "tree_difference")
    for _ in range(2):
        lm = SpeculativeLM.from_pretrained(mistral(None), drafter="prompt-lookup", compile=False)
        generated(lm, PROMPT, max_new_tokens=4)
    assert len(tried) == len(kept_trials(nothing_measured)) == 1
    machine.in_memory.clear()  # another process
    Target(mistral(None)).check_decoding()
    assert len(tried) == 1
    # What may compute otherwise is tried anew: another config, format, attention, or version.
    Target(mistral(8)).check_decoding()
    Target(mistral(None, torch.float64)).check_decoding()
    Target(mistral(None, attention="eager")).check_decoding()
    monkeypatch.setattr(trial.transformers, "__version__", "5.99.0")
    Target(mistral(None)).check_decoding()
    assert len(tried) == len(kept_trials(nothing_measured)) == 5


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(4, FORMATS[0]), (8, FORMATS[1]), (8, FORMATS[2]), (300, FORMATS[2]), (1000, FORMATS[1])],
)
def test_a_window_that_we_forget_is_refused_however_long_it_is(
    monkeypatch, nothing_measured, window, dtype
):
    """As of a model whose config does not call its layers sliding."""
    target = Target(mistral(window, dtype))
    target.attention_kinds = ("full_attention",)
    monkeypatch.setattr(Target, "kinds", staticmethod(lambda model: ("full_attention",)))
    for _ in range(2):  # a refusal is not kept: it is tried again
        with refused("MistralForCausalLM logits generate transformers"):
            target.check_decoding()
    assert not kept_trials(nothing_measured)


@pytest.mark.parametrize("window", [4, 300])
def test_a_window_that_the_model_lacks_is_refused(window):
    """As Moshi's, which its config has and its mask has not; without a drafter, too."""
    model = build_model(VOCAB, dtype=torch.float32)
    model.config.sliding_window = window
    with refused("LlamaForCausalLM logits generate"):
        Target(model).check_decoding()
    with refused("LlamaForCausalLM logits generate"):
        generated(SpeculativeLM(Target(model)), PROMPT, max_new_tokens=4)


def wrapped_attention(model: Any, change: Any) -> Any:
    """The model with something of each attention's inputs changed."""
    for layer in model.model.layers:
        plain = layer.self_attn.forward

        def changed(*given: Any, plain: Any = plain, **named: Any) -> Any:
            return plain(*given, **change(named))

        layer.self_attn.forward = changed
    return model


def test_positions_by_the_place_in_the_cache_are_refused():
    """As of a model with a bias by the distance of slots."""

    def by_slot(named):
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor):
            place_S = torch.arange(mask.shape[-1], dtype=torch.float32)
            named["attention_mask"] = mask + 0.5 * place_S.sin()[None, None, None]
        return named

    with refused("MistralForCausalLM drafts"):
        Target(wrapped_attention(mistral(None, attention="eager"), by_slot)).check_decoding()


@pytest.mark.parametrize(
    "error", [RuntimeError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError]
)
def test_what_fails_in_the_model_is_a_refusal_by_name(error):
    def fail(named):
        mask = named.get("attention_mask")
        # ours; its own is None or of booleans
        if isinstance(mask, Tensor) and mask.dtype.is_floating_point:
            raise error("the sizes do not match")
        return named

    with refused("MistralForCausalLM sizes", error.__name__):
        Target(wrapped_attention(mistral(None), fail)).check_decoding()


def test_a_model_whose_own_generate_fails_is_told(monkeypatch):
    model = mistral(None)

    def generate(*given, **named):
        raise KeyError("pixel_values")

    monkeypatch.setattr(model, "generate", generate)
    with refused("generate KeyError 'pixel_values'"):
        Target(model).check_decoding()


def test_memory_that_runs_out_is_no_refusal(nothing_measured):
    def run_out(named):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        Target(wrapped_attention(mistral(None), run_out)).check_decoding()
    assert not kept_trials(nothing_measured)


@pytest.mark.parametrize("planted", [0.0, float("nan")])
def test_a_model_that_says_nothing_passes_and_is_not_kept_if_its_logits_are_not_finite(
    nothing_measured, planted
):
    model = mistral(None)
    model.lm_head.weight.data.fill_(planted)
    Target(model).check_decoding()
    assert len(kept_trials(nothing_measured)) == (planted == 0)


def test_the_user_s_model_stays_as_it_is():
    """Windows are shortened in a copy, and the trial runs in eval mode without the caller's random
    numbers."""
    model = mistral(300).train()
    before = model.config.to_dict()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    Target(model).check_decoding()
    assert torch.equal(torch.rand(3), expected)
    assert model.config.to_dict() == before
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("positions", [1, 4, 8, 9, 16, 40])
def test_few_positions_and_few_tokens_are_enough(positions):
    sizes = SMALL | {"max_position_embeddings": positions, "vocab_size": 3}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))
    Target(depending_on_text(model)).check_decoding()


def test_a_model_that_counts_positions_by_its_cache_is_refused(monkeypatch):
    """Where no check by name is made, too."""
    for module in ("targets.info", "targets.target_model"):
        monkeypatch.setattr(f"headstart.inference.{module}.counts_positions", lambda model: "")
    with refused("GPTNeoForCausalLM drafts"):
        Target(tiny_model("gpt_neo", 3.0)).check_decoding()
