"""The draws of a round: the node, the child tried there, the random number and the outcome of each.

An acceptance rule calls its sampler in an order that depends on the tree alone: these functions say
which call was for which child. What was drawn, and with what probability, is the rule's own.

A draw is {"n": node, "c": child or None, "kind", "u", "limit", "ok"}:

    accept    the uniform number "u" was below the acceptance probability "limit", or not
    typical   the target's probability "u" of the child was above the threshold "limit", or not;
              no random number
    best      "token" is the target's best one after n; c is the child that has it
    sample    "token" was drawn after n, by "u" from the cumulative distribution, or by a race, in
              which each token's "time" is an exponential number over its probability and the
              first wins; c is the child that has it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...inference.trees.verify import depth_first

Draw = dict[str, Any]
Trial = tuple[float, float, float]
"""A call of `RandomSampler.accept`: uniform number, probability, and 1 if it was accepted."""


@dataclass(frozen=True)
class HostTree:
    """A draft tree on the host, and the path that was accepted."""

    tokens: list[int]
    parents: list[int]
    size: int
    """Nodes that are not padding."""
    path: list[int]
    """Accepted nodes, the root first."""
    next_token: int
    """The token after the path."""
    depth: int
    """Depth for which the tree was made."""
    children: list[list[int]] = field(init=False)
    """Of each node, padding included."""

    def __post_init__(self) -> None:
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        object.__setattr__(self, "children", children)

    def after(self, step: int) -> tuple[int | None, int]:
        """The child that follows the path's node number `step`, and its token.

        At the path's end, None and the bonus token.
        """
        if step + 1 == len(self.path):
            return None, self.next_token
        child = self.path[step + 1]
        return child, self.tokens[child]


def best_draws(tree: HostTree) -> list[Draw]:
    """Draws of greedy decoding: the best token at each node of the path."""
    draws = []
    for step, node in enumerate(tree.path):
        child, token = tree.after(step)
        draws.append({"n": node, "c": child, "kind": "best", "u": None, "token": token})
    return draws


def sampled_draws(
    tree: HostTree, uniform: Sequence[float] | None, times: Sequence[float], won: Sequence[float]
) -> list[Draw]:
    """Draws of the rule point_mass: the token that was drawn at each node of the path.

    Args:
        tree: the tree.
        uniform: the number that was used at each node; None for a race.
        times: in a race, the time of each node's token after its parent.
        won: in a race, the time of the winner after each node.
    """
    draws = []
    for step, node in enumerate(tree.path):
        child, token = tree.after(step)
        draw: Draw = {
            "n": node,
            "c": child,
            "kind": "sample",
            "u": None if uniform is None else uniform[node],
            "token": token,
        }
        if uniform is None:
            others = [[other, times[other]] for other in tree.children[node] if other < tree.size]
            draw |= {"time": won[node], "times": others}
        draws.append(draw)
    return draws


def walked_draws(
    tree: HostTree, q: Sequence[float], trials: Sequence[Trial], uniform: float
) -> list[Draw]:
    """Return the draws of the rules that walk from the root, child by child.

    A child of draft probability 0 is not tried.
    """
    # The rule calls its sampler for every depth and every possible sibling, also where a row has no
    # child or has stopped: all calls are consumed, and those of real trials are kept.
    draws = []
    calls = iter(trials)
    node = 0
    walking = True
    most = max(map(len, tree.children))
    for _ in range(tree.depth):
        accepted = 0
        for sibling in range(most):
            number, limit, ok = next(calls)
            children = tree.children[node]
            child = children[sibling] if sibling < len(children) else 0  # 0: no such child
            if walking and not accepted and child and q[child] > 0:
                draws.append(_trial(node, child, number, limit, ok))
                accepted = child if ok else 0
        walking = accepted > 0
        node = accepted or node
    return [*draws, _last(tree, uniform)]


def toured_draws(
    tree: HostTree, q: Sequence[float], trials: Sequence[Trial], uniform: float
) -> list[Draw]:
    """Draws of the rules that visit leaf by leaf: a node is tried after all nodes below it."""
    draws = []
    calls = iter(trials)
    for parent, node, leaving in depth_first(tree.children):
        # A node is tried when the tour leaves it; the first that is accepted ends the tour.
        if not leaving:
            continue
        number, limit, ok = next(calls)
        if q[node] > 0:
            draws.append(_trial(parent, node, number, limit, ok))
        if ok:
            break
    return [*draws, _last(tree, uniform)]


def typical_draws(tree: HostTree, p: Sequence[float], threshold: Sequence[float]) -> list[Draw]:
    """Return the decisions of typical acceptance on each child of a plausible node.

    The child's target probability is compared with the threshold after that node.
    """
    draws = []
    plausible = {0}  # the root, and nodes above the threshold below it
    for node in range(1, tree.size):
        parent = tree.parents[node]
        if parent in plausible:
            ok = p[node] > threshold[parent]
            draws.append(_trial(parent, node, p[node], threshold[parent], ok) | {"kind": "typical"})
            if ok:
                plausible.add(node)
    # The bonus token is the target's best one.
    last = {"n": tree.path[-1], "c": None, "kind": "best", "u": None, "token": tree.next_token}
    return [*draws, last]


def node_status(tree: HostTree, draws: Sequence[Draw], follows: bool) -> list[int]:
    """Status of each node: 1 accepted, 0 tried and not accepted, -1 never reached.

    A rule that `follows` chosen tokens compares all children of a node with the one token.
    """
    if follows:
        tried = [child for node in tree.path for child in tree.children[node]]
    else:
        tried = [draw["c"] for draw in draws if draw["c"] is not None]
    status = [-1] * len(tree.tokens)
    # Accepted nodes were tried, too: they overwrite the 0.
    for node in tried:
        status[node] = 0
    for node in tree.path:
        status[node] = 1
    return status[: tree.size]


def _trial(node: int, child: int, number: float, limit: float, ok: float) -> Draw:
    """The trial of a child after a node."""
    return {"n": node, "c": child, "kind": "accept", "u": number, "limit": limit, "ok": bool(ok)}


def _last(tree: HostTree, uniform: float) -> Draw:
    """The draw of the bonus token."""
    return {"n": tree.path[-1], "c": None, "kind": "sample", "u": uniform, "token": tree.next_token}
