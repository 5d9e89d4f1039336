"""Weights that change between calls: copies in the kernels, and what conversations have read, follow."""

from __future__ import annotations

import functools
import json
import warnings

import pytest
import torch
from helpers import EachRound, Ended
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads import build_head
from headstart.inference import Conversation, SpeculativeLM, Target, custom_generate, refresh
from headstart.inference.drafters.tree_policies import HeadDrafter
from headstart.inference.engines.cpu import PackedLinearEngine
from headstart.inference.engines.cpu_decoder import is_packed, packed_head
from headstart.inference.engines.cpu_kernels import PackedLinear
from headstart.inference.feature_cache import FeatureCache, decoded, key_of
from headstart.inference.models.changes import SAMPLED, WeightWatch
from headstart.inference.recorded_folder import recorded_files, recorded_row
from headstart.inference.recording import OTHER_WEIGHTS

VOCAB = 64
PLAIN = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
ROW = torch.tensor([[5, 6, 7, 8, 9]])


def model_of(seed=0, act="silu", tie=False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        hidden_act=act,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=tie,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 4
    return model.eval().requires_grad_(False)


def stock(model):
    return model.generate(ROW, attention_mask=torch.ones_like(ROW), **PLAIN)


def copied(model, other):
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(its)


def replaced(model, other):
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = its.data.clone()


def assigned(model, other):
    theirs = dict(other.named_modules())
    for name, module in model.named_modules():
        for own, weight in theirs[name].named_parameters(recurse=False):
            setattr(module, own, nn.Parameter(weight.clone(), requires_grad=False))


def averaged(model, other):
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.mul_(0.5).add_(its, alpha=0.5)


def merged(model, other):
    model.model.layers[1].mlp.down_proj.weight.data.add_(2 * torch.randn(64, 1) @ torch.randn(1, 64))


def normed(model, other):
    model.model.norm.weight.data.mul_(torch.randn(64))


def headed(model, other):
    model.lm_head.weight.data.copy_(other.lm_head.weight)


def loaded(model, other):
    model.load_state_dict(other.state_dict())


WRITES = {each.__name__: each for each in (copied, replaced, assigned, averaged, merged, normed, headed, loaded)}


@pytest.mark.parametrize("kind", ["kernels", "linear layers", "tied"])
@pytest.mark.parametrize("write", WRITES)
def test_a_written_weight_is_decoded_with(write, kind):
    """By the kernels, which hold a copy, and by a conversation, whose cache was made with the old weights."""
    options = {"act": "gelu" if kind == "linear layers" else "silu", "tie": kind == "tied"}
    model = model_of(**options)
    target = Target(model)
    target.compile()
    assert isinstance(target.engine, PackedLinearEngine) == (kind == "linear layers") and target.compiled
    lm, past = SpeculativeLM(target), Conversation()
    before = lm.generate(ROW, past_key_values=past, **PLAIN).sequences
    assert torch.equal(before, stock(model))
    torch.manual_seed(2)
    with torch.no_grad():
        WRITES[write](model, model_of(seed=7, **options))
    expected = stock(model)
    assert not torch.equal(expected, before), "nothing was changed"
    assert torch.equal(lm.generate(ROW, **PLAIN).sequences, expected)
    assert torch.equal(lm.generate(ROW, past_key_values=past, **PLAIN).sequences, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_added_to_all_weights_is_seen_however_little(dtype):
    """At least a rounding step in some of them."""
    model, watch = model_of().to(dtype), WeightWatch()
    before = watch.version(model)
    assert watch.version(model) == before
    for parameter in model.parameters():
        parameter.data.add_(3e-9 if dtype == torch.float32 else 3e-4)
    assert watch.version(model) != before


def test_nan_equals_itself_and_every_expert_is_sampled():
    module, watch = nn.Module(), WeightWatch()
    module.experts = nn.Parameter(torch.randn(32, 8, 16))
    module.broken = nn.Parameter(torch.full((5, 7), torch.nan))
    module.register_buffer("turned", torch.randn(9, 400).t())
    module.register_buffer("repeated", torch.randn(1, 3).expand(50, 3))
    module.register_buffer("nothing", torch.zeros(0, 3))
    module.register_buffer("one", torch.zeros(()))
    assert watch.version(module) == watch.version(module)
    for expert in range(32):
        before = watch.version(module)
        module.experts.data[expert] += 1
        assert watch.version(module) != before, expert
    for written in (module.turned, module.repeated[0], module.one):
        before = watch.version(module)
        written.data.add_(1)
        assert watch.version(module) != before


def test_a_write_that_no_sample_shows_takes_a_refresh():
    """One row of the LM head, through `.data`: as the documentation says."""
    model = model_of()
    lm = SpeculativeLM.from_pretrained(Target(model), compile=True)
    decode = custom_generate(compile=True)
    before = lm.generate(ROW, **PLAIN).sequences
    model.generate(ROW, custom_generate=decode, **PLAIN)
    said = int(before[0, -1])
    for row in range(VOCAB):
        version, weight = lm.target.version, model.lm_head.weight.data[row].clone()
        model.lm_head.weight.data[row] = 2 * model.lm_head.weight.data[said]
        if row != said and lm.target.version == version:
            break
        model.lm_head.weight.data[row] = weight
    else:
        raise AssertionError(f"{SAMPLED} samples are in every row")
    expected = stock(model)
    assert torch.equal(lm.generate(ROW, **PLAIN).sequences, before) and not torch.equal(expected, before)
    assert torch.equal(lm.refresh().generate(ROW, **PLAIN).sequences, expected)
    refresh(model)
    assert torch.equal(model.generate(ROW, custom_generate=decode, **PLAIN), expected)


@pytest.mark.parametrize(("kind", "options"), [("eagle3", {"depth": 3, "feature_layers": [0, -1]}), ("medusa", {})])
def test_a_head_in_the_kernels_follows_its_weights(kind, options):
    target = Target(model_of())
    torch.manual_seed(1)
    head = build_head(kind, options, target.info)
    head.initialize(target.modules, torch.ones(VOCAB, dtype=torch.int64))
    lm = SpeculativeLM.from_pretrained(target, head.eval(), tree="chain:2|chain:3", compile=True, fallback=False)
    heads = [each.head for each in lm.drafter.nested() if isinstance(each, HeadDrafter)]
    assert all(map(is_packed, heads)) and len({id(each) for each in heads}) == 1
    expected = lm.generate(ROW, **PLAIN).sequences
    for parameter in head.parameters():
        parameter.data.mul_(0.5).add_(0.01)
    assert torch.equal(lm.generate(ROW, **PLAIN).sequences, expected)
    fresh = packed_head(head)
    for mine, its in zip(heads[0].modules(), fresh.modules(), strict=True):
        if isinstance(its, PackedLinear):
            assert torch.equal(mine.packed.words, its.packed.words)
            assert mine.packed.scales is None or torch.equal(mine.packed.scales, its.packed.scales)
        kept = getattr(getattr(its, "layers", None), "kept", ())
        for tensor, other in zip(kept, getattr(getattr(mine, "layers", None), "kept", ()), strict=True):
            assert torch.equal(getattr(tensor, "words", tensor), getattr(other, "words", other))


def drafting(model, compile, tree="chain:2"):
    """A decoder whose head reads two layers."""
    target = Target.from_pretrained(model)
    torch.manual_seed(1)
    head = build_head("eagle3", {"depth": 3, "feature_layers": [0, -1]}, target.info)
    head.initialize(target.modules, torch.ones(VOCAB, dtype=torch.int64))
    return SpeculativeLM.from_pretrained(target, head.eval(), tree=tree, compile=compile, fallback=False)


def recorded_texts(folder, target):
    """The texts of a recording, whose states are those of the target as it is now."""
    cache = FeatureCache(folder, json.loads((folder / "manifest.json").read_text()))
    texts = []
    for path in recorded_files(folder):
        tokens = recorded_row(path)["input_ids"]
        states_TLD = decoded(*cache.stored(key_of(torch.tensor(tokens))))
        expected_1TF, _ = target.read(torch.tensor([tokens]), cache.layers)
        torch.testing.assert_close(states_TLD.flatten(1)[:-1], expected_1TF[0, :-1], atol=2e-4, rtol=1e-4)
        texts.append(tokens)
    return texts


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_recording_takes_no_answers_of_other_weights(write, compile, tokenizer, tmp_path):
    """And a folder that is begun anew takes those of the new ones alone."""
    model = model_of()
    lm = drafting(model, compile)
    assert lm.target.compiled == compile
    with lm.record(tmp_path / "old", format="float32", tokenizer=tokenizer) as old:
        before = lm.generate(ROW, **PLAIN).sequences
        old_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        torch.manual_seed(2)
        with torch.no_grad():
            WRITES[write](model, model_of(seed=7))
        with pytest.warns(UserWarning, match="not those with which the recording began: answers are not recorded in"):
            after = lm.generate(ROW, **PLAIN).sequences
        with warnings.catch_warnings(action="error"):  # it was said once
            lm.generate(torch.cat([ROW, ROW]), **PLAIN)
    assert not torch.equal(after, before) and torch.equal(after, stock(model))
    assert (old.written, dict(old.skipped)) == (1, {OTHER_WEIGHTS: 3})
    with pytest.raises(ValueError, match=r"holds states with weights = '\w+', not '\w+'; choose another folder"):
        lm.record(tmp_path / "old", format="float32", tokenizer=tokenizer)
    with lm.record(tmp_path / "new", format="float32", tokenizer=tokenizer) as new:
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
    model = model_of()
    lm = drafting(model, compile)
    lm.generate(ROW, **PLAIN)
    model.load_state_dict(model_of(seed=7).state_dict())
    with lm.record(tmp_path, format="float32", tokenizer=tokenizer) as running:
        answer = lm.generate(ROW, **PLAIN).sequences
    assert running.written == 1 and not running.skipped
    assert recorded_texts(tmp_path, lm.target) == answer.tolist()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("change", ["switched off", "merged", "another"])
def test_a_recording_takes_no_answers_of_another_adapter(change, compile, tokenizer, tmp_path):
    torch.manual_seed(3)
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft_model = get_peft_model(model_of(), lora)
    peft_model.add_adapter("other", lora)
    for name, weight in peft_model.named_parameters():
        if "lora" in name:
            weight.data = torch.randn_like(weight)
    lm = drafting(peft_model.eval(), compile)
    with lm.record(tmp_path, format="float32", tokenizer=tokenizer) as running:
        first = lm.generate(ROW, **PLAIN).sequences
        with pytest.warns(UserWarning, match="not those with which"):
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
    model = model_of()
    lm = drafting(model, compile=False)
    with lm.record(tmp_path, tokenizer=tokenizer) as running:
        lm.observers.append(EachRound(lambda sequences: model.lm_head.weight.data.mul_(1.01)))
        with pytest.warns(UserWarning, match="not those with which"):
            lm.generate(ROW, **PLAIN)
    assert (running.written, dict(running.skipped)) == (0, {OTHER_WEIGHTS: 1})


def test_a_change_that_no_sample_showed_is_told_when_the_recording_stops(tokenizer, tmp_path):
    model = model_of()
    lm = drafting(model, compile=False)
    running = lm.record(tmp_path, tokenizer=tokenizer)
    lm.generate(ROW, **PLAIN)
    version = lm.target.version
    for column in range(64):
        weight = model.lm_head.weight.data[0, column].clone()
        model.lm_head.weight.data[0, column] += 1
        if lm.target.version == version:
            break
        model.lm_head.weight.data[0, column] = weight
    with pytest.warns(
        UserWarning, match=r"by writes that are not noticed on this device \(through \.data\): it may hold"
    ):
        running.stop()


def test_weights_may_change_between_a_recordings_last_answer_and_its_end(tokenizer, tmp_path, recwarn):
    model = model_of()
    lm = drafting(model, compile=False)
    with lm.record(tmp_path, tokenizer=tokenizer) as running:
        lm.generate(ROW, **PLAIN)
        model.lm_head.weight.data.mul_(1.01)
    assert running.written == 1 and not [each for each in recwarn if "weights" in str(each.message)]


@pytest.mark.versions
@pytest.mark.parametrize("sampling", [False, True])
def test_rollouts_by_plain_generate_are_recorded_and_follow_a_swap(sampling, tokenizer, tmp_path):
    """`model.generate` of the decoder's own model, by which trainers of policies answer."""
    model = model_of()
    lm = drafting(model, compile=False)
    settings = {**PLAIN, "do_sample": sampling, "attention_mask": torch.ones_like(ROW)}
    generators = [torch.Generator().manual_seed(4) for _ in range(3)]
    expected = lm.generate(ROW, generator=generators[0], **settings)
    method = lm.custom_generate(generators[1])
    model.generate = functools.partial(model.generate, custom_generate=method)
    counted = Ended()
    lm.observers.append(counted)
    with lm.record(tmp_path, kind="rollouts", format="float32", tokenizer=tokenizer) as running:
        found = model.generate(ROW, **settings)
    assert torch.equal(found, expected.sequences) and counted.stats[0].rows == expected.stats.rows
    assert running.written == 1 and recorded_row(recorded_files(tmp_path)[0])["kind"] == "rollouts"
    assert recorded_texts(tmp_path, lm.target) == found.tolist()
    medusa = build_head("medusa", {"num_heads": 2}, lm.target.info)
    medusa.initialize(lm.target.modules, torch.ones(VOCAB, dtype=torch.int64))
    lm.use_head(medusa.eval())
    again = lm.generate(ROW, generator=generators[2], **settings)
    generators[1].manual_seed(4)
    assert (
        torch.equal(model.generate(ROW, **settings), again.sequences)
        and counted.stats[-2].rows == counted.stats[-1].rows
    )
    assert torch.equal(again.sequences, found), "a seed gives the same text whichever head drafts"
    with pytest.raises(
        ValueError, match=r"is of another LlamaForCausalLM than the one whose generate was called; make"
    ):
        model_of(seed=7).generate(ROW, custom_generate=method, **settings)
