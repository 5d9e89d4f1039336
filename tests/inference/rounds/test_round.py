"""The contract of a round: every drafter beside everything that limits what a target verifies.

The text is the target's, and drafters and observers learn which of the proposed nodes were
verified.
"""

from __future__ import annotations

import itertools

import axes
import pytest
import torch
from axes import VOCAB
from helpers import check_identity, continued, head_for, limited, one_row_tree
from messages import warned

from headstart.inference import Drafter, DraftTree, RoundObserver, SpeculativeLM
from headstart.inference.rounds.limits import Limits, chain_of, first_nodes

TARGETS = {"memory": "dense", "chains": "chains only", "border": "border"}
"""By what limits the target."""
DRAFTERS = ("prompt-lookup", "model", "eagle", "head and history", "mine")
NODES = 3
"""Nodes for which memory suffices."""


def target_within(limit):
    target, _ = axes.target_of(TARGETS[limit], "eager")
    return target


class Mine(Drafter):
    """Two branches after the root, the second one longer: tokens of the text, and any others."""

    max_nodes = 5

    def __init__(self):
        self.rounds = []

    def propose(self, roots_B):
        a, b = (roots_B + 1) % VOCAB, (roots_B + 2) % VOCAB
        tokens_BN = torch.stack([roots_B, a, b, a, b], dim=1)
        parents_BN = torch.tensor([[-1, 0, 0, 2, 3]]).expand(len(roots_B), -1)
        return DraftTree(tokens_BN, parents_BN, torch.full_like(roots_B, 5), max_depth=3)

    def observe(self, finished):
        self.rounds.append(finished)


class Checking(RoundObserver):
    """Checks each round's two numberings against each other."""

    def __init__(self):
        self.cut = 0

    def round(self, finished):
        proposed, verified = finished.proposed, finished.verified
        if finished.nodes is None:
            assert verified is proposed
            return
        self.cut += 1
        assert torch.equal(verified.tokens_BN, proposed.tokens_BN[:, list(finished.nodes)])
        for node, parent in enumerate(verified.parents_BN[0].tolist()):
            above = -1 if parent < 0 else finished.nodes[parent]
            assert int(proposed.parents_BN[0, finished.nodes[node]]) == above
        assert finished.output.logits_BNV.shape[1] == verified.tokens_BN.shape[1]


def decoder_within(target, drafter, limit):
    """A decoder that drafts in every round."""
    if drafter == "mine":
        return SpeculativeLM(target, Mine())
    options = axes.DRAFTERS[drafter](target, target)
    if drafter != "prompt-lookup":
        options["tree"] = "chain:3" if limit == "chains" else "dynamic:8:3:3"
    return SpeculativeLM.from_pretrained(target, adaptive=False, compile=False, **options)


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("limit", TARGETS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_beside_every_limit(monkeypatch, drafter, limit):
    target = target_within(limit)
    lm = decoder_within(target, drafter, limit)
    checking = Checking()
    lm.observers.append(checking)
    part = [3, 6, 4, 1, 5]
    prompts = [torch.tensor(part * 2), torch.tensor(part)][: 1 if target.engine.one_row else 2]

    def sampled_text(lm):
        draws = torch.Generator().manual_seed(1)
        return continued(lm, prompts[:1], generator=draws, max_new_tokens=30, do_sample=True)[0]

    expected = sampled_text(SpeculativeLM(target))
    if limit == "memory":
        limited(monkeypatch, lm, NODES)
    for _ in range(2):  # the second time with what the first has left behind
        check_identity(lm, prompts, max_new_tokens=30, no_repeat_ngram_size=4)
    assert sampled_text(lm) == expected
    if limit == "chains" and drafter != "mine":
        assert checking.cut == 0
    elif drafter not in ("prompt-lookup", "head and history"):  # a history drafts where it matches
        assert checking.cut > 0


class Features(RoundObserver):
    """Reads the target's last states, of prompts and of rounds."""

    feature_layers = (-1,)

    def __init__(self):
        self.widths = set()

    def begin(self, call):
        assert call.feature_layers == (-1,)

    def prefill(self, rows, starts, chunk):
        self.widths.add(chunk.features_BTF.shape[-1])

    def round(self, finished):
        self.widths.add(finished.verdict.features_BAF.shape[-1])


@pytest.mark.filterwarnings("ignore:memory ran out")
def test_observers_get_their_features_after_memory_has_run_out(monkeypatch):
    """Also those that the drafter, which then drafts no more, had asked for."""
    target = target_within("memory")
    lm = SpeculativeLM.from_pretrained(
        target, head_for(target, "medusa"), tree="chain:2", adaptive=False
    )
    limited(monkeypatch, lm, 1)
    features = Features()
    lm.observers.append(features)
    prompts = [torch.tensor([3, 6, 4, 1, 5]), torch.tensor([1, 2, 3, 4, 5])]
    _, output = continued(lm, prompts, max_new_tokens=9, max_batch_size=1)
    assert features.widths == {target.info.hidden_size}
    assert output.stats.rows[0][-1].fallback == "out_of_memory"


def tree_with(parents):
    """Its tokens are 10, 11, 12, ..."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return one_row_tree(range(10, 10 + len(parents)), parents, max(depths))


def test_a_cut_names_the_nodes_that_it_keeps():
    target = target_within("chains")
    tree = tree_with([-1, 0, 0, 2, 3])
    chain, path = chain_of(target, tree, 4)
    assert path == [0, 2, 3, 4]
    assert chain.tokens_BN.tolist() == [[10, 12, 13, 14]] and chain.in_order
    first, nodes = first_nodes(tree, 3)
    assert list(nodes) == [0, 1, 2]
    assert first.parents_BN.tolist() == [[-1, 0, 0]]
    assert first.sizes_B.tolist() == [3]  # a recurrent target reads the path to each of them
    assert first.max_depth == 2
    assert first_nodes(tree, 5) == (tree, None)
    # Memory leaves half of the tree that failed, not of the largest that the drafter makes.
    limits = Limits(target, 60)
    with warned("memory 5 2"):
        limits.shrink(tree, "top_k")
    cut, nodes = limits.cut(tree, [4])  # both: a path of the two nodes that memory allows
    assert list(nodes) == [0, 1] and cut.tokens_BN.tolist() == [[10, 11]]
    with warned("memory 2 1"):
        limits.shrink(None, "top_k")  # while a tree was drafted
    assert limits.gave_up


def test_cuts_of_random_trees_are_trees():
    random = torch.Generator().manual_seed(0)
    target = target_within("chains")
    for nodes, most in itertools.product(range(2, 12), (1, 2, 5, 20)):
        parents = [-1] + [
            int(torch.randint(node, (), generator=random)) for node in range(1, nodes)
        ]
        tree = tree_with(parents)
        verified, kept = Limits(target, most).cut(tree, [4])
        kept = range(nodes) if kept is None else kept
        assert len(kept) <= most
        assert torch.equal(verified.tokens_BN, tree.tokens_BN[:, list(kept)])
        assert verified.parents_BN[0].tolist() == [-1, *range(len(kept) - 1)]
        assert [parents[node] for node in kept][1:] == list(kept)[:-1]
