"""Weights that change while answers are recorded: a folder holds the states of one model alone."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from changed_weights import PLAIN, ROW, WRITES, mistral_text, tiny_mistral, with_eagle3
from helpers import EachRound
from messages import refused, warned
from peft import LoraConfig, get_peft_model
from recordings import check_states

from headstart.addons.record import record
from headstart.addons.record.recording import OTHER_WEIGHTS
from headstart.files import text_shards
from headstart.inference.feature_cache import text_row


def recorded_texts(folder, target):
    """The texts of a recording, whose states are those of the target as it is now."""
    return [row["input_ids"] for row in check_states(target, folder, atol=2e-4, rtol=1e-4)]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_recording_takes_no_answers_of_other_weights(write, compile, tokenizer, tmp_path):
    """And a folder that is begun anew takes those of the new ones alone."""
    model = tiny_mistral()
    lm = with_eagle3(model, compile)
    assert lm.target.compiled == compile
    with record(lm, tmp_path / "old", format="float32", tokenizer=tokenizer) as old:
        before = lm.generate(ROW, **PLAIN).sequences
        old_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        torch.manual_seed(2)
        with torch.no_grad():
            WRITES[write](model, tiny_mistral(seed=7))
        with warned(f"weights recorded {str(tmp_path / 'old')!r}"):
            after = lm.generate(ROW, **PLAIN).sequences
        with warnings.catch_warnings(action="error"):  # it was said once
            lm.generate(torch.cat([ROW, ROW]), **PLAIN)
    assert not torch.equal(after, before) and torch.equal(after, mistral_text(model))
    assert (old.written, dict(old.skipped)) == (1, {OTHER_WEIGHTS: 3})
    with refused("weights folder"):
        record(lm, tmp_path / "old", format="float32", tokenizer=tokenizer)
    with record(lm, tmp_path / "new", format="float32", tokenizer=tokenizer) as new:
        lm.generate(ROW, **PLAIN)
    assert (new.written, dict(new.skipped)) == (1, {})
    assert recorded_texts(tmp_path / "new", lm.target) == after.tolist()
    model.load_state_dict(old_weights)
    assert recorded_texts(tmp_path / "old", lm.target) == before.tolist()


def answer_otherwise(lm, peft_model, change):
    """An answer with the adapter switched off, merged, or another one."""
    if change == "switched off":
        with peft_model.disable_adapter():
            return lm.generate(ROW, **PLAIN).sequences
    if change == "merged":
        peft_model.merge_adapter()
        return lm.generate(ROW, **PLAIN).sequences
    peft_model.set_adapter("other")
    answer = lm.generate(ROW, **PLAIN).sequences
    peft_model.set_adapter("default")
    return answer


@pytest.mark.parametrize("compile", [False, True])
def test_a_recording_may_begin_right_after_weights_have_changed(compile, tokenizer, tmp_path):
    """Before kernels have copied them."""
    model = tiny_mistral()
    lm = with_eagle3(model, compile)
    lm.generate(ROW, **PLAIN)
    model.load_state_dict(tiny_mistral(seed=7).state_dict())
    with record(lm, tmp_path, format="float32", tokenizer=tokenizer) as running:
        answer = lm.generate(ROW, **PLAIN).sequences
    assert running.written == 1 and not running.skipped
    assert recorded_texts(tmp_path, lm.target) == answer.tolist()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("change", ["switched off", "merged", "another"])
def test_a_recording_takes_no_answers_of_another_adapter(change, compile, tokenizer, tmp_path):
    torch.manual_seed(3)
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft_model = get_peft_model(tiny_mistral(), lora)
    peft_model.add_adapter("other", lora)
    for name, weight in peft_model.named_parameters():
        if "lora" in name:
            weight.data = torch.randn_like(weight)
    lm = with_eagle3(peft_model.eval(), compile)
    with record(lm, tmp_path, format="float32", tokenizer=tokenizer) as running:
        first = lm.generate(ROW, **PLAIN).sequences
        with warned("weights recorded"):
            second = answer_otherwise(lm, peft_model, change)
        if change != "merged":  # unmerging leaves rounding errors
            assert not torch.equal(first, second)
            lm.generate(ROW[:, 1:], **PLAIN)
    returned = change != "merged"
    assert (running.written, dict(running.skipped)) == (1 + returned, {OTHER_WEIGHTS: 1})
    if change == "merged":
        peft_model.unmerge_adapter()
    texts = recorded_texts(tmp_path, lm.target)
    assert texts[0] == first[0].tolist() and len(texts) == 1 + returned


def test_an_answer_during_which_weights_change_is_not_recorded(tokenizer, tmp_path):
    model = tiny_mistral()
    lm = with_eagle3(model, compile=False)
    with record(lm, tmp_path, tokenizer=tokenizer) as running:
        lm.observers.append(EachRound(lambda sequences: model.lm_head.weight.data.mul_(1.01)))
        with warned("weights recorded"):
            lm.generate(ROW, **PLAIN)
    assert (running.written, dict(running.skipped)) == (0, {OTHER_WEIGHTS: 1})


def test_a_change_that_no_sample_showed_is_told_when_the_recording_stops(tokenizer, tmp_path):
    model = tiny_mistral()
    lm = with_eagle3(model, compile=False)
    running = record(lm, tmp_path, tokenizer=tokenizer)
    lm.generate(ROW, **PLAIN)
    version = lm.target.version
    for column in range(64):
        weight = model.lm_head.weight.data[0, column].clone()
        model.lm_head.weight.data[0, column] += 1
        if lm.target.version == version:
            break
        model.lm_head.weight.data[0, column] = weight
    with warned(f".data {str(tmp_path)!r}"):
        running.stop()


def test_weights_may_change_between_a_recordings_last_answer_and_its_end(
    tokenizer, tmp_path, recwarn
):
    model = tiny_mistral()
    lm = with_eagle3(model, compile=False)
    with record(lm, tmp_path, tokenizer=tokenizer) as running:
        lm.generate(ROW, **PLAIN)
        model.lm_head.weight.data.mul_(1.01)
    assert running.written == 1 and not [each for each in recwarn if "weights" in str(each.message)]


@pytest.mark.versions
@pytest.mark.parametrize("sampling", [False, True])
def test_rollouts_by_plain_generate_are_recorded(sampling, tokenizer, tmp_path):
    """`model.generate` of the decoder's own model, by which trainers of policies answer."""
    model = tiny_mistral()
    lm = with_eagle3(model, compile=False)
    settings = {**PLAIN, "do_sample": sampling, "attention_mask": torch.ones_like(ROW)}
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    expected = lm.generate(ROW, generator=generators[0], **settings)
    method = lm.custom_generate(generators[1])
    model.generate = functools.partial(model.generate, custom_generate=method)
    with record(lm, tmp_path, kind="rollouts", format="float32", tokenizer=tokenizer) as running:
        found = model.generate(ROW, **settings)
    assert torch.equal(found, expected.sequences)
    assert running.written == 1 and text_row(text_shards(tmp_path)[0])["kind"] == "rollouts"
    assert recorded_texts(tmp_path, lm.target) == found.tolist()
