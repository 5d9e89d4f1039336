"""What a head remembers of the model and the data that it was trained on, and when it says so."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import SpeculativeLM, Target, load_tokenizer, tokenizer_provenance
from headstart.inference.text.chat_template import data_origin, warn_of_other_data
from headstart.scripts.generate import GenerateConfig, stream_answer
from headstart.train.loop import train


@pytest.fixture(scope="module")
def head(run_options, changed, tmp_path_factory):
    config = run_options(tmp_path_factory.mktemp("run"), 2)
    return train(changed(config, data={"thinking": False})) / "last"


def said(load):
    """The words of all warnings of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load()
    return [
        str(warning.message) for warning in caught if "may accept less here" in str(warning.message)
    ]


def copied(taught, folder, change):
    """A fine-tuned copy."""
    model = AutoModelForCausalLM.from_pretrained(taught)
    change(model)
    model.save_pretrained(folder)
    load_tokenizer(taught).save_pretrained(folder)
    return folder


def test_a_head_remembers_its_model_and_how_its_data_became_tokens(head, taught):
    _, metadata = load_head(head)
    tokenizer = load_tokenizer(taught)
    assert metadata.provenance == {
        **Target.from_pretrained(taught, torch.float32).provenance,
        **tokenizer_provenance(tokenizer),
        "thinking": False,
        "template_kwargs": {},
    }
    assert metadata.provenance.keys() == {
        *(
            "target",
            "revision",
            "dtype",
            "quantization",
            "weights",
            "tokenizer",
            "chat_template",
            "thinking",
        ),
        "template_kwargs",
    }
    assert (metadata.provenance["target"], metadata.provenance["dtype"]) == (str(taught), "float32")
    assert all(
        len(metadata.provenance[name]) == 16 for name in ("weights", "tokenizer", "chat_template")
    )


def test_its_own_model_is_no_reason_for_a_warning_wherever_it_lies(head, taught, tmp_path):
    moved = copied(taught, tmp_path / "moved", lambda model: None)
    for place in (taught, moved):
        assert (
            said(lambda place=place: SpeculativeLM.from_pretrained(place, head, torch.float32))
            == []
        )


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_fine_tuned_copy_is_told_by_its_weights(head, taught, tmp_path, name):
    def change(model):
        model.get_parameter(name).data.view(-1)[5] *= 1.02

    other = copied(taught, tmp_path / "tuned", change)
    with pytest.warns(
        UserWarning, match=r"may accept less here: weights '[0-9a-f]+' \(trained against\)"
    ):
        SpeculativeLM.from_pretrained(other, head, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_dtype_is_named_and_nothing_else(head, taught, dtype):
    word = str(dtype).removeprefix("torch.")
    (told,) = said(lambda: SpeculativeLM.from_pretrained(taught, head, dtype))
    assert f"dtype 'float32' (trained against) and '{word}' (in use)" in told


def test_a_head_that_remembers_nothing_is_taken_in_silence(head, taught, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(head, old)
    config = json.loads((old / "config.json").read_text())
    config["headstart"]["origin"] = {}
    (old / "config.json").write_text(json.dumps(config))
    assert said(lambda: SpeculativeLM.from_pretrained(taught, old, torch.bfloat16)) == []


@pytest.mark.parametrize(
    ("change", "thinking", "words"),
    [
        (lambda tokenizer: None, False, None),
        (
            lambda tokenizer: setattr(tokenizer, "chat_template", tokenizer.chat_template + " "),
            False,
            "chat template",
        ),
        (lambda tokenizer: tokenizer.add_tokens(["<|more|>"]), False, "tokenizer"),
        (lambda tokenizer: None, None, "thinking False"),
        (lambda tokenizer: None, True, "thinking False"),
    ],
)
def test_prompts_that_reach_the_model_differently_are_named(head, taught, change, thinking, words):
    tokenizer = load_tokenizer(taught)
    change(tokenizer)
    told = said(lambda: warn_of_other_data(load_head(head)[1].provenance, tokenizer, thinking))
    assert len(told) == (words is not None)
    assert words is None or f"may accept less here: {words} " in told[0]
    assert data_origin(tokenizer, thinking)["thinking"] is thinking


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "an older head"])
def test_further_variables_of_the_template_are_compared(head, taught, recorded):
    tokenizer, trained = load_tokenizer(taught), dict(load_head(head)[1].provenance)
    if not recorded:
        del trained["template_kwargs"]
    assert said(lambda: warn_of_other_data(trained, tokenizer, False, {})) == []
    assert (
        said(lambda: warn_of_other_data(trained, tokenizer, None, {"enable_thinking": False})) == []
    )
    (told,) = said(
        lambda: warn_of_other_data(trained, tokenizer, False, {"reasoning_effort": "high"})
    )
    assert "template kwargs {} (trained against) and {'reasoning_effort': 'high'} (in use)" in told


def test_a_command_says_it_too(head, taught):
    options = GenerateConfig(
        target=str(taught), prompt="hi", head=str(head), max_new_tokens=2, dtype="float32"
    )
    with pytest.warns(UserWarning, match="thinking False"):
        stream_answer(options)
