"""The verification step: its random numbers, its graphs, and what greedy decoding leaves alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from headstart.inference import DraftTree, SpeculativeLM, Stats, TreeShape, tree_policy
from headstart.inference.compiled import cpu_kernels
from headstart.inference.kv_cache import StateShape, TreeCache
from headstart.inference.logits import PrecomputedSampler, RandomSampler
from headstart.inference.loop import SAMPLED_SHAPES, Verification
from headstart.inference.target import TargetOutput
from headstart.inference.verify import RULES, greedy

CPU, VOCAB = torch.device("cpu"), 5


@pytest.fixture
def graphs(monkeypatch):
    """Graphs on this CPU, too, of operations as they are."""
    monkeypatch.setattr(cpu_kernels, "serve", lambda device: False)
    inductor = torch._TorchCompileInductorWrapper
    monkeypatch.setattr(inductor, "__call__", lambda self, model, inputs: aot_eager(model, inputs))


class Case:
    """A tree that a rule takes, with random scores, and a cache that holds its nodes."""

    def __init__(self, rule, rows, shape=None):
        kinds = RULES[rule].kinds if rule in RULES else ("top_k",)
        drawn = "top_k" not in kinds
        self.shape = shape or (
            tree_policy("branch:2x2") if "sampled_without_replacement" in kinds else TreeShape.chain(3)
        )
        random = torch.Generator().manual_seed(7)
        nodes = self.shape.size
        probs = torch.rand(rows, nodes, VOCAB, generator=random).softmax(-1)
        self.tree = DraftTree(
            torch.randint(VOCAB, (rows, nodes), generator=random),
            torch.tensor([self.shape.parents]).repeat(rows, 1),
            torch.full((rows,), nodes),
            self.shape.depth,
            next(iter(sorted(kinds))) if drawn else "top_k",
            probs if drawn else None,
            self.shape,
            in_order=self.shape.is_chain,
        )
        self.output = TargetOutput(
            torch.randn(rows, nodes, VOCAB, generator=random), torch.randn(rows, nodes, 3, generator=random)
        )
        self.cache = TreeCache([StateShape(1, 4, torch.float32, CPU)] * 2, rows, CPU)
        self.cache.reserve(nodes, 0)
        self.cache.layers[0].update(*torch.randn(2, rows, 1, nodes, 4, generator=random))

    def verify(self, verification):
        sampler = RandomSampler(torch.Generator().manual_seed(3))
        found = verification.verify_and_commit(
            self.tree, self.output, self.output.logits_BNV, sampler, self.cache, Stats()
        )
        given = [found.path_BA, found.lengths_B, found.next_tokens_B, found.emitted_BA, found.features_BAF]
        return [*given, found.finite_BA, self.cache.lengths_B, *self.cache.keys, *self.cache.values]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "rule",
    [
        word if word in ("point_mass", "without_replacement") else pytest.param(word, marks=pytest.mark.slow)
        for word in ("greedy", *RULES)
    ],
)
def test_a_graph_decides_as_the_rule_does(rule, rows):
    """With the same random numbers; what the cache keeps, too."""
    compiled, plain = (Verification(RULES[rule].verify if rule in RULES else greedy) for _ in range(2))
    compiled.compile(CPU)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without compiling")
        pairs = zip(Case(rule, rows).verify(compiled), Case(rule, rows).verify(plain), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert compiled.graph.variants


@pytest.mark.usefixtures("graphs")
def test_trees_whose_shapes_keep_changing_get_no_graph_each():
    verification = Verification(RULES["block"].verify)
    verification.compile(CPU)
    for length in range(1, SAMPLED_SHAPES + 3):
        Case("block", 1, TreeShape.chain(length)).verify(verification)
    assert len(verification.graph.variants) == SAMPLED_SHAPES


def test_every_number_that_was_drawn_is_used_once():
    numbers_BU = torch.arange(14.0).reshape(2, 7)
    sampler = PrecomputedSampler(uniform_BU=numbers_BU)
    used = [sampler.uniform(shape, numbers_BU.device) for shape in ((2, 3, 1), (2,), (2, 1), (2, 2))]
    assert torch.equal(torch.cat([part.reshape(2, -1) for part in used], dim=1), numbers_BU)
    with pytest.raises(RuntimeError):
        sampler.uniform((2,), numbers_BU.device)


@pytest.mark.parametrize("rule", RULES)
def test_enough_numbers_are_drawn_for_every_rule(tiny_target, rule):
    """A wide tree and a deep one, or a chain where a rule is for chains alone."""
    target = tiny_target(vocab_size=20)
    wide = "sampled_without_replacement" in RULES[rule].kinds
    for tree in ("drawn:branch:6", "drawn:branch:1x2x1") if wide else ("drawn:chain:4",):
        lm = SpeculativeLM.from_pretrained(
            target, drafter="random", tree=tree, acceptance=rule, lossy=True, fallback=False
        )
        row = torch.arange(9)[None].expand(2, -1)
        settings = {"max_new_tokens": 9, "do_sample": True, "pad_token_id": 0}
        lm.generate(row, attention_mask=torch.ones_like(row), **settings)


def test_greedy_decoding_draws_nothing(tiny_target):
    """A seed set before means the same after it."""
    target = tiny_target(vocab_size=20)
    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", fallback=False)
    row, before = torch.arange(9)[None], torch.get_rng_state()
    lm.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=9, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)
