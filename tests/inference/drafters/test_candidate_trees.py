"""The trees that are tried where none is named."""

from __future__ import annotations

import block_heads
import pytest
import torch
from helpers import head_for

from headstart.heads import CheckpointMetadata
from headstart.inference import DynamicShape, TreeShape
from headstart.inference.drafters.by_name import auto_trees
from headstart.inference.drafters.candidate_trees import candidate_chains, candidate_trees
from headstart.inference.trees.tree_spec import EarlyExitShape
from headstart.inference.tuning.round_costs import RoundCosts
from headstart.inference.tuning.tree_search import default_length

CHEAP = RoundCosts({1: 1.0, 2: 1.0}, 0.01)
DEAR = RoundCosts({1: 1.0, 2: 2.0}, 0.5)
STEEP = RoundCosts({1: 1.0, 32: 1.5, 64: 4.0}, 0.01)
ASSUMED = RoundCosts.assumed(torch.device("cpu"))


@pytest.mark.parametrize(
    ("stored", "costs", "sizes"),
    [
        (None, ASSUMED, [2, 4, 8, 16]),
        (None, CHEAP, [2, 4, 8, 16, 32, 60]),
        (None, STEEP, [2, 4, 8, 16, 32]),
        (DynamicShape(12, 7, 4), ASSUMED, [2, 4, 8, 12]),
    ],
)
def test_the_candidates_fit_the_machine(target, stored, costs, sizes):
    trees = candidate_trees(head_for(target, "medusa", num_heads=4), stored, costs)
    assert sorted(tree.size for tree in trees) == sizes


def test_the_candidates_fit_the_head_and_begin_with_the_likeliest(target):
    head = head_for(target, "medusa", num_heads=4)
    cheap = candidate_trees(head, None, CHEAP)
    assert sorted(tree.depth for tree in cheap) == [1, 3, 4, 4, 4, 4]
    assert cheap[0].size == 60
    assert candidate_trees(head, None, DEAR)[0].size == 2
    short = head_for(target, "medusa", num_heads=1)
    assert {tree.depth for tree in candidate_trees(short, None, CHEAP)} == {1}


def test_chains_are_as_long_as_the_head_drafts(target):
    chains = candidate_chains(head_for(target, "medusa", num_heads=5), CHEAP)
    assert sorted(chain.depth for chain in chains) == [1, 2, 3, 5]


def test_a_head_that_estimates_its_acceptance_offers_a_chain_that_ends_where_a_token_does_not_pay():
    # each token of a chain costs 0.15 plain steps
    costs = RoundCosts({1: 1.0, 2: 1.1, 8: 1.7}, 0.05)
    sure = candidate_trees(block_heads.block_head({"block_size": 4}, name="dspark"), None, costs)
    without = block_heads.block_head({"block_size": 4, "confidence": False}, name="dspark")
    unsure = candidate_trees(without, None, costs)
    (chain,) = [tree for tree in sure if tree not in unsure]
    assert isinstance(chain, EarlyExitShape)
    assert (chain.depth, chain.threshold) == (4, pytest.approx(0.15))


def test_a_tree_of_another_machine_is_only_a_hint(medusa_head):
    metadata = CheckpointMetadata(tree="chain:2", measured={"fastest": {"here": "chain:3"}})
    assert auto_trees(medusa_head, metadata, "here", ASSUMED) == [TreeShape.chain(3)]
    assert TreeShape.chain(3) not in auto_trees(medusa_head, metadata, "elsewhere", ASSUMED)


def test_expected_lengths_are_those_of_the_model():
    assert default_length(TreeShape.chain(2)) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    assert default_length(TreeShape.from_paths([[0], [1]])) == pytest.approx(1 + 0.5 + 0.25)
    assert default_length(DynamicShape(4, 3)) == pytest.approx(1 + 0.5 + 0.25 + 0.5 * 0.4)
