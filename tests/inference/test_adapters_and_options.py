"""Targets as users hold them: with adapters that are switched, and with transformers' own
options."""

from __future__ import annotations

import pytest
import torch
from helpers import check_identity
from messages import refused
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.inference import SpeculativeLM, Target, custom_generate, load_tokenizer
from headstart.inference.engines.attention import NAME

VOCAB = 20
SETTINGS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def adapted(tiny_target):
    """A model with two adapters that say different things."""
    model = tiny_target(vocab_size=VOCAB, dtype=torch.float32, head_dim=16).model
    lora = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    peft_model = get_peft_model(model, lora)
    peft_model.add_adapter("other", lora)
    for name, weight in peft_model.named_parameters():
        if "lora" in name:
            weight.data = torch.randn_like(weight)
    return peft_model.eval()


def the_same(lm):
    return check_identity(lm, [torch.tensor([3, 1, 2])], **SETTINGS).sequences.tolist()


@pytest.mark.parametrize("compile", [False, True])
def test_an_adapter_may_be_switched_at_any_time(adapted, compile):
    lm = SpeculativeLM.from_pretrained(adapted, drafter="prompt-lookup", compile=compile)
    found = [the_same(lm)]
    adapted.set_adapter("other")
    found.append(the_same(lm))
    with adapted.disable_adapter():
        found.append(the_same(lm))
    assert the_same(lm) == found[1]
    assert len(set(map(str, found))) == 3, "adapters change nothing"
    adapted.merge_adapter()
    the_same(lm)
    adapted.unmerge_adapter()
    the_same(lm)


ROWS = torch.tensor([[3, 1, 2, 3, 1], [5, 2, 5, 2, 5]])
ROWS_GIVEN = {"input_ids": ROWS, **SETTINGS}
LORA = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "v_proj"]}
REFUSED = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "activated LoRA": LoraConfig(**LORA, alora_invocation_tokens=[3, 1]),
    "adapters by row": LoraConfig(**LORA, init_lora_weights=False),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_act_on_some_tokens_or_rows_are_refused(tiny_target, kind):
    """By both ways in; peft's own generate, in which that happens, works afterwards."""
    model = get_peft_model(tiny_target(vocab_size=VOCAB).model, REFUSED[kind]).eval()
    more = {"adapter_names": ["default", "__base__"]} if kind == "adapters by row" else {}
    expected = model.generate(**ROWS_GIVEN, **more)
    plain = model.generate(**ROWS_GIVEN)
    method = custom_generate(drafter="prompt-lookup")
    with refused("adapter"):
        model.generate(**ROWS_GIVEN, **more, custom_generate=method)
    if kind != "adapters by row":
        with refused("adapter"):
            SpeculativeLM.from_pretrained(model, drafter="prompt-lookup").generate(**ROWS_GIVEN)
    assert torch.equal(model.generate(**ROWS_GIVEN, **more), expected)
    assert torch.equal(model.generate(**ROWS_GIVEN), plain)
    if kind == "adapters by row":
        assert torch.equal(model.generate(**ROWS_GIVEN, custom_generate=method), plain)


def test_a_compiled_model_is_decoded_as_the_model_that_it_was_made_of(tiny_target):
    model = tiny_target(vocab_size=VOCAB).model
    expected = model.generate(**ROWS_GIVEN)
    compiled = torch.compile(model, backend="eager")
    lm = SpeculativeLM.from_pretrained(compiled, drafter="prompt-lookup")
    assert torch.equal(lm.generate(**ROWS_GIVEN).sequences, expected)


@pytest.mark.parametrize("compile", [False, True])
def test_a_model_that_was_converted_needs_another_decoder(tiny_target, compile):
    model = tiny_target(vocab_size=VOCAB, dtype=torch.float32).model
    method = custom_generate(drafter="prompt-lookup", compile=compile)
    lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup", compile=compile)
    for decoded in (lm.generate(**ROWS_GIVEN).sequences, model.generate(**ROWS_GIVEN)):
        assert torch.equal(decoded, model.generate(**ROWS_GIVEN, custom_generate=method))
    model.double()
    with refused("float32 cpu float64"):
        lm.generate(**ROWS_GIVEN)
    expected = model.generate(**ROWS_GIVEN)
    assert torch.equal(model.generate(**ROWS_GIVEN, custom_generate=method), expected)


@pytest.mark.parametrize("compile", [False, True])
def test_attention_may_be_switched_at_any_time(tiny_target, compile):
    target = tiny_target(vocab_size=VOCAB)
    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", compile=compile)
    for attention in ("sdpa", "eager", "sdpa"):
        target.model.set_attn_implementation(attention)
        expected = target.model.generate(**ROWS_GIVEN)
        assert torch.equal(lm.generate(**ROWS_GIVEN).sequences, expected)
        assert target.engine.model.config._attn_implementation in (attention, NAME)


def test_options_of_from_pretrained_reach_transformers(target_folder, monkeypatch):
    given = {}
    for kind in (AutoConfig, AutoModelForCausalLM):

        def load(*args, original=kind.from_pretrained, name=kind.__name__, **options):
            given.setdefault(name, options)  # transformers asks again itself
            return original(*args, **options)

        monkeypatch.setattr(kind, "from_pretrained", load)
    options = {
        "attn_implementation": "eager",
        "token": "secret",
        "cache_dir": "/tmp/nowhere",
        "trust_remote_code": False,
    }
    lm = SpeculativeLM.from_pretrained(target_folder, **options)
    assert lm.target.model.config._attn_implementation == "eager"
    assert options.items() <= given["AutoModelForCausalLM"].items()
    assert given["AutoConfig"].items() >= {"token": "secret", "cache_dir": "/tmp/nowhere"}.items()
    assert "attn_implementation" not in given["AutoConfig"]
    del given["AutoModelForCausalLM"]
    assert Target.from_pretrained(target_folder, device_map="auto").info.vocab_size == 258
    assert given["AutoModelForCausalLM"]["device_map"] == "auto"
    assert load_tokenizer(target_folder, token="secret", trust_remote_code=False).chat_template


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"attn_implemantation": "eager"},
            "'attn_implemantation' 'attn_implementation'",
        ),
        ({"tre": "chain:3"}, "'tre' 'tree'"),
        ({"heads": "runs/x"}, "'heads' 'head'"),
        ({"torch_dtype": "bfloat16"}, "'torch_dtype' 'dtype'"),
        ({"zzz": 1}, "'zzz' head tree drafter"),
    ],
)
def test_unknown_options_are_refused_before_anything_is_loaded(options, words):
    with refused(words):
        SpeculativeLM.from_pretrained("nowhere/at-all", **options)
