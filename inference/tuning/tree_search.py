"""Which tree to draft: static shapes from measured acceptance, and what a draft of some length gains.

The expected number of accepted tokens of a static tree is the sum over its nodes of the probability that the path to
them is accepted, taken as the product of a_{d,i}: how often the token at depth d is the head's i-th best. Adding the
node with the largest product, again and again, gives the best tree of any size, as long as accuracies fall with rank
(Medusa, section 2.3.3).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from ..tuning.tree_spec import DynamicShape, SampledShape, TreePolicy, TreeShape
from .machine import hardware

GPU_TOKENS = 128
"""Tokens that a forward on a GPU holds for hardly more than the price of one."""


def best_static_tree(accuracy_KI: Sequence[Sequence[float]], nodes: int) -> TreeShape:
    """The static tree of a given size with the largest expected acceptance length.

    Args:
        accuracy_KI: at depth k (from 0), how often the true token is the head's i-th best.
        nodes: size, the root counted.

    Raises:
        ValueError: fewer than one node.
    """
    if nodes < 1:
        raise ValueError(f"a tree needs at least 1 node, its root, not {nodes}")
    paths: list[tuple[int, ...]] = []
    # Only a node's first child and its next sibling can be the best that is not yet in the tree. Ties go to the
    # shallower node.
    candidates: list[tuple[float, int, tuple[int, ...], float]] = [(-accuracy_KI[0][0], 1, (0,), 1.0)]
    while candidates and len(paths) < nodes - 1:
        value, depth, path, parent = heapq.heappop(candidates)
        paths.append(path)
        rank, ranks = path[-1] + 1, accuracy_KI[depth - 1]
        if rank < len(ranks):
            heapq.heappush(candidates, (-parent * ranks[rank], depth, (*path[:-1], rank), parent))
        if depth < len(accuracy_KI):
            heapq.heappush(candidates, (value * accuracy_KI[depth][0], depth + 1, (*path, 0), -value))
    return TreeShape.from_paths(paths)


def expected_length(shape: TreeShape, accuracy_KI: Sequence[Sequence[float]]) -> float:
    """Tokens per round of a static tree, the bonus token counted."""
    return 1 + sum(math.prod(accuracy_KI[depth][rank] for depth, rank in enumerate(path)) for path in shape.paths)


def chain_length(rates: Sequence[float], gamma: int) -> float:
    """Tokens a round on a chain of `gamma` drafts, the bonus token counted: 1 + a_1 + a_1 a_2 + ...

    Args:
        rates: acceptance rate at each depth; deeper ones are as the last. One rate a for all gives
            (1 - a^(gamma+1)) / (1 - a) (Leviathan et al., arXiv:2211.17192, equation 1).
        gamma: drafts.
    """
    return 1 + sum(math.prod(rates[min(i, len(rates) - 1)] for i in range(depth)) for depth in range(1, gamma + 1))


def time_factor(
    rates: Sequence[float], gamma: int, draft_cost: float, check_cost: Callable[[int], float] = lambda nodes: 1.0
) -> float:
    """How much sooner a text is written than by plain steps (arXiv:2211.17192, theorem 3.8, with measured checks).

    Args:
        rates: see `chain_length`.
        gamma: drafts.
        draft_cost: time of one draft in plain steps (the paper's c).
        check_cost: time of a target forward over so many tokens, in plain steps; 1 in the paper.
    """
    return chain_length(rates, gamma) / (gamma * draft_cost + check_cost(gamma + 1))


def operations_factor(rates: Sequence[float], gamma: int, draft_operations: float) -> float:
    """How many more operations a text takes than by plain steps (arXiv:2211.17192, theorem 3.11).

    Args:
        rates: see `chain_length`.
        gamma: drafts.
        draft_operations: of one draft over those of one plain step.
    """
    return (gamma * draft_operations + gamma + 1) / chain_length(rates, gamma)


def best_draft_length(
    rates: Sequence[float], draft_cost: float, check_cost: Callable[[int], float] = lambda nodes: 1.0, most: int = 32
) -> int:
    """The number of drafts that gains most; 0 where none gains anything. See `time_factor`."""
    return max(range(most + 1), key=lambda gamma: time_factor(rates, gamma, draft_cost, check_cost))


def default_accuracy(depth: int, ranks: int = 8) -> list[list[float]]:
    """Of a head that was not measured: accuracies that fall by a fifth per depth and by half per rank."""
    return [[0.5 * 0.8**d * 0.5**rank for rank in range(ranks)] for d in range(depth)]


@lru_cache(maxsize=256)
def default_length(policy: TreePolicy) -> float:
    """Tokens per round of a tree of a head that was not measured, the bonus token counted."""
    if isinstance(policy, TreeShape):
        ranks = 1 + max((path[-1] for path in policy.paths), default=0)
        return expected_length(policy, default_accuracy(policy.depth, ranks))
    if isinstance(policy, DynamicShape):
        return default_length(best_static_tree(default_accuracy(policy.depth), policy.size))
    return default_length(policy.shape if isinstance(policy, SampledShape) else TreeShape.chain(policy.length))


@lru_cache(maxsize=256)
def cut(shape: TreeShape, nodes: int) -> TreeShape:
    """The part of a static tree that is worth most if accuracies fall as `default_accuracy` says; at least its root."""
    if shape.size <= nodes:
        return shape
    # A parent is worth more than its children and a sibling more than the next, so what is left is a tree.
    worth = sorted(shape.paths, key=lambda path: (-math.prod(0.8 * 0.5**rank for rank in path), len(path), path))
    return TreeShape.from_paths(worth[: max(nodes, 1) - 1])


def machine(device: torch.device, compiled: bool) -> str:
    """By which word a head remembers the tree that was fastest somewhere."""
    return hardware(device) + (", compiled" if compiled else "")


def batch_budget(policy: TreePolicy, device: torch.device) -> int:
    """Tokens that a forward over a batch should hold.

    On a CPU more tokens cost more time, so a batch gets as many as the tree that was chosen for one row. A GPU waits
    for its memory until there are some hundred.
    """
    return policy.size if device.type == "cpu" else max(policy.size, GPU_TOKENS)


def default_dynamic_tree(max_depth: int, nodes: int) -> DynamicShape:
    """A dynamic tree of a given size: a third of it expanded per layer, and no more than EAGLE-2's ten."""
    return DynamicShape(nodes, max_depth, min(10, max(2, nodes // 3)))
