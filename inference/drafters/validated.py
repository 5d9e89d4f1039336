"""The fence around a user's own drafter: nothing that it does can change the output.

After an error, or an invalid tree, the rest of the text is decoded without drafts, with one
warning.

Letters in tensor names: B batch, N nodes, R selected rows.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch import Tensor

from ..trees.tree import DraftTree
from .base import BatchDrafter, DraftContext, Drafter, NoDraft, PrefillChunk, replaced_rows
from .round import Round


def validated(drafter: Drafter, vocab_size: int) -> BatchDrafter:
    """The drafter as the decoding loop calls it: a user's own inside a fence, ours unchanged.

    Raises:
        ValueError: not a drafter, or one whose drafts are sampled.
    """
    if isinstance(drafter, BatchDrafter):
        return drafter
    return ValidatedDrafter(drafter, vocab_size)


class ValidatedDrafter(BatchDrafter):
    """A user's own drafter."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """Wrap a drafter for a target with `vocab_size` tokens.

        Raises:
            ValueError: not a drafter, or one whose drafts are sampled: with wrong draft
                probabilities sampling would not be exact.
        """
        name = type(drafter).__name__
        if not isinstance(drafter, Drafter) or not hasattr(drafter, "max_nodes"):
            raise ValueError(
                "a drafter of your own needs max_nodes, propose(roots_B) and observe(round);"
                f" {name} lacks some of them"
            )
        kind = getattr(drafter, "kind", "top_k")
        if kind != "top_k":
            raise ValueError(
                f"a drafter of your own must make top-k drafts, but {name}.kind is {kind!r}:"
                " with wrong draft probabilities the output would not be the target's"
            )
        self.drafter: Any = drafter
        self.keeps_rows = hasattr(drafter, "select") and hasattr(drafter, "replace")
        """Whether it has a state of each row."""
        self.vocab_size = vocab_size
        self.max_nodes = drafter.max_nodes
        self.feature_layers = getattr(drafter, "feature_layers", ())
        self.failed = False
        """Whether it has failed in this generation."""
        self._newest = NewestTokens()

    def __repr__(self) -> str:
        return f"ValidatedDrafter({type(self.drafter).__name__}, {self.max_nodes} nodes)"

    def begin(self, context: DraftContext) -> None:
        self.failed = False
        self._newest.begin(context)
        if hasattr(self.drafter, "begin"):
            with self._fence():
                self.drafter.begin(context)

    def prefill(self, chunk: PrefillChunk) -> None:
        self._newest.prefill(chunk)
        if hasattr(self.drafter, "prefill") and not self.failed:
            with self._fence():
                self.drafter.prefill(chunk)

    def propose(self, roots_B: Tensor) -> DraftTree:
        if not self.failed:
            with self._fence():
                tree: DraftTree = self.drafter.propose(roots_B)
                # Of an idle row the host does not know the newest token: any root is right.
                roots: list[int | None] = list(self._newest.tokens)
                for row in self._newest.idle:
                    roots[row] = None
                check_tree(tree, roots, self.max_nodes, self.vocab_size)
                return tree.to(roots_B.device)
        # Reached after an earlier failure and after one in this block, which the fence caught.
        return NoDraft("drafter_failed").propose(roots_B)

    def observe(self, finished: Round) -> None:
        self._newest.observe(finished)
        if not self.failed:
            with self._fence():
                self.drafter.observe(finished)

    def select(self, rows_R: Tensor) -> None:
        self._newest.select(rows_R)
        if self.keeps_rows and not self.failed:
            with self._fence():
                self.drafter.select(rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self._newest.replace(rows_R, other._newest)
        self.failed = self.failed or other.failed
        if self.keeps_rows and not self.failed:
            with self._fence():
                self.drafter.replace(rows_R, other.drafter)

    def fresh(self) -> Self:
        return type(self)(copy.copy(self.drafter), self.vocab_size)

    @contextmanager
    def _fence(self) -> Iterator[None]:
        """Report the first error of a generation; the drafter is not called again in it."""
        try:
            yield
        except Exception as error:  # of code that is not ours
            self.failed = True
            name = type(self.drafter).__name__
            warnings.warn(
                f"the drafter {name} failed; the rest is decoded without drafts: {error!r}",
                stacklevel=4,
            )


class NewestTokens:
    """Each row's newest token, the root of its next tree, on the host."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.idle: set[int] = set()
        """Slots of rows that have ended and keep their slot. Their roots go on changing on the
        device, not here."""

    def begin(self, context: DraftContext) -> None:
        self.tokens = [0] * context.batch_size
        self.idle = set()

    def prefill(self, chunk: PrefillChunk) -> None:
        next_tokens = chunk.next_tokens_BT.tolist()  # sync: once for 2048 tokens of the prompts
        lengths = chunk.lengths_B.tolist()
        for row, length in enumerate(lengths):
            # Of length 0 are rows whose prompts ended in an earlier chunk.
            if length > 0:
                self.tokens[row] = next_tokens[row][length - 1]

    def observe(self, finished: Round) -> None:
        self.idle = finished.idle
        for row, emitted in enumerate(finished.tokens):
            if emitted:
                self.tokens[row] = emitted[-1]

    def select(self, rows_R: Tensor) -> None:
        rows = rows_R.tolist()  # sync: when rows have ended
        self.tokens = [self.tokens[row] for row in rows]
        # With rows 1 and 3 idle, the selection [3, 0, 2] leaves {0}.
        self.idle = {slot for slot, row in enumerate(rows) if row in self.idle}

    def replace(self, rows_R: Tensor, other: NewestTokens) -> None:
        self.tokens = replaced_rows(self.tokens, rows_R, other.tokens)
        self.idle -= set(rows_R.tolist())


