"""The trees that adaptive speculation chooses from where none is named."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...heads.base import DraftHead
from ..trees.tree_spec import EarlyExitShape, TreePolicy, TreeShape
from ..tuning.round_costs import RoundCosts
from ..tuning.tree_search import by_speed, chain_length, default_dynamic_tree, default_length

CANDIDATE_SIZES = (2, 4, 8, 16, 32, 60)
"""Nodes of the trees that may be tried, the root counted: each twice as large."""
CANDIDATE_LENGTHS = (1, 2, 3, 5, 7)
"""Tokens of the chains that are tried where trees do not pay."""
BEST_RATE = 0.8
"""Acceptance rate at every depth at which a candidate must pay: probing a hopeless one is a
loss."""


def candidate_trees(
    head: DraftHead, hint: TreePolicy | None, costs: RoundCosts
) -> list[TreePolicy]:
    """The trees to choose from where none is named, the most promising first.

    They are a chain of one token, and dynamic trees. The size of `hint`, a tree that was fast on
    another machine, replaces the nearest. A head that estimates its acceptance rate also offers a
    chain that ends, or a round without drafts, where one token more is less likely to be accepted
    than the share of a plain step that it costs.
    """
    sizes = list(CANDIDATE_SIZES)
    if hint is not None and 2 <= hint.size <= sizes[-1]:
        nearest = min(sizes, key=lambda size: abs(math.log(size / hint.size)))
        sizes[sizes.index(nearest)] = hint.size

    trees: list[TreePolicy] = []
    for size in sizes:
        if size == 2:
            trees.append(TreeShape.chain(1))
        else:
            depth = min(head.max_depth, size.bit_length())  # twice as large, a level deeper
            trees.append(default_dynamic_tree(depth, size))
    if head.estimates_acceptance and head.max_depth > 1:
        longest = head.max_depth
        more_seconds = costs.seconds(longest + 1, longest) - costs.seconds(2, 1)
        seconds_per_token = more_seconds / (longest - 1)
        share = seconds_per_token / costs.seconds(1, 0)
        trees.append(EarlyExitShape(longest, min(max(share, 0.0), 1.0)))
    return _promising(trees, costs)


def candidate_chains(head: DraftHead, costs: RoundCosts) -> list[TreePolicy]:
    """The chains to choose from where trees do not pay, the most promising first."""
    lengths = sorted({min(length, head.max_depth) for length in CANDIDATE_LENGTHS})
    return _promising([TreeShape.chain(length) for length in lengths], costs)


def _promising(trees: Sequence[TreePolicy], costs: RoundCosts) -> list[TreePolicy]:
    """The trees that pay at `BEST_RATE`, or else the first one, by their expected speed."""
    lengths = {}
    for tree in trees:
        best_length = chain_length([BEST_RATE], tree.depth)
        if costs.rate(tree, best_length) * costs.plain > 1:
            lengths[tree] = default_length(tree)
    return by_speed(lengths, costs) or [trees[0]]
