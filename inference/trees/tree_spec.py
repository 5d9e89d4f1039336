"""Tree specs: a draft tree's nodes as users and checkpoints write them, and their parser.

    spec                    policy            tree
    chain:3                 TreeShape         the head's best token at each of 3 depths
    branch:2x2x1            TreeShape         2 children of the root, 2 of each of these, 1 of those
    [[0], [1], [0, 0]]      TreeShape         paths of ranks: [0, 0] is the best child of [0]
    dynamic:60:7:10         DynamicShape      the 60 most probable nodes, chosen in every round
    drawn:chain:3           SampledShape      the same shape, its tokens sampled
    stop:0.4:chain:8        EarlyExitShape    a chain that ends where the head is not confident

`tree_policy` parses one spec, `tree_policies` several, separated by |.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

from ...files import at_home, one_line, parse_json, read_json
from ...options import shown

TreeKind = Literal["top_k", "sampled_chain", "sampled_independent", "sampled_without_replacement"]
"""How the children of a node are made, which decides the acceptance rules that are exact: the
draft's top-k tokens; one sampled child; several, sampled independently; several, sampled without
replacement."""
LARGEST_TREE = 2**12
"""Most nodes of a tree, and most children of a node: one forward of the target holds them all."""


@dataclass(frozen=True)
class Level:
    """One depth of a `TreeShape`: which children of the frontier are nodes, which are expanded.

    For the paths [0], [1], [0, 0], [0, 2] the frontier of depth 2 is the node [0]:

        depth    width    picks     frontier    parents
        1        2        (0, 1)    (0,)        (0,)        node [0] of the root has children
        2        3        (0, 2)    ()          ()          ranks 0 and 2 of 3 children
    """

    width: int
    """Children considered of each frontier node, its top k."""
    picks: tuple[int, ...]
    """For each node of this depth: frontier index * width + rank."""
    frontier: tuple[int, ...]
    """The nodes of this depth that have children, as indices into `picks`."""
    parents: tuple[int, ...]
    """The parent of each node in `frontier`, as an index into the frontier above."""


@dataclass(frozen=True)
class TreeShape:
    """A static tree.

    A node is the path of ranks to it: [0, 2] is the third-best child of the root's best child.
    """

    paths: tuple[tuple[int, ...], ...]
    """All nodes but the root, sorted by depth and then by ranks."""

    @cached_property
    def size(self) -> int:
        """Number of nodes, the root counted."""
        return len(self.paths) + 1

    @cached_property
    def depth(self) -> int:
        """Number of tokens on the longest path, the root not counted."""
        return max(map(len, self.paths), default=0)

    @cached_property
    def is_chain(self) -> bool:
        """Whether each node has one child at most."""
        return self.size == self.depth + 1

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of each node's parent, the root first, whose parent is -1."""
        # Paths are sorted by depth, so a parent's index is smaller than its children's.
        index = {(): 0, **{path: i for i, path in enumerate(self.paths, start=1)}}
        return (-1, *(index[path[:-1]] for path in self.paths))

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The nodes that have children."""
        return tuple(sorted(set(self.parents[1:])))

    @property
    def expanded(self) -> int:
        """Nodes that a draft expands; the root is expanded even if it is alone."""
        return max(1, len(self.inner))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> TreeShape:
        """Check and sort paths of ranks.

        Raises:
            ValueError: a repeated path, a negative rank, or a path whose parent is missing; named.
        """
        _check_size(len(paths))
        if not all(isinstance(path, Sequence) and not isinstance(path, str) for path in paths):
            raise ValueError("a tree is a list of paths such as [[0], [1], [0, 0]]")
        nodes = [tuple(path) for path in paths]
        for path in nodes:
            if not path or any(not isinstance(rank, int) or rank < 0 for rank in path):
                raise ValueError(
                    f"tree path {shown(list(path))} must hold at least one rank, each an integer"
                    " from 0"
                )
        known = {(), *nodes}
        for path in nodes:
            if max(path) >= LARGEST_TREE:
                raise ValueError(
                    f"tree path {shown(list(path))} has a rank above {LARGEST_TREE - 1}"
                )
            if path[:-1] not in known:
                raise ValueError(
                    f"tree path {shown(list(path))} has no parent {shown(list(path[:-1]))} in the"
                    " tree"
                )
        if len(known) != len(nodes) + 1:
            raise ValueError(
                "a tree path is given twice: "
                + shown(next(list(p) for p in nodes if nodes.count(p) > 1))
            )
        return cls(tuple(sorted(nodes, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """The best token at each depth: what most servers run."""
        _check_size(length)
        return cls.from_paths([[0] * depth for depth in range(1, length + 1)])

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The expansions at each depth, from the root on."""
        levels: list[Level] = []
        frontier: list[tuple[int, ...]] = [()]
        for depth in range(1, self.depth + 1):
            children = [path for path in self.paths if len(path) == depth]
            width = 1 + max(path[-1] for path in children)
            parents = {node[:-1] for node in self.paths}
            expanded = [path for path in children if path in parents]
            # Considered children are numbered frontier node by frontier node: of the frontier's
            # second node (index 1) with width 3, rank 2 is child 1 * 3 + 2 = 5.
            levels.append(
                Level(
                    width=width,
                    picks=tuple(frontier.index(path[:-1]) * width + path[-1] for path in children),
                    frontier=tuple(children.index(path) for path in expanded),
                    parents=tuple(frontier.index(path[:-1]) for path in expanded),
                )
            )
            frontier = expanded
        return tuple(levels)


