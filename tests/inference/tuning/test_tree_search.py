from __future__ import annotations

import itertools
import math

import pytest
import torch
from messages import refused

from headstart.inference import TreeShape
from headstart.inference.tuning.tree_search import best_static_tree


def expected_length(accuracy, shape):
    """Tokens per round: the root's, and for every node the product of the accuracies on its
    path."""
    return 1 + sum(
        math.prod(accuracy[depth][rank] for depth, rank in enumerate(path)) for path in shape.paths
    )


def all_trees(depth, ranks, size):
    """Every tree of `size` nodes, by brute force."""
    paths = [
        path for d in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=d)
    ]
    for chosen in itertools.combinations(paths, size - 1):
        if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
            yield TreeShape.from_paths(chosen)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [2, 4, 5])
def test_no_tree_of_the_same_size_is_better(seed, size):
    accuracy = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    accuracy = accuracy.sort(descending=True).values.tolist()
    best = best_static_tree(accuracy, size)
    assert best.size == size
    assert expected_length(accuracy, best) == pytest.approx(
        max(expected_length(accuracy, tree) for tree in all_trees(2, 3, size))
    )


def test_ranks_may_be_out_of_order_without_breaking_the_tree():
    shape = best_static_tree([[0.2, 0.5, 0.1], [0.3, 0.3, 0.0]], 6)
    assert shape.size == 6  # from_paths has checked that every node has its parent


def test_a_small_vocabulary_ends_the_tree():
    assert best_static_tree([[0.5, 0.25]], 16).size == 3


def test_a_tree_without_its_root_is_refused():
    with refused("1 node"):
        best_static_tree([[0.5]], 0)
