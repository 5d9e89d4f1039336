"""Tree specs: which nodes a draft tree has, in the words that users and checkpoints write, and their parser."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

TreeKind = Literal["top_k", "sampled_chain", "sampled_independent", "sampled_without_replacement"]
"""How the children of a node are made, which decides the acceptance rules that are exact: the draft's top-k tokens; one
sampled child; several, sampled independently; several, sampled without replacement."""


@dataclass(frozen=True)
class Level:
    """One depth of a `TreeShape`: which of a frontier's best tokens become nodes, and which nodes are expanded."""

    width: int
    """How many best tokens of each frontier node are looked at."""
    picks: tuple[int, ...]
    """For each node of this depth: frontier index * width + rank."""
    frontier: tuple[int, ...]
    """Which nodes of this depth have children, as indices into `picks`."""
    parents: tuple[int, ...]
    """For each of those: the index of its parent in the frontier that this level was picked from."""


@dataclass(frozen=True)
class TreeShape:
    """A static tree: every node is named by ranks, [0, 2] being the third-best child of the root's best child."""

    paths: tuple[tuple[int, ...], ...]
    """All nodes but the root, sorted by depth and then by ranks."""

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> TreeShape:
        """Check and sort.

        Raises:
            ValueError: a repeated path, a negative rank, or a path whose parent is missing; named.
        """
        nodes = [tuple(path) for path in paths]
        known = {(), *nodes}
        for path in nodes:
            if not path or any(not isinstance(rank, int) or rank < 0 for rank in path):
                raise ValueError(f"tree path {list(path)} must hold at least one rank, each an integer from 0")
            if path[:-1] not in known:
                raise ValueError(f"tree path {list(path)} has no parent {list(path[:-1])} in the tree")
        if len(known) != len(nodes) + 1:
            raise ValueError("a tree path stands twice: " + str(next(list(p) for p in nodes if nodes.count(p) > 1)))
        return cls(tuple(sorted(nodes, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """The best guess at each depth: what most servers run."""
        return cls.from_paths([[0] * depth for depth in range(1, length + 1)])

    @classmethod
    def branching(cls, children: Sequence[int]) -> TreeShape:
        """So many children of the root, of each of them, and so on."""
        depths = [itertools.product(*map(range, children[:depth])) for depth in range(1, len(children) + 1)]
        return cls.from_paths(list(itertools.chain.from_iterable(depths)))

    @property
    def size(self) -> int:
        """Number of nodes, the root counted."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path, the root not counted."""
        return max(map(len, self.paths), default=0)

    @cached_property
    def is_chain(self) -> bool:
        """Whether each node has one child at most."""
        return self.size == self.depth + 1

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """For every node, the root first: the index of its parent."""
        index = {(): 0, **{path: i for i, path in enumerate(self.paths, start=1)}}
        return (-1, *(index[path[:-1]] for path in self.paths))

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The nodes that have children; the root always counts, unless it is alone."""
        return tuple(sorted(set(self.parents[1:])))

    @property
    def expanded(self) -> int:
        """Nodes whose children a draft asks for."""
        return max(1, len(self.inner))

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """What has to be expanded at each depth, from the root on."""
        levels: list[Level] = []
        frontier: list[tuple[int, ...]] = [()]
        for depth in range(1, self.depth + 1):
            children = [path for path in self.paths if len(path) == depth]
            width = 1 + max(path[-1] for path in children)
            picks = tuple(frontier.index(path[:-1]) * width + path[-1] for path in children)
            expanded = [path for path in children if any(node[:-1] == path for node in self.paths)]
            levels.append(
                Level(
                    width=width,
                    picks=picks,
                    frontier=tuple(children.index(path) for path in expanded),
                    parents=tuple(frontier.index(path[:-1]) for path in expanded),
                )
            )
            frontier = expanded
        return tuple(levels)


ROOT = TreeShape(())


@dataclass(frozen=True)
class DynamicShape:
    """Limits of a tree that goes where the head is confident, another one each round."""

    size: int = 60
    """Number of nodes, the root counted."""
    depth: int = 7
    """Tokens on the longest path."""
    width: int = 10
    """Nodes expanded per layer, and children looked at for each."""

    def __post_init__(self) -> None:
        """Refuse what is no tree."""
        if self.size < 2 or self.depth < 1 or self.width < 1:
            raise ValueError(
                "a dynamic tree needs at least 2 nodes, depth 1 and width 1, not "
                f"{self.size}, {self.depth} and {self.width}"
            )

    @property
    def expanded(self) -> int:
        """Nodes whose children a draft asks for, at most."""
        return 1 + (self.depth - 1) * self.width


@dataclass(frozen=True)
class SampledShape:
    """A static tree whose children are drawn from the draft's own distribution; a rank says in which order."""

    shape: TreeShape
    independent: bool = False
    """Whether siblings are drawn each by itself, and may be twins; else none is drawn twice."""

    @property
    def size(self) -> int:
        """Number of nodes, the root counted."""
        return self.shape.size

    @property
    def kind(self) -> TreeKind:
        """What an acceptance rule must know: a chain has no siblings."""
        if self.shape.size == self.shape.depth + 1:
            return "sampled_chain"
        return "sampled_independent" if self.independent else "sampled_without_replacement"

    def __post_init__(self) -> None:
        """Refuse a child without those that are drawn before it."""
        for path in self.shape.paths:
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in self.shape.paths:
                raise ValueError(
                    f"tree path {list(path)} cannot be drawn without {[*path[:-1], path[-1] - 1]}, which is drawn "
                    "before it"
                )


STOPPER_WEIGHTS = 4
"""Of a trained stopper: for what `stopping.signs` sees."""


@dataclass(frozen=True)
class EarlyExitShape:
    """A chain that ends where the next token's chance of being accepted falls below a threshold."""

    length: int
    """Tokens, at most."""
    threshold: float
    """From 0, never to stop, to 1."""
    drawn: bool = False
    """Whether its tokens are drawn instead of picked."""
    weights: tuple[float, ...] | None = None
    """Of a trained stopper; None to take the draft's own probability of its best token for the chance."""

    @property
    def size(self) -> int:
        """Number of nodes, the root counted, at most."""
        return self.length + 1

    @property
    def expanded(self) -> int:
        """Nodes whose children a draft asks for, at most."""
        return self.length

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return self.length

    def __post_init__(self) -> None:
        """Refuse what never drafts or is no probability."""
        if self.length < 1 or not 0 <= self.threshold <= 1:
            raise ValueError(
                f"a chain that stops needs a length of at least 1 and a threshold from 0 to 1, not {self.length} and "
                f"{self.threshold}"
            )
        if self.weights is not None and len(self.weights) != STOPPER_WEIGHTS:
            raise ValueError(f"a trained stopper has {STOPPER_WEIGHTS} weights, not {len(self.weights)}")


TreePolicy = TreeShape | DynamicShape | SampledShape | EarlyExitShape
"""How a head's trees are grown."""


def tree_policy(tree: str | Sequence[Sequence[int]] | TreePolicy) -> TreePolicy:
    """A policy from what a user writes.

    Args:
        tree: `chain:LENGTH`, `root` (no guesses), `branch:2x2x1` (children of every node, depth by depth),
            `dynamic:NODES:DEPTH:WIDTH` (the last ones may be left out), a JSON file of paths such as
            [[0], [1], [0, 0]], or the paths themselves. `drawn:` before a chain, branch, file or JSON list draws the
            children instead of picking them, no sibling twice; `independent:` draws each by itself. `stop:0.4:` before
            a chain, drawn or not, ends it where the draft is less sure than that; `stop:0.4@WEIGHTS:` asks a stopper
            that was trained.

    Raises:
        ValueError: none of these.
    """
    if isinstance(tree, TreePolicy):
        return tree
    if not isinstance(tree, str):
        return TreeShape.from_paths(tree)
    kind, *numbers = tree.split(":")
    if kind in ("drawn", "independent"):
        shape = tree_policy(tree.removeprefix(f"{kind}:"))
        if isinstance(shape, TreeShape) and shape.paths:
            return SampledShape(shape, kind == "independent")
    number = r"-?\d+(?:\.\d+)?"
    stopping = re.fullmatch(rf"stop:({number})(?:@({number}(?:,{number})*))?:(drawn:)?chain:(\d+)", tree)
    if stopping:
        weights = tuple(map(float, stopping[2].split(","))) if stopping[2] else None
        return EarlyExitShape(int(stopping[4]), float(stopping[1]), stopping[3] is not None, weights)
    if tree == "root":
        return TreeShape(())
    if kind == "branch" and len(numbers) == 1 and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", numbers[0]):
        return TreeShape.branching([int(number) for number in numbers[0].split("x")])
    if all(number.isdigit() for number in numbers):
        if kind == "chain" and len(numbers) == 1:
            return TreeShape.chain(int(numbers[0]))
        if kind == "dynamic" and len(numbers) <= 3:
            return DynamicShape(*map(int, numbers))
    literal = tree.startswith("[")
    if literal or Path(tree).is_file():
        try:
            return TreeShape.from_paths(json.loads(tree if literal else Path(tree).read_text(encoding="utf-8")))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{tree} holds no list of paths such as [[0], [1], [0, 0]]: {error}") from error
    raise ValueError(
        f"unknown tree {tree!r}; choose from auto, root, chain:LENGTH, branch:2x2x1, dynamic:NODES:DEPTH:WIDTH, a JSON "
        "file of paths, or drawn: or independent: and one of these that is not dynamic, or stop:0.4: and a chain"
    )


def tree_word(policy: TreePolicy) -> str | list[list[int]]:
    """A policy as `tree_policy` reads it and JSON holds it."""
    if isinstance(policy, DynamicShape):
        return f"dynamic:{policy.size}:{policy.depth}:{policy.width}"
    if isinstance(policy, SampledShape):
        return f"{'independent' if policy.independent else 'drawn'}:{tree_word(policy.shape)}"
    if isinstance(policy, EarlyExitShape):
        weights = "" if policy.weights is None else "@" + ",".join(map(str, policy.weights))
        return f"stop:{policy.threshold:g}{weights}:{'drawn:' if policy.drawn else ''}chain:{policy.length}"
    return [list(path) for path in policy.paths]