ROOT = TreeShape(())


def _check_size(nodes: int) -> None:
    """Refuse a tree that no forward holds, before memory is taken for it."""
    if nodes > LARGEST_TREE:
        raise ValueError(f"a tree of {nodes} nodes is too large; it has at most {LARGEST_TREE}")


@dataclass(frozen=True)
class DynamicShape:
    """Limits of a dynamic tree, which takes the draft's most probable paths anew in each step."""

    size: int = 60
    """Number of nodes, the root counted."""
    depth: int = 7
    """Tokens on the longest path."""
    width: int = 10
    """Nodes expanded per level, and children considered for each."""

    def __post_init__(self) -> None:
        if self.size < 2 or self.depth < 1 or self.width < 1:
            raise ValueError(
                "a dynamic tree needs at least 2 nodes, depth 1 and width 1, not "
                f"{self.size}, {self.depth} and {self.width}"
            )
        _check_size(self.size)
        if max(self.expanded, self.width) > LARGEST_TREE:
            raise ValueError(
                f"a dynamic tree of depth {self.depth} and width {self.width} expands"
                f" {self.expanded} nodes, each with {self.width} children; both are at most"
                f" {LARGEST_TREE}"
            )

    @property
    def expanded(self) -> int:
        """Nodes that a draft expands, at most."""
        # The root, then `width` nodes at each depth but the last.
        return 1 + (self.depth - 1) * self.width


@dataclass(frozen=True)
class SampledShape:
    """A static tree whose children are sampled from the draft's distribution.

    A rank is the order of sampling.
    """

    shape: TreeShape
    independent: bool = False
    """Whether siblings are sampled independently, and may be equal; else without replacement."""

    def __post_init__(self) -> None:
        # Ranks are the order of sampling, so they must be without gaps: [0, 2] needs [0, 1].
        for path in self.shape.paths:
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in self.shape.paths:
                raise ValueError(
                    f"tree path {list(path)} cannot be sampled without"
                    f" {[*path[:-1], path[-1] - 1]}, which is sampled before it"
                )

    @property
    def size(self) -> int:
        """Number of nodes, the root counted."""
        return self.shape.size

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path, the root not counted."""
        return self.shape.depth

    @property
    def kind(self) -> TreeKind:
        """How children are made; a chain has no siblings."""
        if self.shape.is_chain:
            return "sampled_chain"
        return "sampled_independent" if self.independent else "sampled_without_replacement"


@dataclass(frozen=True)
class EarlyExitShape:
    """A chain that ends where the next token's acceptance probability falls below a threshold."""

    depth: int
    """Tokens, at most."""
    threshold: float
    """From 0, never to end early, to 1."""
    sampled: bool = False
    """Whether its tokens are sampled; else they are the best ones."""

    def __post_init__(self) -> None:
        if self.depth < 1 or not 0 <= self.threshold <= 1:
            raise ValueError(
                "a chain with early exit needs a length of at least 1 and a threshold from 0 to 1,"
                f" not {self.depth} and {self.threshold}"
            )
        _check_size(self.depth)

    @property
    def size(self) -> int:
        """Number of nodes, the root counted, at most."""
        return self.depth + 1

    @property
    def expanded(self) -> int:
        """Nodes that a draft expands, at most."""
        return self.depth


TreePolicy = TreeShape | DynamicShape | SampledShape | EarlyExitShape
"""Which trees are drafted."""
TreeSpec = str | Sequence[Sequence[int]] | TreePolicy | Sequence[TreePolicy]
"""A policy as users and checkpoints write it, see `tree_policy`, or several, see
`tree_policies`."""


def tree_policies(tree: TreeSpec) -> list[TreePolicy]:
    """One policy, or several to choose from: a sequence of policies, or their specs separated by |.

    Raises:
        ValueError: as for `tree_policy`.
    """
    if isinstance(tree, str):
        return [tree_policy(spec) for spec in tree.split("|")]
    if isinstance(tree, TreePolicy):
        return [tree]
    if not isinstance(tree, Sequence):
        raise ValueError(f"tree must be a spec such as 'chain:4', paths or a policy, not {tree!r}")
    # A sequence of policies; any other sequence is the paths of one tree.
    policies = [policy for policy in tree if isinstance(policy, TreePolicy)]
    return policies if policies and len(policies) == len(tree) else [tree_policy(tree)]


