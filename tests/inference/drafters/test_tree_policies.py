"""Trees of a head: against a slow reference, with heads whose drafts depend on the whole path, and
inside the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from helpers import generated, pairs, random_shape
from messages import refused
from torch import nn

from headstart.heads import DraftHead, DraftState, TargetModules
from headstart.inference import DynamicShape, SpeculativeLM, TreeShape, tree_policy
from headstart.inference.drafters.base import DraftContext, PrefillChunk
from headstart.inference.drafters.by_name import make_drafter, tree_drafter
from headstart.inference.drafters.draft_model_state import DraftModelState
from headstart.inference.drafters.tree_policies import StaticTree, confidence
from headstart.inference.trees.sampling import RandomSampler

ENDS = TargetModules(nn.Identity(), nn.Linear(1, 1), nn.Identity(), ())


@dataclass(frozen=True)
class DraftTreeState(DraftState):
    max_depth: int
    nodes: int = 0
    frontier: Sequence[Sequence[tuple[int, ...]]] = ()
    """The paths of each row's newest nodes."""


class PathHead(DraftHead):
    """Guesses by a table: random logits for every path, the root included; it speaks every third
    token from 1 on.

    `blind` makes them depend on the depth alone and come once for all nodes, as a Medusa head's do.
    """

    def __init__(self, vocab, max_depth=4, seed=0, scale=2.0, blind=False, dtype=torch.float64):
        nn.Module.__init__(self)
        self.vocab = vocab
        self.max_depth = max_depth
        self.seed = seed
        self.scale = scale
        self.blind = blind
        self.dtype = dtype
        self.feature_layers = ()

    draft_vocab_size = property(lambda self: self.vocab)

    def logits(self, path):
        key = len(path) if self.blind else sum((token + 1) * 97**i for i, token in enumerate(path))
        random = torch.Generator().manual_seed(1000 * self.seed + key)
        logits_V = torch.randn(self.vocab, generator=random, dtype=torch.float64)
        return (self.scale * logits_V).to(self.dtype)

    def target_tokens(self, draft_tokens):
        return 3 * draft_tokens + 1

    def begin(self, ends, batch_size, capacity, max_depth, nodes):
        self.allowed = nodes
        return DraftTreeState(ends, 0, max_depth)

    def observe(self, state, features_BAF, next_tokens_BA, lengths_B):
        return replace(state, depth=0, nodes=0, frontier=())

    def expand(self, state, tokens_BW, parents_BW):
        assert state.depth < state.max_depth and tokens_BW.shape == parents_BW.shape
        above = state.frontier
        if state.depth == 0:
            assert (parents_BW == -1).all() and tokens_BW.shape[1] == 1
            above = [[()]] * len(tokens_BW)  # which -1 indexes
        frontier = []
        for paths, tokens, parents in zip(above, tokens_BW.tolist(), parents_BW.tolist()):
            frontier.append([(*paths[parent], token) for token, parent in zip(tokens, parents)])
        nodes = state.nodes + tokens_BW.shape[1]
        assert nodes <= self.allowed, "more nodes are expanded than were announced"
        rows = []
        for paths in frontier:
            asked = paths[:1] if self.blind else paths
            rows.append(torch.stack([self.logits(path) for path in asked]))
        logits_BWV = torch.stack(rows)
        return logits_BWV, replace(state, depth=state.depth + 1, nodes=nodes, frontier=frontier)

    def initialize(self, ends, token_counts_V):
        raise NotImplementedError

    def forward(self, features, objective=None, ranks=1):
        raise NotImplementedError

    def server_config(self):
        raise NotImplementedError


def propose(head, policy, roots=(2, 5)):
    """The tree below each root."""
    drafter = tree_drafter(head, policy, ENDS)
    roots_B = torch.tensor(roots)
    empty = torch.empty(len(roots), 1, 0)
    drafter.begin(DraftContext(len(roots), 99, None, None))
    drafter.prefill(
        PrefillChunk(roots_B[:, None], roots_B[:, None], empty, torch.ones_like(roots_B))
    )
    tree = drafter.propose(roots_B)
    assert drafter.max_nodes == tree.tokens_BN.shape[1]
    return tree


def paths_of(tree, row):
    """Every node of a row as the tokens from the root to it; and what every tree must be."""
    size = int(tree.sizes_B[row])
    tokens, parents = tree.tokens_BN[row, :size].tolist(), tree.parents_BN[row, :size].tolist()
    assert parents[0] == -1 and all(
        0 <= parent < node for node, parent in enumerate(parents) if node
    )
    paths = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:]):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == size, "siblings must differ"
    assert max(map(len, paths)) - 1 <= tree.max_depth
    assert tree.structure.depths_BN[row, :size].tolist() == [len(path) - 1 for path in paths]
    return paths


def grown_slowly(head, root, shape):
    """EAGLE-2, sections 4.1 and 4.2, in plain Python: every candidate with its value, and the tree
    of the best."""
    width = min(shape.width, head.vocab)

    def children(path, value):
        """The best children of a node."""
        log_probs = head.logits(path).log_softmax(-1).tolist()
        best = sorted(range(head.vocab), key=lambda token: -log_probs[token])[:width]
        return {(*path, 3 * token + 1): value + log_probs[token] for token in best}

    layer = children((root,), 0.0)
    candidates = dict(layer)
    for _ in range(shape.depth - 1):
        expanded = sorted(layer, key=lambda path: -layer[path])[:width]
        layer = {
            path: value for own in expanded for path, value in children(own, layer[own]).items()
        }
        candidates |= layer
    best = sorted(candidates, key=lambda path: -candidates[path])[: shape.size - 1]
    return candidates, {(root,), *best}


# Dynamic trees.


