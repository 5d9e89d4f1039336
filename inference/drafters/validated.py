"""A drafter that somebody else wrote: whatever it does, what is written stays what the target writes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ..tree import DraftTree
from .base import DraftContext, Drafter, PrefillChunk, StepResult
from .head_drafter import NoDraft

Value = TypeVar("Value")


class ValidatedDrafter(Drafter):
    """Goes plain for good when the drafter raises or proposes what is no tree, and says so once."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """Watch a drafter.

        Args:
            drafter: what guesses.
            vocab_size: of the target.

        Raises:
            ValueError: a drafter that draws.
        """
        if drafter.kind != "top_k":
            raise ValueError(
                f"a drafter of your own must pick its guesses, and {type(drafter).__name__} says that they are "
                f"{drafter.kind!r}: with wrong draft probabilities the output would not be the target's"
            )
        self.drafter, self.vocab_size = drafter, vocab_size
        self.feature_layers, self.max_nodes = drafter.feature_layers, drafter.max_nodes
        self.failed = False
        self.newest: list[int] = []
        """Each row's last token."""

    def __copy__(self) -> ValidatedDrafter:
        """One for other rows."""
        other = ValidatedDrafter(copy.copy(self.drafter), self.vocab_size)
        other.failed = self.failed
        return other

    def begin(self, start: DraftContext) -> None:
        """Another chance."""
        self.failed, self.newest = False, [0] * start.batch_size
        self._try(lambda: self.drafter.begin(start))

    def read(self, passage: PrefillChunk) -> None:
        """The prompts."""
        self.newest = passage.newest(self.newest)
        self._try(lambda: self.drafter.read(passage))

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Its tree, wherever it made it, or the roots alone."""
        tree = self._try(lambda: self._checked(self.drafter.propose(roots_B)))
        return NoDraft().propose(roots_B) if tree is None else tree.to(roots_B.device)

    def asks(self, finished: StepResult) -> Tensor | None:
        """Whatever the drafter does."""
        return self._try(lambda: self._checked_answer(self.drafter.asks(finished)))

    def observe(self, finished: StepResult) -> None:
        """What the round decided."""
        self.newest = [tokens[-1] for tokens in finished.tokens]
        self._try(lambda: self.drafter.observe(finished))

    def compile(self) -> None:
        """The drafter."""
        self.drafter.compile()

    def select(self, rows_R: Tensor) -> None:
        """These rows only."""
        self.newest = [self.newest[row] for row in rows_R.tolist()]
        self._try(lambda: self.drafter.select(rows_R))

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Take over rows of another one."""
        assert isinstance(other, ValidatedDrafter)
        self.failed = self.failed or other.failed
        for row, newest in zip(rows_R.tolist(), other.newest, strict=True):
            self.newest[row] = newest
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

    def _checked_answer(self, asked_BK: Tensor | None) -> Tensor | None:
        """What the drafter asks for, if it can travel with the tokens.

        Raises:
            ValueError: not whole numbers, a row for each of the batch's.
        """
        if asked_BK is not None and (asked_BK.shape[:-1] != (len(self.newest),) or asked_BK.dtype != torch.int64):
            raise ValueError(
                f"asks gave {list(asked_BK.shape)} of {asked_BK.dtype}, and [{len(self.newest)}, K] of torch.int64 is "
                "needed"
            )
        return asked_BK

    def _checked(self, tree: DraftTree) -> DraftTree:
        """The tree if it is one.

        Raises:
            ValueError: too many nodes, a token out of range, a parent that does not stand before its child, a root
                that is not the newest token.
        """
        nodes = tree.tokens_BN.shape[1]
        if nodes > self.max_nodes:
            raise ValueError(f"a tree of {nodes} nodes, and at most {self.max_nodes} were announced")
        # sync: for a tree that was not made on the host
        columns = (tree.tokens_BN.tolist(), tree.parents_BN.tolist(), self.newest, tree.sizes_B.tolist())
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
