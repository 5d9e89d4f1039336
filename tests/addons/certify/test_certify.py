"""`headstart certify` on tiny targets: honest engines pass, planted bugs are told from rounding."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from messages import lacking, refused
from runs import write_prompts
from transformers import AutoModelForCausalLM

from headstart.inference import Target, load_tokenizer
from headstart.inference.cache.kv_cache import TreeCache
from headstart.inference.engines import cpu_decoder, model_engine
from headstart.inference.trees import verify
from headstart.inference.trees.logits import TreeLogitsProcessor
from headstart.inference.trees.verify import Rule, without_replacement
from headstart.scripts.certify import CertifyConfig, certify

PROMPTS = ("count", "a story", "a lake?")


@pytest.fixture(scope="module")
def folders(target_folder, tmp_path_factory):
    """A target, a smaller model of it that drafts well but not always, and the prompts."""
    folder = tmp_path_factory.mktemp("certified")
    tokenizer = load_tokenizer(str(target_folder))
    generator = torch.Generator().manual_seed(0)
    for name, noise in (("target", 0.0), ("draft", 0.15)):
        model = AutoModelForCausalLM.from_pretrained(target_folder)
        model.generation_config.eos_token_id = None
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data *= 1 + noise * torch.randn(weight.shape, generator=generator)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_prompts(folder / "prompts.jsonl", PROMPTS)
    return folder


@pytest.fixture
def config(folders):
    return CertifyConfig(
        target=str(folders / "target"),
        prompts=[str(folders / "prompts.jsonl")],
        drafter=f"model:{folders / 'draft'}",
        tree="drawn:chain:3",
        dtype="float32",
        compile=False,
        temperature=0.3,
        max_new_tokens=24,
        samples=0,
    )


def sampled(config, **changes):
    options = {"temperature": 0.1, "samples": 200, "sample_tokens": 3, "max_new_tokens": 4}
    return replace(config, **{**options, **changes})


def tree_of(config, tree="branch:3x2"):
    """Siblings among the drafts, so that accepted paths lie scattered in the cache."""
    return replace(config, tree=tree)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_honest_engine_in_full_precision_is_identical(config, dtype):
    report = certify(tree_of(replace(config, dtype=dtype)))
    assert report["verdict"] == "identical"
    assert report["greedy"]["exact_answers"] == len(PROMPTS)
    assert report["greedy"]["tokens"] == len(PROMPTS) * config.max_new_tokens
    assert report["greedy"]["tie"] < (1e-5 if dtype == "float32" else 1e-13)


def test_an_honest_engine_in_bfloat16_is_identical_up_to_ties(config):
    report = certify(tree_of(replace(config, dtype="bfloat16", max_new_tokens=100)))
    assert report["verdict"] == "identical up to ties"
    assert 0 < report["greedy"]["margins"][-1] <= report["greedy"]["tie"] < 0.1
    assert report["greedy"]["exact_answers"] < len(PROMPTS)


@pytest.mark.parametrize(
    ("dtype", "acceptance"),
    [("float32", "token"), ("bfloat16", "token"), ("float32", "block"), ("bfloat16", "point_mass")],
)
def test_honest_draws_are_those_of_the_target(config, dtype, acceptance):
    report = certify(sampled(config, dtype=dtype, acceptance=acceptance, top_p=0.95, top_k=20))
    assert report["verdict"].startswith("identical")
    figures = report["sampling"]
    assert figures["tests"] > 3 and figures["impossible_draws"] == 0
    assert all(row["detectable_everywhere"] < 0.2 for row in figures["positions"])


def test_plain_generate_and_its_assisted_decoding(config, folders):
    plain = replace(config, drafter=None, tree="auto")
    report = certify(sampled(plain))
    assert report["verdict"] == "identical" and report["engine"]["kind"] == "transformers"
    assistant = str(folders / "draft")
    report = certify(sampled(plain, assistant=assistant, samples=30, sample_prompts=1))
    assert report["verdict"] == "identical" and report["engine"]["assistant"] == assistant


def test_a_residual_that_is_not_taken_is_found(config, monkeypatch):
    """After a rejection the token is drawn from the unchanged distribution."""

    def unchanged(values, otherwise=None):
        return values if otherwise is None else otherwise

    monkeypatch.setattr(verify, "normalized", unchanged)
    report = certify(sampled(config, acceptance="token"))
    assert report["greedy"]["verdict"] == "identical"  # greedy decoding has another rule
    assert report["verdict"] == "not lossless"
    assert report["sampling"]["positions"][0]["rejected"] == 0  # the first token is no draft
    assert not lacking(report["reasons"][0], "reject target's distribution")


def test_a_lossy_rule_that_does_not_say_so_is_found(config, monkeypatch):
    def too_eager(tree, scores_BNV, sampler):
        return without_replacement(tree, scores_BNV * 2, sampler)

    rule = Rule(too_eager, frozenset(("sampled_chain",)), top_down=True)
    monkeypatch.setitem(verify.RULES, "token", rule)
    report = certify(sampled(config, acceptance="token"))
    assert report["verdict"] == "not lossless"
    assert report["sampling"]["positions"][1]["nats_less_likely"] < 0


def keep_stale_entries(monkeypatch):
    """The cache's entries of a path are not moved to their places."""
    accept = TreeCache.accept

    def in_place(self, path, lengths, in_order):
        accept(self, path, lengths, True)

    monkeypatch.setattr(TreeCache, "accept", in_place)