def random_dynamic_shape(seed):
    random = torch.Generator().manual_seed(seed)
    limits = ((2, 30), (1, 5), (1, 6))  # of size, depth and width
    numbers = [int(torch.randint(low, high, (), generator=random)) for low, high in limits]
    return DynamicShape(*numbers)


@pytest.mark.parametrize("blind", [False, True], ids=["by path", "by depth"])
@pytest.mark.parametrize("seed", range(18))
def test_a_dynamic_tree_holds_the_best_of_all_candidates(seed, blind):
    shape, head = random_dynamic_shape(seed), PathHead(3 + seed % 6, seed=seed, blind=blind)
    tree = propose(head, shape)
    for row, root in enumerate((2, 5)):
        candidates, expected = grown_slowly(head, root, shape)
        found = paths_of(tree, row)
        assert set(found) == expected
        assert len(found) == min(shape.size, len(candidates) + 1)
        assert found == sorted(found, key=len), "layer by layer"
    assert tree.kind == "top_k" and tree.draft_probs_BNV is None


@pytest.mark.parametrize(
    ("dtype", "blind", "seed"),
    pairs([torch.bfloat16, torch.float32, torch.float64], [False, True], range(3)),
)
def test_a_child_that_is_certain_never_pushes_out_its_parent(seed, dtype, blind):
    """Of a head that is certain, best children are worth exactly what their parents are, all the
    way down."""
    head = PathHead(6, max_depth=5, seed=seed, scale=3000.0, blind=blind, dtype=dtype)
    assert head.logits((2,)).float().log_softmax(-1).max() == 0
    for size in (6, 7, 9, 14):
        tree = propose(head, DynamicShape(size, 5, 3))
        for row in range(2):
            paths = set(paths_of(tree, row))
            assert len(paths) == size and all(path[:-1] in paths for path in paths if len(path) > 1)
            best = (tree.tokens_BN[row, 0].item(),)
            for _ in range(5):  # what is certain is there, whole
                best = (*best, 3 * int(head.logits(best).argmax()) + 1)
                assert best in paths


@pytest.mark.parametrize("policy", [DynamicShape(60, 5, 2), TreeShape.chain(5)])
def test_trees_deeper_than_the_head_are_refused(policy):
    with refused("5 deep 4 tokens"):
        tree_drafter(PathHead(6), policy, ENDS)


# Static trees.


@pytest.mark.parametrize("blind", [False, True], ids=["by path", "by depth"])
@pytest.mark.parametrize("seed", range(12))
def test_a_static_trees_nodes_are_the_ranks_that_name_them(seed, blind):
    shape, head = random_shape(seed), PathHead(5, seed=seed, blind=blind)
    tree = propose(head, shape)
    for row, root in enumerate((2, 5)):
        expected = [(root,)]
        for ranks in shape.paths:
            path = (root,)
            for rank in ranks:
                path = (*path, 3 * int(head.logits(path).argsort(descending=True)[rank]) + 1)
            expected.append(path)
        assert paths_of(tree, row) == expected


# Sampled children.


@pytest.mark.parametrize("left", [0.75, 0.0])
def test_what_processors_leave_to_other_tokens_is_not_drawn_from(left):
    """Else the residual of a rejected draft would be taken from what was never drawn."""
    logits = torch.randn(1, 1, 4, dtype=torch.float64)
    head = SimpleNamespace(
        draft_vocab_size=4,
        target_tokens=lambda tokens: 3 * tokens + 1,  # 1, 4, 7 and 10
        target=SimpleNamespace(vocab_size=12),
        max_depth=2,
        feature_layers=(),
        begin=lambda *given: None,
    )

    def probs_of(whole_BWV):
        probs = left * whole_BWV.softmax(-1)
        probs[..., [0, 2]] = (1 - left) / 2
        return probs

    tree = tree_policy("drawn:branch:2x2")
    drafter = StaticTree(DraftModelState(head, ENDS), tree)
    drafter.begin(DraftContext(1, 8, RandomSampler(), probs_of))
    tokens_BWR, drawn_from_BWV = drafter.sample_children(logits, 3, 2)
    assert tokens_BWR.shape == (1, 3, 2) and set(tokens_BWR.flatten().tolist()) <= {1, 4, 7, 10}
    expected = torch.zeros(1, 3, 12, dtype=torch.float64)
    expected[..., [1, 4, 7, 10]] = logits.softmax(-1) if left else 0.0
    assert torch.allclose(drawn_from_BWV, expected)


# Chains that stop where the draft is unsure.


def test_a_sure_draft_goes_on_and_an_unsure_one_stops(target):
    """A model that drafts for itself: each length is where its own distribution first falls below
    the threshold."""
    threshold, length = 0.118, 5
    lm = SpeculativeLM(target, make_drafter(target, target, f"stop:{threshold}:chain:{length}"))
    output = generated(lm, torch.tensor([[1, 2, 3]]), max_new_tokens=60)
    ids, place = output.sequences[0].tolist(), 4
    probs_TV = target.model(output.sequences).logits[0].softmax(-1)
    drafted = []
    for record in output.stats.rows[0][:-1]:
        expected = 0
        while expected < length and float(probs_TV[place - 1 + expected].max()) >= threshold:
            expected += 1
        assert record.drafted == record.accepted == expected
        drafted.append(expected)
        place += record.returned
    assert place <= len(ids) and len(set(drafted)) > 2


def test_confidence_is_the_heads_own_estimate_or_the_probability_of_its_best_token():
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [9.0, 0.0, 0.0]])
    assert confidence(logits).tolist() == pytest.approx(logits.softmax(-1).amax(-1).tolist())
    assert confidence(logits, torch.tensor([0.0, 0.0])).tolist() == [0.5, 0.5]
