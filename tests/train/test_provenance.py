"""What a head remembers of the model and the data that it was trained on, and when it says so."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers import warnings_of
from messages import lacking, warned
from runs import changed
from transformers import AutoModelForCausalLM

from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import SpeculativeLM, Target, load_tokenizer, tokenizer_provenance
from headstart.inference.text.chat_template import data_origin, warn_of_other_data
from headstart.scripts.generate import GenerateConfig, stream_answer
from headstart.train.loop import train


@pytest.fixture(scope="module")
def remembering(run_options, tmp_path_factory):
    """A head of a run without thinking."""
    config = run_options(tmp_path_factory.mktemp("run"), 2)
    return train(changed(config, data={"thinking": False})) / "last"


def told_less(call):
    """Warnings that a head may accept less here."""
    return [message for message in warnings_of(call) if "accept less" in message]


def told_on_loading(target, head, dtype=torch.float32):
    return told_less(lambda: SpeculativeLM.from_pretrained(target, head, dtype))


def fine_tuned(taught, folder, change):
    """A copy of the target with other weights."""
    model = AutoModelForCausalLM.from_pretrained(taught)
    change(model)
    model.save_pretrained(folder)
    load_tokenizer(taught).save_pretrained(folder)
    return folder


def test_a_head_remembers_its_model_and_how_its_data_became_tokens(remembering, taught):
    found = load_head(remembering)[1].provenance
    assert found == {
        **Target.from_pretrained(taught, torch.float32).provenance,
        **tokenizer_provenance(load_tokenizer(taught)),
        "thinking": False,
        "template_kwargs": {},
    }
    model = {"target", "revision", "dtype", "quantization", "weights"}
    assert found.keys() == model | {"tokenizer", "chat_template", "thinking", "template_kwargs"}
    assert (found["target"], found["dtype"]) == (str(taught), "float32")
    assert all(len(found[name]) == 16 for name in ("weights", "tokenizer", "chat_template"))


def test_its_own_model_is_no_reason_for_a_warning_wherever_it_lies(remembering, taught, tmp_path):
    moved = fine_tuned(taught, tmp_path / "moved", lambda model: None)
    assert told_on_loading(taught, remembering) == told_on_loading(moved, remembering) == []


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_fine_tuned_copy_is_told_by_its_weights(remembering, taught, tmp_path, name):
    def change(model):
        model.get_parameter(name).data.view(-1)[5] *= 1.02

    other = fine_tuned(taught, tmp_path / "tuned", change)
    (told,) = told_on_loading(other, remembering)
    own = load_head(remembering)[1].provenance["weights"]
    assert not lacking(told, f"weights '{own}'")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_dtype_is_named_and_nothing_else(remembering, taught, dtype):
    word = str(dtype).removeprefix("torch.")
    (told,) = told_on_loading(taught, remembering, dtype)
    assert not lacking(told, f"dtype 'float32' '{word}'") and "weights" not in told


def test_a_head_that_remembers_nothing_is_taken_in_silence(remembering, taught, tmp_path):
    old = shutil.copytree(remembering, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    config["headstart"]["origin"] = {}
    (old / "config.json").write_text(json.dumps(config))
    assert told_on_loading(taught, old, torch.bfloat16) == []


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
def test_prompts_that_reach_the_model_differently_are_named(
    remembering, taught, change, thinking, words
):
    tokenizer = load_tokenizer(taught)
    change(tokenizer)
    trained = load_head(remembering)[1].provenance
    told = told_less(lambda: warn_of_other_data(trained, tokenizer, thinking))
    assert [lacking(message, words) for message in told] == ([] if words is None else [[]])
    assert data_origin(tokenizer, thinking)["thinking"] is thinking


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "an older head"])
@pytest.mark.parametrize(
    ("thinking", "variables", "words"),
    [
        (False, {}, None),
        (None, {"enable_thinking": False}, None),
        (False, {"reasoning_effort": "high"}, "{} {'reasoning_effort': 'high'}"),
    ],
)
def test_further_variables_of_the_template_are_compared(
    remembering, taught, recorded, thinking, variables, words
):
    tokenizer = load_tokenizer(taught)
    trained = dict(load_head(remembering)[1].provenance)
    if not recorded:
        del trained["template_kwargs"]
    told = told_less(lambda: warn_of_other_data(trained, tokenizer, thinking, variables))
    assert [lacking(message, words) for message in told] == ([] if words is None else [[]])


def test_a_command_says_it_too(remembering, taught):
    options = GenerateConfig(
        str(taught), prompt="hi", head=str(remembering), max_new_tokens=2, dtype="float32"
    )
    with warned("thinking False"):
        stream_answer(options)
