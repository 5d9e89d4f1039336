"""Tree search: static shapes from acceptance by depth and rank, and expected acceptance lengths.

The expected number of accepted tokens of a static tree is the sum over its nodes of the probability
that the path to them is accepted, taken as the product of a_{d,i}: how often the token at depth d
is the head's i-th best. Adding the node with the largest product greedily gives the best tree of
any size, as long as accuracies fall with rank (Medusa, arXiv:2401.10774, section 2.3.3). For
accuracies [0.6, 0.2] at both depths:

    node       [0]     [0, 0]    [1]     [0, 1]    [1, 0]    [1, 1]
    product    0.6     0.36      0.2     0.12      0.12      0.04
    tree of 4 nodes: the root, [0], [0, 0] and [1]; expected length 1 + 0.6 + 0.36 + 0.2 = 2.16
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from ..trees.tree_spec import DynamicShape, EarlyExitShape, SampledShape, TreePolicy, TreeShape
from .round_costs import RoundCosts

GPU_TOKENS = 128
"""Tokens of a GPU forward that costs hardly more than a forward of one token."""


def best_static_tree(accuracy_KI: Sequence[Sequence[float]], nodes: int) -> TreeShape:
    """The static tree of `nodes`, the root counted, with the largest expected acceptance length.

    `accuracy_KI` tells how often the true token at depth k, from 0, is the head's i-th best.

    Raises:
        ValueError: fewer than one node.
    """
    if nodes < 1:
        raise ValueError(f"a tree needs at least 1 node, its root, not {nodes}")
    paths: list[tuple[int, ...]] = []
    # Only a node's first child and its next sibling can be the best node that is not yet in the
    # tree. Entries are (-product, depth, path, product of the parent): heapq pops the smallest, so
    # the largest product, and of equal ones the shallower node.
    candidates: list[tuple[float, int, tuple[int, ...], float]] = [
        (-accuracy_KI[0][0], 1, (0,), 1.0)
    ]
    while candidates and len(paths) < nodes - 1:
        value, depth, path, parent = heapq.heappop(candidates)
        paths.append(path)
        rank = path[-1] + 1  # of the next sibling
        ranks = accuracy_KI[depth - 1]
        if rank < len(ranks):
            heapq.heappush(candidates, (-parent * ranks[rank], depth, (*path[:-1], rank), parent))
        if depth < len(accuracy_KI):
            heapq.heappush(
                candidates, (value * accuracy_KI[depth][0], depth + 1, (*path, 0), -value)
            )
    return TreeShape.from_paths(paths)


def expected_length(shape: TreeShape, accuracy_KI: Sequence[Sequence[float]]) -> float:
    """Acceptance length of a static tree: tokens per step, the bonus token counted."""
    length = 1.0
    # 1 for the bonus token, and for each node the probability that it is accepted.
    for path in shape.paths:
        length += math.prod(accuracy_KI[depth][rank] for depth, rank in enumerate(path))
    return length


def chain_length(rates: Sequence[float], gamma: int) -> float:
    """Acceptance length of a chain: 1 + a_1 + a_1 a_2 + ..., the bonus token counted.

    Args:
        rates: acceptance rate at each depth; the last one holds for deeper ones. One rate a for all
            gives (1 - a^(gamma+1)) / (1 - a) (Leviathan et al., arXiv:2211.17192, equation 1).
        gamma: draft length.
    """
    length = 1.0
    reached = 1.0
    for depth in range(gamma):
        reached *= rates[min(depth, len(rates) - 1)]
        length += reached
    return length


def by_speed(lengths: Mapping[TreePolicy, float], costs: RoundCosts) -> list[TreePolicy]:
    """Sort trees, the fastest first, by their acceptance lengths over the seconds of their rounds.

    The speed of a tree is F / (t_draft + t_target + the rest of a round) tokens per second, where F
    is its acceptance length (Sequoia, arXiv:2402.12374, section 4.2).
    """
    return sorted(lengths, key=lambda tree: -costs.rate(tree, lengths[tree]))


def default_accuracy(depth: int, ranks: int = 8) -> list[list[float]]:
    """Return accuracies by depth and rank for a head that was not measured.

    They fall by a fifth per depth and by half per rank.
    """
    accuracy_KI = []
    for level in range(depth):
        accuracy_KI.append([0.5 * 0.8**level * 0.5**rank for rank in range(ranks)])
    return accuracy_KI


@lru_cache(maxsize=256)
def default_length(policy: TreePolicy) -> float:
    """Acceptance length of a tree for a head that was not measured."""
    if isinstance(policy, TreeShape):
        ranks = 1 + max((path[-1] for path in policy.paths), default=0)
        return expected_length(policy, default_accuracy(policy.depth, ranks))
    if isinstance(policy, DynamicShape):
        return default_length(best_static_tree(default_accuracy(policy.depth), policy.size))
    if isinstance(policy, SampledShape):
        return default_length(policy.shape)
    assert isinstance(policy, EarlyExitShape)  # as if it never ended early
    return default_length(TreeShape.chain(policy.depth))


@lru_cache(maxsize=256)
def prune(shape: TreeShape, nodes: int) -> TreeShape:
    """Keep the `nodes` of a static tree that are accepted most often; at least its root.

    Acceptance is by `default_accuracy`.
    """
    if shape.size <= nodes:
        return shape
    # A parent is accepted more often than its children, and a sibling more often than the next one.
    # So the first nodes in this order form a tree.
    ordered = sorted(
        shape.paths,
        key=lambda path: (-math.prod(0.8 * 0.5**rank for rank in path), len(path), path),
    )
    return TreeShape.from_paths(ordered[: max(nodes, 1) - 1])


def batch_budget(policy: TreePolicy, device: torch.device) -> int:
    """Tokens that a forward over a batch should hold.

    On a CPU more tokens cost more time, so a batch gets as many as the tree that was chosen for one
    row. A GPU is bound by its memory bandwidth up to some hundred tokens.
    """
    return policy.size if device.type == "cpu" else max(policy.size, GPU_TOKENS)


def default_dynamic_tree(max_depth: int, nodes: int) -> DynamicShape:
    """Return a dynamic tree of a given size.

    It expands a third of its nodes per level, at least two and at most EAGLE-2's ten.
    """
    return DynamicShape(nodes, max_depth, min(10, max(2, nodes // 3)))
