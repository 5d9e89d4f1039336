"""The trees that are tried where none is named."""

from __future__ import annotations

import block_heads
import pytest
import torch

from headstart.heads import CheckpointMetadata, build_head
from headstart.inference import DynamicShape, TreeShape
from headstart.inference.drafters.by_name import auto_trees
from headstart.inference.drafters.candidate_trees import candidate_chains, candidate_trees
from headstart.inference.trees.tree_spec import EarlyExitShape
from headstart.inference.tuning.round_costs import RoundCosts
from headstart.inference.tuning.tree_search import default_length

VOCAB = 20


def a_head(target, num_heads=3):
    return build_head("medusa", {"num_heads": num_heads}, target.info)


def test_the_candidates_fit_the_head_and_the_machine(target):
    head = a_head(target, num_heads=4)
    cheap = RoundCosts({1: 1.0, 2: 1.0}, 0.01)
    dear = RoundCosts({1: 1.0, 2: 2.0}, 0.5)
    assumed = RoundCosts.assumed(torch.device("cpu"))

    def sizes(*given):
        return sorted(tree.size for tree in candidate_trees(head, *given))

    assert sizes(None, assumed) == [2, 4, 8, 16]
    assert sizes(None, cheap) == [2, 4, 8, 16, 32, 60]
    assert sizes(None, RoundCosts({1: 1.0, 32: 1.5, 64: 4.0}, 0.01)) == [2, 4, 8, 16, 32]
    assert sizes(DynamicShape(12, 7, 4), assumed) == [2, 4, 8, 12]
    assert sorted(tree.depth for tree in candidate_trees(head, None, cheap)) == [1, 3, 4, 4, 4, 4]
    assert candidate_trees(head, None, dear)[0].size == 2
    assert candidate_trees(head, None, cheap)[0].size == 60
    short = a_head(target, num_heads=1)
    assert {tree.depth for tree in candidate_trees(short, None, cheap)} == {1}


def test_chains_are_as_long_as_the_head_drafts(target):
    cheap = RoundCosts({1: 1.0, 2: 1.0}, 0.01)
    chains = candidate_chains(a_head(target, num_heads=5), cheap)
    assert sorted(chain.depth for chain in chains) == [1, 2, 3, 5]


def test_a_head_that_estimates_its_acceptance_offers_a_chain_that_ends_where_a_token_does_not_pay():
    # each token of a chain costs 0.15 plain steps
    costs = RoundCosts({1: 1.0, 2: 1.1, 8: 1.7}, 0.05)
    sure, unsure = (
        candidate_trees(block_heads.build({"block_size": 4, **options}, name="dspark"), None, costs)
        for options in ({}, {"confidence": False})
    )
    (chain,) = [tree for tree in sure if tree not in unsure]
    assert (
        isinstance(chain, EarlyExitShape)
        and chain.depth == 4
        and chain.threshold == pytest.approx(0.15)
    )


def test_a_tree_of_another_machine_is_only_a_hint(target):
    head, costs = a_head(target), RoundCosts.assumed(torch.device("cpu"))
    metadata = CheckpointMetadata(tree="chain:2", measured={"fastest": {"here": "chain:3"}})
    assert auto_trees(head, metadata, "here", costs) == [TreeShape.chain(3)]
    assert TreeShape.chain(3) not in auto_trees(head, metadata, "elsewhere", costs)


def test_expected_lengths_are_those_of_the_model():
    assert default_length(TreeShape.chain(2)) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    assert default_length(TreeShape.from_paths([[0], [1]])) == pytest.approx(1 + 0.5 + 0.25)
    assert default_length(DynamicShape(4, 3)) == pytest.approx(1 + 0.5 + 0.25 + 0.5 * 0.4)