def check_tree(tree: DraftTree, roots: list[int | None], max_nodes: int, vocab_size: int) -> None:
    """Check a tree from outside, whose rows must begin with these roots.

    A root of None allows any token, in an idle row.

    Raises:
        ValueError: an invalid tree, and what is wrong with it.
    """
    nodes = tree.tokens_BN.shape[1]
    if nodes > max_nodes:
        raise ValueError(
            f"the tree has {nodes} nodes, more than the drafter's max_nodes, {max_nodes}"
        )
    if tree.kind != "top_k":
        raise ValueError(f"a tree of {tree.kind} drafts; only top-k drafts are allowed")
    # sync: for a tree that was not made on the host
    tokens = tree.tokens_BN.tolist()
    parents = tree.parents_BN.tolist()
    sizes = tree.sizes_B.tolist()
    for row in zip(tokens, parents, sizes, roots, strict=True):
        check_row(*row, tree.max_depth, vocab_size)


def check_row(
    tokens: list[int],
    parents: list[int],
    size: int,
    root: int | None,
    max_depth: int,
    vocab_size: int,
) -> None:
    """Check the nodes of one row, of which the first `size` are not padding.

    Raises:
        ValueError: an invalid tree, and what is wrong with it.
    """
    nodes = len(tokens)
    if not 1 <= size <= nodes:
        raise ValueError(f"sizes_B is {size}, but the row has {nodes} nodes")
    if (root is not None and tokens[0] != root) or parents[0] != -1:
        raise ValueError(
            f"node 0 is token {tokens[0]} with the parent {parents[0]}; it must be the row's newest"
            f" token, {root}, with the parent -1"
        )
    # Padding is read by the target, too, so its tokens and parents must exist as well.
    depths = [0]
    for node in range(1, nodes):
        if not 0 <= tokens[node] < vocab_size:
            raise ValueError(f"node {node} is token {tokens[node]}; the target has {vocab_size}")
        if not 0 <= parents[node] < node:
            raise ValueError(
                f"node {node} has the parent {parents[node]}; a parent must come before its child"
            )
        depths.append(depths[parents[node]] + 1)
    children = Counter(zip(parents[:size], tokens[:size], strict=True))
    (parent, _), count = children.most_common(1)[0]
    if count > 1:
        raise ValueError(f"two children of node {parent} are the same token")
    if not max(depths) <= max_depth < nodes:
        raise ValueError(
            f"the tree is {max(depths)} deep and has {nodes} nodes, but max_depth is {max_depth}"
        )
