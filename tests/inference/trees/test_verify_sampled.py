"""Acceptance rules for sampled trees, by enumeration: every tree that can be sampled, every outcome
of every draw."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from helpers import one_row_tree
from messages import lacking, refused
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.inference import DraftTree, TreeShape
from headstart.inference.trees.verify import (
    BEST,
    RULES,
    choose_rule,
    emitted_tokens,
    is_lossy_rule,
    normalized,
)

PROCESSORS = [
    [],
    [TemperatureLogitsWarper(0.6)],
    [TemperatureLogitsWarper(1.3), TopKLogitsWarper(2)],
    [TopPLogitsWarper(0.7)],
    [MinPLogitsWarper(0.3)],
    [TopKLogitsWarper(1)],
]
CHAINS = [[[0]], [[0], [0, 0]], [[0], [0, 0], [0, 0, 0]]]
TREES = [
    [[0], [1]],
    [[0], [1], [2]],
    [[0], [1], [0, 0], [1, 0]],
    [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]],
    [[0], [1], [0, 0], [0, 0, 0], [0, 0, 1]],
]


class Script:
    """One outcome for every draw of a rule, the same in all rows, each row with its own weight; see
    `outcomes`."""

    def __init__(self, choices):
        self.choices, self.place, self.options = choices, 0, []
        self.weights = torch.ones((), dtype=torch.float64)

    def _next(self, options):
        self.options.append(options)
        if self.place == len(self.choices):
            self.choices.append(0)
        self.place += 1
        return self.choices[self.place - 1]

    def accept(self, probs):
        outcome = self._next(2) == 0
        self.weights = self.weights * (probs if outcome else 1 - probs)
        return torch.full(probs.shape, outcome)

    def categorical(self, probs):
        nodes = probs.reshape(len(probs), -1, probs.shape[-1]).unbind(1)
        drawn = [self._next(probs.shape[-1]) for _ in nodes]
        for node, token in zip(nodes, drawn, strict=True):
            self.weights = self.weights * node[:, token]
        return torch.tensor(drawn).expand(len(probs), -1).reshape(probs.shape[:-1])


def outcomes(run):
    """`run(sampler)` for every script of outcomes, with the weights of its rows."""
    choices = []
    while True:
        sampler = Script(choices)
        result = run(sampler)
        yield result, sampler.weights
        choices = choices[: sampler.place]
        while choices and choices[-1] + 1 == sampler.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1


class World:
    """A random target and a random draft over a tiny vocabulary, and all trees of a shape that can
    be drawn."""

    def __init__(self, shape, vocab, seed, processors, replace=False, draft_tokens=None):
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.vocab = TreeShape.from_paths(shape), vocab
        depth = self.shape.depth
        processors = LogitsProcessorList(processors)
        self.target, self.draft = {}, {}
        for length in range(depth + 1):
            for prefix in itertools.product(range(vocab), repeat=length):
                logits = 2 * torch.randn(2, vocab, generator=generator, dtype=torch.float64)
                logits[1, vocab if draft_tokens is None else draft_tokens :] = -torch.inf
                self.target[prefix] = processors(None, logits[:1].clone())[0]
                self.draft[prefix] = processors(None, logits[1:].clone())[0].softmax(-1)
        self.replace = replace
        self.kind = "sampled_independent" if replace else "sampled_without_replacement"
        if depth + 1 == self.shape.size:
            self.kind = "sampled_chain"
        self.rows, self.weights = self.drawn_rows()

    def drawn_rows(self):
        """All trees, as {path: token}, with their probabilities."""
        rows = [({(): ()}, 1.0)]  # path -> tokens on it
        for parent in ((), *self.shape.paths):
            count = sum(path != () and path[:-1] == parent for path in self.shape.paths)
            grown = []
            for tokens, weight in rows:
                prefix = tokens[parent]
                for children, mass in self.children(self.draft[prefix], count):
                    more = {
                        (*parent, rank): (*prefix, token) for rank, token in enumerate(children)
                    }
                    grown.append(({**tokens, **more}, weight * mass))
            rows = grown
        weights = torch.tensor([weight for _, weight in rows], dtype=torch.float64)
        return [row for row, _ in rows], weights

    def children(self, probs, count, taken=()):
        """Every way of drawing `count` tokens; where they run out, impossible ones follow, as in
        `RandomSampler.distinct`."""
        if len(taken) == count:
            return [(taken, 1.0)]
        found = []
        for token in range(self.vocab):
            if probs[token] > 0:
                rest = probs
                if not self.replace:
                    rest = normalized(probs.scatter(0, torch.tensor([token]), 0.0), 0 * probs)
                for children, mass in self.children(rest, count, (*taken, token)):
                    found.append((children, float(probs[token]) * mass))
        if not found:
            spare = [token for token in range(self.vocab) if token not in taken]
            return [((*taken, *spare[: count - len(taken)]), 1.0)]
        return found

    def at_nodes(self, values):
        """What prefixes have, stacked for every node of every row."""
        paths = ((), *self.shape.paths)
        rows = [torch.stack([values[row[path]] for path in paths]) for row in self.rows]
        return torch.stack(rows)

    def tree(self):
        self.scores = self.at_nodes(self.target)
        tokens = [[0, *(row[path][-1] for path in self.shape.paths)] for row in self.rows]
        draft_probs_BNV = self.at_nodes(self.draft)
        return DraftTree.of_shape(self.shape, torch.tensor(tokens), self.kind, draft_probs_BNV)

    def joint(self, mass):
        """The distribution of depth + 1 tokens, what is missing being written by the target."""
        found = dict(mass)
        for length in range(self.shape.depth + 1):
            for prefix in itertools.product(range(self.vocab), repeat=length):
                weight = found.pop(prefix, 0.0)
                for token, prob in enumerate(self.target[prefix].softmax(-1).tolist()):
                    text = (*prefix, token)
                    found[text] = found.get(text, 0.0) + weight * prob
        return found

    def run(self, verify):
        """The distribution of what a round emits."""
        tree = self.tree()
        mass = {}
        for result, weights in outcomes(lambda sampler: verify(tree, self.scores, sampler)):
            emitted = emitted_tokens(tree, result).tolist()
            weights = (self.weights * weights).tolist()
            rows = zip(emitted, result.lengths_B.tolist(), weights, strict=True)
            for tokens, length, weight in rows:
                if weight > 0:
                    text = tuple(tokens[:length])
                    mass[text] = mass.get(text, 0.0) + weight
        assert sum(mass.values()) == pytest.approx(1)
        return mass

    def error(self, verify):
        truth = self.joint({(): 1.0})
        found = self.joint(self.run(verify))
        return max(abs(truth[text] - found.get(text, 0.0)) for text in truth)

    def mean(self, verify):
        return sum(len(text) * weight for text, weight in self.run(verify).items())


def world(seed, shapes, **options):
    choose = random.Random(seed)
    shape = shapes[seed % len(shapes)]
    vocab = 3 if len(shape) > 3 else choose.choice([3, 4, 5])
    return World(shape, vocab, seed, PROCESSORS[choose.randrange(len(PROCESSORS))], **options)


WORDS = [word for word, rule in RULES.items() if not rule.lossy]
SMALL = [[[0], [1], [1, 0]], *(shape for shape in CHAINS + TREES if len(shape) < 4)]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("word", WORDS)
def test_every_exact_rule_keeps_the_targets_distribution(word, seed):
    kinds = RULES[word].kinds
    shapes = CHAINS if kinds == {"sampled_chain"} else CHAINS + TREES
    replace = "sampled_independent" in kinds
    if word == "point_mass":  # for every kind of tree
        shapes = SMALL
        replace = seed % 2 == 0
    here = world(seed, shapes, replace=replace)
    assert here.error(choose_rule(word, here.kind, lossy=False)) <= 1e-9


def test_drawn_trees_rank_the_rules():
    """Tokens a round on the same trees: taking more of the draft into account never accepts
    less."""
    for shapes, words in [
        (TREES, ("traversal", "without_replacement", "point_mass")),
        (CHAINS[1:], ("block", "token", "point_mass")),
    ]:
        small = [shape for shape in shapes if len(shape) < 5]
        worlds = [World(shape, 3, seed, []) for seed in range(3) for shape in small]
        means = [sum(here.mean(RULES[word].verify) for here in worlds) for word in words]
        assert means == sorted(means, reverse=True)
        assert means[0] > means[-1] + 0.01 * len(worlds)


@pytest.mark.parametrize("word", ["without_replacement", "traversal"])
@pytest.mark.parametrize(
    ("processors", "draft_tokens"),
    [([TopKLogitsWarper(2)], None), ([], 1), ([], 2), ([TopKLogitsWarper(1)], None)],
)
def test_an_exhausted_draft_is_no_bias(word, processors, draft_tokens):
    """By a top-k below the number of children, or a draft of few tokens."""
    for seed in range(4):
        for shape in ([[0], [1], [2]], [[0], [1], [2], [0, 0], [0, 1]]):
            here = World(shape, 4, seed, processors, draft_tokens=draft_tokens)
            assert here.error(RULES[word].verify) <= 1e-9


@pytest.mark.parametrize("word", ["with_replacement", "without_replacement", "traversal"])
def test_a_draft_equal_to_the_target_is_always_accepted(word):
    """Residuals are 0/0 everywhere."""
    here = World([[0], [0, 0]], 4, 0, [])
    here.draft = {prefix: scores.softmax(-1) for prefix, scores in here.target.items()}
    here.rows, here.weights = here.drawn_rows()
    assert here.mean(RULES[word].verify) == pytest.approx(3)
    assert here.error(RULES[word].verify) <= 1e-9


def test_typical_acceptance_takes_what_passes_the_threshold():
    logits = torch.tensor(
        [[0.5, 0.3, 0.107, 0.093], [0.97, 0.01, 0.01, 0.01], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]]
    ).log()
    shape = TreeShape.from_paths([[0], [1], [0, 0]])

    def accepted(*tokens):
        tree = one_row_tree([0, *tokens], shape.parents, 2)
        result = RULES["typical"].verify(tree, logits[None], None)
        return result.path_BA[0, : int(result.lengths_B)].tolist(), int(result.next_tokens_B)

    # at the root the entropy is 1.17, so the threshold is min(0.09, 0.3 * 0.311) = 0.09: token 3
    # just passes
    assert accepted(3, 0, 0) == ([0, 1, 3], 0)
    # at node 1 the entropy is 0.17, so the threshold is 0.09
    assert accepted(1, 2, 0) == ([0, 1, 3], 0)
    assert accepted(1, 0, 1) == ([0, 2], 0)  # of two paths of one token the likelier
    # a flat distribution: 0.3 * exp(-1.39) = 0.075 is below epsilon
    tree = one_row_tree([0, 1], [-1, 0], 1)
    flat = torch.tensor([[0.085] * 11 + [0.065], [0.5] + [0.5 / 11] * 11]).log()
    assert RULES["typical"].verify(tree, flat[None], None).lengths_B.tolist() == [2]


@pytest.mark.parametrize("kind", BEST)
def test_auto_is_an_exact_rule_that_fits(kind):
    assert kind in RULES[BEST[kind]].kinds and not RULES[BEST[kind]].lossy
    assert choose_rule("auto", kind, lossy=False) is RULES[BEST[kind]].verify


@pytest.mark.parametrize(
    ("word", "kind", "words", "others"),
    [
        ("token", "top_k", "'token' top-k point_mass", "block"),
        ("traversal", "top_k", "'traversal' top-k point_mass", "without_replacement"),
        ("without_replacement", "sampled_independent", "point_mass with_replacement", "traversal"),
        ("with_replacement", "sampled_without_replacement", "without_replacement", "block token"),
        ("block", "sampled_without_replacement", "'block' traversal", "with_replacement token"),
        ("typical", "top_k", "'typical' lossy lossy=True 'point_mass'", "token"),
        ("exact", "top_k", "'exact' auto point_mass", ""),
    ],
)
def test_a_rule_that_would_change_the_distribution_is_refused(word, kind, words, others):
    with refused(words) as refusal:
        choose_rule(word, kind, lossy=False)
    assert lacking(str(refusal.value), others) == others.split()


def test_a_lossy_rule_is_taken_by_those_who_say_so():
    assert choose_rule("typical", "top_k", lossy=True) is RULES["typical"].verify
    assert is_lossy_rule(choose_rule("typical:0.1:0.3", "top_k", lossy=True))
    assert not is_lossy_rule(choose_rule("auto", "top_k", lossy=False))
