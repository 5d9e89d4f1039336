"""A drafter that somebody else wrote: whatever it does, what is written stays what the target writes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from .guessing import RootOnly
from .rounds import Drafter, Passage, Round, Start
from .tree import DraftTree, Origin

Value = TypeVar("Value")


class Guarded:
    """Goes plain for good when the drafter raises or proposes what is no tree, and says so once."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """Watch a drafter.

        Args:
            drafter: what guesses.
            vocab_size: of the target.

        Raises:
            ValueError: a drafter that draws.
        """
        if drafter.origin != "picked":
            raise ValueError(
                f"a drafter of your own must pick its guesses, and {type(drafter).__name__} says that they are "
                f"{drafter.origin!r}: with wrong draft probabilities the output would not be the target's"
            )
        self.drafter, self.vocab_size = drafter, vocab_size
        self.feature_layers, self.max_nodes = drafter.feature_layers, drafter.max_nodes
        self.origin: Origin = drafter.origin
        self.failed = False

    def __copy__(self) -> Guarded:
        """One for other rows."""
        other = Guarded(copy.copy(self.drafter), self.vocab_size)
        other.failed = self.failed
        return other

    def begin(self, start: Start) -> None:
        """Another chance."""
        self.failed = False
        self._try(lambda: self.drafter.begin(start))

    def read(self, passage: Passage) -> None:
        """The prompts."""
        self._try(lambda: self.drafter.read(passage))

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Its tree, or the roots alone."""
        tree = self._try(lambda: self._checked(self.drafter.propose(roots_B), roots_B))
        return RootOnly().propose(roots_B) if tree is None else tree

    def observe(self, finished: Round) -> None:
        """What the round decided."""
        self._try(lambda: self.drafter.observe(finished))

    def compile(self) -> None:
        """The drafter."""
        self.drafter.compile()

    def select(self, rows_R: Tensor) -> None:
        """These rows only."""
        self._try(lambda: self.drafter.select(rows_R))

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Take over rows of another one."""
        assert isinstance(other, Guarded)
        self.failed = self.failed or other.failed
        self._try(lambda: self.drafter.replace(rows_R, other.drafter))

    def _try(self, step: Callable[[], Value]) -> Value | None:
        """The step's value; None, once and for all, after an error."""
        if self.failed:
            return None
        try:
            return step()
        except Exception as error:  # of code that is not ours
            self.failed = True
            name = type(self.drafter).__name__
            warnings.warn(f"the drafter {name} failed, so no more is guessed in this text: {error!r}", stacklevel=3)
            return None

    def _checked(self, tree: DraftTree, roots_B: Tensor) -> DraftTree:
        """The tree if it is one.

        Raises:
            ValueError: too many nodes, a token out of range, a parent that does not stand before its child, a root
                that is not the newest token.
        """
        nodes = tree.tokens_BN.shape[1]
        if nodes > self.max_nodes:
            raise ValueError(f"a tree of {nodes} nodes, and at most {self.max_nodes} were announced")
        # sync: such trees come from the host
        columns = (tree.tokens_BN.tolist(), tree.parents_BN.tolist(), roots_B.tolist(), tree.sizes_B.tolist())
        for tokens, parents, root, size in zip(*columns, strict=True):
            if not 1 <= size <= nodes:
                raise ValueError(f"a row's tree is said to have {size} nodes, of {nodes}")
            if tokens[0] != root or parents[0] != -1:
                raise ValueError(
                    f"the tree's first node is {tokens[0]} below {parents[0]}, not the root {root} below -1"
                )
            depths = [0]
            for node in range(1, nodes):
                if not 0 <= tokens[node] < self.vocab_size:
                    raise ValueError(f"node {node} is token {tokens[node]}; the target has {self.vocab_size}")
                if not 0 <= parents[node] < node:
                    raise ValueError(f"node {node} lies below node {parents[node]}, which does not stand before it")
                depths.append(depths[parents[node]] + 1)
            if len(set(zip(parents[:size], tokens[:size], strict=True))) < size:
                raise ValueError("a node has the same token as its sibling: both would be drawn for")
            if not max(depths) <= tree.max_depth < nodes:
                raise ValueError(f"the tree is {max(depths)} deep and has {nodes} nodes, and {tree.max_depth} was said")
        return tree
