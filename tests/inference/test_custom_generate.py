"""Plain `model.generate`: the options of `SpeculativeLM`, one engine as long as the model lives,
and no longer."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers import build_model
from messages import refused
from transformers import AutoModelForCausalLM, pipeline

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import save_head
from headstart.inference import SpeculativeLM, Target, custom_generate, generate_from

PROMPT = torch.arange(1, 6)[None]
SETTINGS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def head_folder(tmp_path):
    """A head's folder."""
    target = Target(build_model(layers=3))
    save_head(
        build_head("medusa", {"num_heads": 2}, target.info).double(),
        tmp_path / "head",
        CheckpointMetadata(tree="chain:2"),
    )
    return str(tmp_path / "head")


@pytest.fixture
def loadings(monkeypatch):
    """The options of every decoder that was loaded, and a weak reference to it."""
    seen = []
    original = SpeculativeLM.from_pretrained

    def load(*given, **options):
        lm = original(*given, **options)
        seen.append((options, weakref.ref(lm)))
        return lm

    monkeypatch.setattr(SpeculativeLM, "from_pretrained", load)
    return seen


def by_folder(folder, **options):
    """As `model.generate(custom_generate=FOLDER)` does it."""
    return lambda model: generate_from(folder, model, inputs=PROMPT, **SETTINGS, **options)


def by_function(folder, **options):
    method = custom_generate(folder, **options)
    return lambda model: model.generate(PROMPT, custom_generate=method, **SETTINGS)


BOTH = pytest.mark.parametrize("entrance", [by_folder, by_function])


def test_a_pipeline_passes_it_on(target_folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    answer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    calls = []
    by_lookup = custom_generate(drafter="prompt-lookup")

    def method(*inputs, **arguments):
        calls.append(inputs)
        return by_lookup(*inputs, **arguments)

    settings = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    expected = answer("say abc", **settings)
    assert answer("say abc", custom_generate=method, **settings) == expected
    assert len(calls) == 1


@pytest.mark.versions
@BOTH
def test_an_engine_is_loaded_once_and_freed_with_its_model(head_folder, loadings, entrance):
    generate, model = entrance(head_folder), build_model(layers=3)
    expected = model.generate(PROMPT, **SETTINGS)
    for _ in range(2):
        assert torch.equal(generate(model), expected)
    assert len(loadings) == 1
    gone = [weakref.ref(model), weakref.ref(model.model.layers[0])]
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]  # although the method is still there
    assert torch.equal(generate(build_model(layers=3)), expected)
    assert len(loadings) == 2


def test_an_engine_is_freed_with_what_asked_for_it(head_folder, loadings):
    model = build_model(layers=3)
    generate = by_function(head_folder)
    generate(model)
    [(_, decoder)] = loadings
    assert decoder() is not None
    del generate
    gc.collect()
    assert decoder() is None


@BOTH
def test_several_models_keep_their_engines(head_folder, loadings, entrance):
    generate, models = entrance(head_folder), [build_model(layers=3, seed=seed) for seed in (0, 1)]
    for _ in range(2):
        for model in models:
            assert torch.equal(generate(model), model.generate(PROMPT, **SETTINGS))
    assert len(loadings) == 2


@BOTH
def test_options_reach_the_engine_and_others_load_another(head_folder, loadings, entrance):
    model = build_model(layers=3)
    generate = entrance(head_folder, compile=False, dtype=torch.float64)
    for _ in range(2):
        generate(model)
    assert [(each["compile"], each["dtype"]) for each, _ in loadings] == [(False, torch.float64)]
    entrance(head_folder)(model)
    assert [(each["compile"], each["dtype"]) for each, _ in loadings[1:]] == [(True, "auto")]
    with refused("dtype bfloat16 torch.float64"):
        entrance(head_folder, dtype="bfloat16")(model)
    with refused("compile True False 'yes'"):
        entrance(head_folder, compile="yes")(model)


@BOTH
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_copies_of_a_model_have_engines_of_their_own(head_folder, loadings, entrance, copied):
    generate, model = entrance(head_folder), build_model(layers=3)
    generate(model)
    other = copied(model)
    for each in (other, model):
        assert torch.equal(generate(each), model.generate(PROMPT, **SETTINGS))
    assert len(loadings) in (2, 3)
    assert set(model.state_dict()) == set(build_model(layers=3).state_dict())


def test_a_pickled_model_needs_nothing_of_ours():
    """Without features: transformers itself hangs on a model what shows them, and that cannot be
    pickled."""
    method, model = custom_generate(drafter="prompt-lookup"), build_model(layers=3)
    expected = model.generate(PROMPT, custom_generate=method, **SETTINGS)
    written = pickle.dumps(model)
    assert b"headstart" not in written
    assert torch.equal(
        pickle.loads(written).generate(PROMPT, custom_generate=method, **SETTINGS), expected
    )