def shift_positions(monkeypatch):
    """Nodes of a tree are placed a position too far."""
    visible_slots = model_engine.visible_slots

    def shifted(*arguments):
        positions_BN, visible = visible_slots(*arguments)
        return positions_BN + (positions_BN.shape[1] > 1), visible

    monkeypatch.setattr(model_engine, "visible_slots", shifted)
    monkeypatch.setattr(cpu_decoder, "visible_slots", shifted)


@pytest.mark.parametrize("plant", [keep_stale_entries, shift_positions])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_logits_of_a_tree_are_found(config, dtype, plant, monkeypatch):
    plant(monkeypatch)
    report = certify(tree_of(replace(config, dtype=dtype, max_new_tokens=32)))
    assert report["verdict"] == "not lossless"
    assert not lacking(report["reasons"][0], "further rounding")
    assert report["greedy"]["beyond_ties"] > 0


def drop_processors(monkeypatch):
    """Those of drafts; their temperature stays."""
    honest = TreeLogitsProcessor.__call__

    def dropping(self, logits_BNV, tree, text_of, rows):
        if logits_BNV.shape[1] > 1:
            return logits_BNV.float() / self.temperature
        return honest(self, logits_BNV, tree, text_of, rows)

    monkeypatch.setattr(TreeLogitsProcessor, "__call__", dropping)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dropped_logits_processor_is_found_and_named(config, dtype, monkeypatch):
    penalized = tree_of(replace(config, dtype=dtype, repetition_penalty=1.3, max_new_tokens=40))
    assert certify(penalized)["verdict"].startswith("identical")
    drop_processors(monkeypatch)
    report = certify(penalized)
    assert report["verdict"] == "not lossless"
    assert not lacking(report["reasons"][1], "without logits processors")


def test_dropped_warpers_of_draws_are_found(config, monkeypatch):
    drop_processors(monkeypatch)
    report = certify(sampled(config, top_k=2, acceptance="point_mass", tree="chain:3"))
    assert report["verdict"] == "not lossless"
    assert not lacking(report["reasons"][0], "logits processors, probability 0")
    assert report["sampling"]["impossible"][0]["draws"] > 0


def test_typical_acceptance_is_told_that_it_is_lossy(config):
    report = certify(sampled(config, acceptance="typical", lossy=True, tree="chain:3"))
    assert report["verdict"] == "not lossless"
    told, differs, drawless = report["reasons"]
    assert not lacking(told, "lossy: 'typical'")
    assert not lacking(differs, "reject target's distribution")
    assert not lacking(drawless, "draws nothing")
    assert report["greedy"]["verdict"] == "identical"


def test_typical_acceptance_is_exact_where_nothing_is_drawn(config):
    report = certify(replace(config, acceptance="typical", lossy=True, samples=0))
    assert report["verdict"] == "identical"
    (untested,) = report["untested"]
    assert untested.startswith("sampling: ")


def test_the_page_and_the_file_say_the_same(config, tmp_path, capsys):
    report = certify(sampled(config, output=str(tmp_path / "new" / "c.json")))
    assert json.loads((tmp_path / "new" / "c.json").read_text()) == report
    page = (tmp_path / "new" / "c.md").read_text()
    assert page.startswith("# Certificate: identical\n")
    for part in (report["target"]["weights"], report["hardware"], report["versions"]["torch"]):
        assert part in page
    assert all(f"\n| {position} | " in page for position in (1, 2, 3))
    assert "verdict: identical" in capsys.readouterr().out


WRONG = [
    ({"prompts": []}, "prompts"),
    ({"engine": "server", "drafter": None}, "server URL"),
    ({"server": "localhost:8000", "model": "m", "drafter": None}, "server URL"),
    ({"server": "http://h/v1", "model": "m", "drafter": None, "dtype": "auto"}, "dtype"),
    ({"model": "m"}, "model"),
    ({"engine": "transformers"}, "headstart"),
    ({"assistant": "a"}, "transformers"),
    ({"acceptance": "typical"}, "typical lossy"),
    ({"acceptance": "typicl"}, "'typicl' typical"),
    ({"output": "certificate"}, "certificate .json"),
    ({"top_p": 0.0}, "top_p 0.0"),
    ({"samples": -1}, "samples 0 -1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_bad_input_is_refused_before_anything_is_loaded(config, options, words):
    with refused(words):
        replace(config, **options)


def test_a_missing_file_is_refused_before_the_model_is_loaded(config, monkeypatch):
    monkeypatch.setattr(Target, "from_pretrained", lambda *_: pytest.fail("loaded"))
    with refused("nothing.jsonl", error=(ValueError, OSError)):
        certify(replace(config, prompts=["nothing.jsonl"]))