def tree_policy(tree: TreeSpec) -> TreePolicy:
    """Parse a tree spec.

    Args:
        tree: `chain:LENGTH`, `root` (no drafts), `branch:2x2x1` (children of every node, depth by
            depth), `dynamic:NODES:DEPTH:WIDTH` (the last ones may be left out), a JSON file of
            paths such as [[0], [1], [0, 0]], or the paths themselves. `drawn:` before a chain,
            branch, file or JSON list samples the children instead of taking the top-k, without
            replacement; `independent:` samples them independently. `stop:0.4:` before a chain,
            sampled or not, ends it where the draft's confidence is below 0.4.

    Raises:
        ValueError: another spec, or limits that allow no tree.
    """
    if isinstance(tree, TreePolicy):
        return tree
    if not isinstance(tree, str):
        return TreeShape.from_paths(cast(Sequence[Sequence[int]], tree))

    # 1. Prefixes that sample: `drawn:` and `independent:`, before any other static spec.
    kind, *numbers = tree.split(":")
    if kind in ("drawn", "independent") and numbers[:1] not in (["drawn"], ["independent"]):
        shape = tree_policy(tree.removeprefix(f"{kind}:"))
        if isinstance(shape, TreeShape) and shape.paths:
            return SampledShape(shape, kind == "independent")

    # 2. `stop:0.4:chain:8`, `stop:0.4:drawn:chain:8`.
    number = r"-?\d+(?:\.\d+)?"
    early_exit = re.fullmatch(rf"stop:({number}):(drawn:)?chain:(\d+)", tree)
    if early_exit:
        return EarlyExitShape(int(early_exit[3]), float(early_exit[1]), early_exit[2] is not None)

    # 3. Names and numbers.
    if tree == "root":
        return ROOT
    if kind == "branch" and len(numbers) == 1 and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", numbers[0]):
        # 2x2x1: 2 + 4 + 4 nodes, counted before they are made. At depth 2 the paths are the product
        # of the ranks (0, 1) and (0, 1).
        children = [range(int(number)) for number in numbers[0].split("x")]
        _check_size(sum(itertools.accumulate(map(len, children), operator.mul)))
        branches: list[tuple[int, ...]] = []
        for depth in range(1, len(children) + 1):
            branches += itertools.product(*children[:depth])
        return TreeShape.from_paths(branches)
    if all(number.isdigit() for number in numbers):
        if kind == "chain" and len(numbers) == 1:
            return TreeShape.chain(int(numbers[0]))
        if kind == "dynamic" and len(numbers) <= 3:
            return DynamicShape(*map(int, numbers))

    # 4. Paths, as JSON in the spec itself or in a file.
    literal = tree.startswith("[")
    file = Path(at_home(tree))
    if literal or file.is_file():
        try:
            paths = parse_json(tree, "it") if literal else read_json(file)
            if not isinstance(paths, list):
                raise ValueError("a tree is a list of paths")
            return TreeShape.from_paths(paths)
        except ValueError as error:
            name = one_line(tree[:80]) if literal else str(file)
            raise ValueError(
                f"{name} holds no list of paths such as [[0], [1], [0, 0]]: {error}"
            ) from error
    raise ValueError(
        f"unknown tree {tree!r}; choose from auto, root, chain:LENGTH, branch:2x2x1,"
        " dynamic:NODES:DEPTH:WIDTH, a JSON file of paths, or drawn: or independent: and one of"
        " these that is not dynamic, or stop:0.4: and a chain"
    )


STORED = re.compile(
    r"(drawn:|independent:)?(\[[\[\]0-9, ]*\]|root|(chain|branch|dynamic)(:[0-9x]+)*)"
    r"|stop:[0-9.-]+:(drawn:)?chain:[0-9]+"
)
"""A tree spec that names no file."""


def stored_tree(tree: TreeSpec) -> TreePolicy:
    """The policy that a head's checkpoint stores, which a stranger may have written.

    Raises:
        ValueError: as `tree_policy`, and for the name of a file, which is not read.
    """
    try:
        if isinstance(tree, str) and not STORED.fullmatch(tree):
            raise ValueError(f"{tree[:80]!r} is not a tree")
        return tree_policy(tree)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"the tree in the head's config.json cannot be used: {error}; give one: tree='chain:3'"
        ) from error


def spec_of(policy: TreePolicy) -> str | list[list[int]]:
    """A policy as `tree_policy` parses it and JSON holds it."""
    if isinstance(policy, DynamicShape):
        return f"dynamic:{policy.size}:{policy.depth}:{policy.width}"
    if isinstance(policy, SampledShape):
        return f"{'independent' if policy.independent else 'drawn'}:{spec_of(policy.shape)}"
    if isinstance(policy, EarlyExitShape):
        return f"stop:{policy.threshold:g}:{'drawn:' if policy.sampled else ''}chain:{policy.depth}"
    return [list(path) for path in policy.paths]
