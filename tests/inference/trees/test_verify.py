"""Exactness by enumeration: every outcome of every draw, with its probability, against the target's
distribution."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.inference import DraftTree
from headstart.inference.engines.base import TargetOutput
from headstart.inference.rounds.verification import Verification
from headstart.inference.trees.verify import (
    VerifyResult,
    emitted_tokens,
    follow,
    greedy,
    point_mass,
)

PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top-k": [TemperatureLogitsWarper(1.3), TopKLogitsWarper(2)],
    "top-p": [TopPLogitsWarper(0.7)],
    "one token": [TopKLogitsWarper(1)],
}


class World:
    """A random target over a tiny vocabulary, and a random tree of guesses over it."""

    def __init__(self, shape, vocab, seed, processors):
        self.vocab, self.shape = vocab, shape
        self.random = torch.Generator().manual_seed(seed)
        self.processors = LogitsProcessorList(PROCESSORS[processors])
        self.logits = {
            prefix: 2 * torch.randn(vocab, generator=self.random, dtype=torch.float64)
            for length in range(shape.depth + 1)
            for prefix in itertools.product(range(vocab), repeat=length)
        }
        self.tokens = {(): 0}
        for parent in ((), *shape.paths):
            siblings = torch.randperm(vocab, generator=self.random).tolist()
            for path in shape.paths:
                if path[:-1] == parent:
                    self.tokens[path] = siblings[path[-1]]

    def prefix(self, path):
        return tuple(self.tokens[path[:i]] for i in range(1, len(path) + 1))

    def tree(self, rows):
        tokens = torch.tensor([self.tokens[path] for path in ((), *self.shape.paths)])
        parents = torch.tensor(self.shape.parents)
        sizes = torch.full((rows,), self.shape.size)
        return DraftTree(tokens.expand(rows, -1), parents.expand(rows, -1), sizes, self.shape.depth)

    def scores(self, rows):
        logits = torch.stack([self.logits[self.prefix(path)] for path in ((), *self.shape.paths)])
        return self.processors(None, logits)[None].expand(rows, -1, -1)

    def probs(self, prefix):
        return self.processors(None, self.logits[prefix][None].clone())[0].softmax(-1)

    def truth(self):
        """The target's distribution of the next depth + 1 tokens."""
        joint = {}
        for text in itertools.product(range(self.vocab), repeat=self.shape.depth + 1):
            joint[text] = float(
                torch.stack([self.probs(text[:i])[text[i]] for i in range(len(text))]).prod()
            )
        return joint

    def emitted(self, verify, draws):
        """The distribution of the same tokens: what a round emits, continued by the target
        itself."""
        rows = self.vocab**self.shape.size
        tree, scores = self.tree(rows), self.scores(rows)
        result = verify(tree, scores, draws)
        emitted = emitted_tokens(tree, result).tolist()
        mass = {}
        for tokens, length, weight in zip(
            emitted, result.lengths_B.tolist(), draws.weights.tolist()
        ):
            mass[tuple(tokens[:length])] = mass.get(tuple(tokens[:length]), 0.0) + weight
        joint = {}
        for text in itertools.product(range(self.vocab), repeat=self.shape.depth + 1):
            joint[text] = sum(
                mass.get(text[:i], 0.0)
                * float(
                    torch.stack(
                        [self.probs(text[:j])[text[j]] for j in range(i, len(text))]
                        or [torch.ones(())]
                    ).prod()
                )
                for i in range(1, len(text) + 1)
            )
        return joint

    def error(self, verify, draws):
        truth, emitted = self.truth(), self.emitted(verify, draws)
        assert sum(emitted.values()) == pytest.approx(1)
        return max(abs(truth[text] - emitted[text]) for text in truth)


SHAPES = {
    "root": [],
    "chain of 1": [[0]],
    "chain of 3": [[0], [0, 0], [0, 0, 0]],
    "two children": [[0], [1]],
    "two levels": [[0], [1], [0, 0], [0, 1], [1, 0]],
    "three deep": [[0], [1], [0, 0], [0, 0, 0], [0, 0, 1]],
}


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("name", SHAPES)
def test_point_mass_is_the_targets_distribution(tools, name, processors):
    from headstart.inference import TreeShape

    shape = TreeShape.from_paths(SHAPES[name])
    for seed, vocab in [(0, 3), (1, 4), (2, 4)] + [(3, 5)] * (shape.size < 5):
        world = World(shape, vocab, seed, processors)
        assert world.error(point_mass, tools.AllDraws()) <= 1e-9


