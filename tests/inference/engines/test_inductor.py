"""Forwards fused by torch.compile: the same tokens, one graph for all lengths, and a way on where one cannot be made.

They are traced, guarded and shared here on a CPU, which otherwise has kernels of its own; what Inductor makes of a
graph is left out, for it takes minutes.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import padded_batch, written_alone
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from headstart.heads import build_head
from headstart.inference import SpeculativeLM
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.engines import by_device
from headstart.inference.engines import inductor as compiled
from headstart.inference.engines.inductor import CompiledFunction, InductorEngine

CASES = {
    "plain": (None, "auto"),
    "eagle3, dynamic": ({"type": "eagle3", "depth": 3, "feature_layers": [0, -1]}, "dynamic:9:3:3"),
    "cut, chain": ({"type": "cut", "depth": 3}, "chain:3"),
    "medusa, static": ({"type": "medusa", "num_heads": 3}, "auto"),
    "eagle, static": ({"type": "eagle", "depth": 3}, "auto"),
    "hydra++, dynamic": ({"type": "hydra++", "num_heads": 3}, "dynamic:9:3:3"),
    "hydra, chain": ({"type": "hydra", "num_heads": 3}, "chain:3"),
}
SHORT = ("plain", "eagle3, dynamic")


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Graphs on this CPU, too, of operations as they are."""
    monkeypatch.setattr(by_device, "cpu_engine", lambda target, *_: InductorEngine(target))
    inductor = torch._TorchCompileInductorWrapper
    monkeypatch.setattr(inductor, "__call__", lambda self, model, inputs: aot_eager(model, inputs))


def compiled_lm(target, case):
    options, tree = CASES[case]
    if options is None:
        return SpeculativeLM.from_pretrained(target, compile=True)
    return SpeculativeLM.from_pretrained(target, made_head(target, options), tree=tree, compile=True, fallback=False)


def made_head(target, options):
    torch.manual_seed(2)
    head = build_head(options["type"], {name: v for name, v in options.items() if name != "type"}, target.info)
    head = head.to(target.dtype)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head


def prompts():
    random = torch.Generator().manual_seed(1)
    return [torch.randint(20, (length,), generator=random) for length in (250, 5, 9, 2, 17)]


SETTINGS = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [3], "pad_token_id": 0}


def alone(target):
    rows = [written_alone(target.model, row, **SETTINGS) for row in prompts()]
    assert len({len(row) for row in rows}) > 2
    return rows


@pytest.mark.parametrize(
    "case", [case if case in SHORT else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_same_tokens_by_one_graph_of_each_kind(tiny_target, case):
    """Rows of any length, one of them past a bucket of the cache."""
    target = tiny_target(vocab_size=20)
    lm = compiled_lm(target, case)
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without compiling")
        for row, expected in zip(prompts(), alone(target), strict=True):
            output = lm.generate(row[None], attention_mask=torch.ones_like(row)[None], **SETTINGS)
            assert output.sequences[0, len(row) :].tolist() == expected
    assert counters["stats"]["unique_graphs"] == 1


def test_one_graph_too_many_is_told_once_and_runs_as_it_is(monkeypatch):
    monkeypatch.setattr(compiled, "GRAPHS", 2)
    graph = CompiledFunction(lambda tensor, word: (tensor + len(word),), "a sum")
    words = ("a", "bb", "ccc", "dddd")
    with pytest.warns(UserWarning, match="a sum runs without compiling: it needs more than 2 graphs") as told:
        found = [graph(word, list, torch.ones(1), word)[0].item() for word in words]
    assert found == [1.0 + len(word) for word in words]
    assert sum("a sum" in str(each.message) for each in told) == 1 and graph.variants == {"a", "bb"}


@pytest.mark.parametrize("case", ["plain", *(pytest.param(case, marks=pytest.mark.slow) for case in [*CASES][1:])])
def test_a_batch_whose_rows_end_shares_graphs(tiny_target, case):
    target = tiny_target(vocab_size=20)
    lm = compiled_lm(target, case)
    counters.clear()
    padded, mask = padded_batch(prompts())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without compiling")
        output = lm.generate(padded, attention_mask=mask, **SETTINGS)
    for found, expected in zip(output.sequences[:, padded.shape[1] :].tolist(), alone(target), strict=True):
        assert found[: len(expected)] == expected
    # Of one row and of several; and where a tree shrinks to the batch, of roots alone.
    assert counters["stats"]["unique_graphs"] <= (2 if case == "plain" else 4)


def test_one_models_graph_is_not_anothers(tiny_target):
    """Weights are constants of a graph, so what two targets share must not be the graph."""
    row = torch.arange(12)[None]
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(row)}
    texts = []
    for seed in (0, 1):
        target = tiny_target(seed=seed)
        texts.append(compiled_lm(target, "plain").generate(row, **settings).sequences)
        assert torch.equal(texts[-1], target.model.generate(row, **settings))
    assert not torch.equal(*texts)


def test_what_cannot_be_traced_runs_as_it_is():
    def branching(tensor):
        return tensor + 1 if tensor.sum().item() > 0 else tensor - 1

    graph = CompiledFunction(branching, "the test")
    with pytest.warns(UserWarning, match="the test runs without compiling"):
        assert graph("kind", list, torch.ones(2)).tolist() == [2, 2]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without compiling")  # said once
        assert graph("kind", list, -torch.ones(2)).tolist() == [-2, -2]


def test_another_word_is_refused(tiny_target):
    with pytest.raises(ValueError, match=r"compile must be True, False or 'auto', not 'yes'"):
        SpeculativeLM.from_pretrained(tiny_target(), compile="yes")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "prompt-lookup", "lookahead:2:3:2", "ngram:2"])
def test_sources_are_compiled_too(tiny_target, drafter):
    """What they have to compile: the target's forward over trees of all sizes, and a second model's."""
    target = tiny_target(vocab_size=20)
    small = tiny_target(vocab_size=20, layers=1, seed=3)
    source = make_drafter(target, small, "branch:2x1") if drafter == "model" else drafter
    lm = SpeculativeLM.from_pretrained(target, drafter=source, compile=True, fallback=False)
    for row, expected in zip(prompts(), alone(target), strict=True):
        written = lm.generate(row[None], attention_mask=torch.ones_like(row)[None], **SETTINGS).sequences
        assert written[0, len(row) :].tolist() == expected
    assert not target.engine.compiled.broken
    assert drafter != "model" or not small.engine.compiled.broken


def test_a_size_that_the_function_fixes_is_said_and_runs_as_it_is():
    tensor = torch.ones(3)
    graph = CompiledFunction(lambda tensor: tensor.reshape(3) + 1, "the test")
    with pytest.warns(UserWarning, match="the test runs without compiling"):
        assert graph("kind", lambda: [(tensor, 0)], tensor).tolist() == [2, 2, 2]
    assert graph.broken


@pytest.mark.parametrize("limit", [1, 8], ids=["beyond torch's limit", "within"])
def test_what_a_kind_does_not_tell_apart_is_compiled_again_with_our_options(limit, monkeypatch):
    options = []

    def told(self, model, inputs):
        options.append(compiled.symbols.use_duck_shape)
        return aot_eager(model, inputs)

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", told)
    graph = CompiledFunction(lambda tensor, word: (tensor + len(word),), "a sum")
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=limit):
        warnings.simplefilter("error", UserWarning)
        assert [graph("kind", list, torch.ones(1), word)[0].item() for word in ("a", "bb")] == [2, 3]
    assert options == [False, False] and not graph.broken