def softmax_as_draft_probability(tree, scores, draws):
    """Wrong: a picked child is accepted with its target probability as if it had been drawn; a
    rejected token can be drawn again from the unchanged target, so that picked tokens come too
    often.
    """
    choices = draws.categorical(scores.softmax(-1))
    first = tree.tokens_BN[:, 1]
    lucky = (choices[:, 1] == first)[:, None] & (torch.arange(tree.tokens_BN.shape[1]) == 0)
    return follow(tree, torch.where(lucky, first[:, None], choices))


def one_draw_for_all_nodes(tree, scores, draws):
    """Wrong: the same draw at every node."""
    choices = draws.categorical(scores.softmax(-1))
    return follow(tree, choices[:, :1].expand_as(choices))


@pytest.mark.parametrize("wrong", [softmax_as_draft_probability, one_draw_for_all_nodes])
def test_the_enumeration_catches_wrong_rules(tools, wrong):
    from headstart.inference import TreeShape

    world = World(TreeShape.from_paths(SHAPES["two levels"]), 4, 0, "none")
    assert world.error(wrong, tools.AllDraws()) > 0.01


@pytest.mark.parametrize("seed", range(20))
def test_greedy_follows_the_best_token_as_far_as_the_tree_holds_it(tools, seed):
    shape = tools.random_shape(seed)
    world = World(shape, 4, seed, "none")
    result = greedy(world.tree(1), world.scores(1), None)
    path, prefix = (), ()
    expected = [0]
    while True:
        best = int(world.logits[prefix].argmax())
        child = next((p for p in shape.paths if p[:-1] == path and world.tokens[p] == best), None)
        if child is None:
            break
        path, prefix = child, (*prefix, best)
        expected.append(1 + shape.paths.index(child))
    assert result.lengths_B.tolist() == [len(expected)]
    assert result.path_BA[0, : len(expected)].tolist() == expected
    assert result.path_BA.shape[1] == shape.depth + 1
    assert result.next_tokens_B.tolist() == [best]


def test_padding_beyond_a_rows_size_never_matches():
    tree = DraftTree(
        torch.tensor([[0, 1], [0, 1]]), torch.tensor([[-1, 0], [-1, 0]]), torch.tensor([2, 1]), 1
    )
    result = follow(tree, torch.tensor([[1, 2], [1, 2]]))
    assert result.lengths_B.tolist() == [2, 1]
    assert result.next_tokens_B.tolist() == [2, 1]


def test_of_equal_siblings_only_the_first_is_followed():
    tree = DraftTree(
        torch.tensor([[0, 4, 4, 5, 6]]),
        torch.tensor([[-1, 0, 0, 1, 2]]),
        torch.tensor([5]),
        2,
        "sampled_independent",
    )
    # Node 3 follows the first sibling, node 4 the second.
    for choices, path in [([4, 5, 9, 1, 1], [0, 1, 3]), ([4, 9, 6, 1, 1], [0, 1])]:
        result = follow(tree, torch.tensor([choices]))
        assert result.path_BA[0, : int(result.lengths_B)].tolist() == path


def test_emitted_tokens_are_the_path_without_its_root_and_then_the_bonus_token():
    tree = DraftTree(
        torch.tensor([[7, 5, 6, 4]]), torch.tensor([[-1, 0, 0, 2]]), torch.tensor([4]), 2
    )
    result = VerifyResult(torch.tensor([[0, 2, 3]]), torch.tensor([3]), torch.tensor([9]))
    output = TargetOutput(torch.zeros(1, 4, 1), torch.arange(4.0)[None, :, None])
    verdict = Verification(lambda *_: result).verify(
        tree, output.features_BNF, output.logits_BNV, None
    )
    assert verdict.emitted_BA.tolist() == [[6, 4, 9]]
    assert verdict.features_BAF.flatten().tolist() == [0, 2, 3]
