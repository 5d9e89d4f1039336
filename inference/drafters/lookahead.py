"""Lookahead decoding (arXiv:2402.02057): the target generates n-grams while it verifies others.

A window of `width` columns holds Jacobi trajectories: its first row is any draft of the next
tokens, and each row below is the target's output for the row above. The window lies in the draft
tree, the first row as a path from the root and each column as a path below its token: one forward
gives the next row, and every column with its new token is an n-gram. The n-grams that begin with
the root are the candidates of a step (section 3.2).

The paper's attention mask, the first row up to a token's column and then that column, is the mask
of this tree; hence the window may be accepted, too, at no cost. With three columns and two rows:

    root ── a1 ── a2 ── a3        first row: a draft of the next tokens
            │     │     │
            b1    b2    b3        second row: the target's output for the first one
            c1    c2    c3        this forward's output at b1, b2, b3: the next row, and
                                  n-grams a1 b1 c1, a2 b2 c2, a3 b3 c3 of 3 tokens
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

from torch import Tensor

from ..trees.tree import DraftTree
from .base import (
    BatchDrafter,
    DraftContext,
    PrefillChunk,
    replaced_rows,
    selected_rows,
    tokens_added,
)
from .round import Round
from .tries import Trie, draft_tree

KEPT_ROOTS = 4096
"""First tokens whose n-grams are kept, the most recently used ones."""


class Window:
    """A text with its trajectories and n-grams; its limits are those of `LookaheadDrafter`."""

    def __init__(self, width: int, gram: int, candidates: int) -> None:
        self.tokens: list[int] = []
        self.width = width
        self.gram = gram
        self.candidates = candidates
        self.rows: list[list[int]] = []
        """The window, the oldest row first; at most `gram` - 1 of them."""
        self.grams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        """First token to the continuations of its n-grams, the newest last."""
        self.below: list[int] = []
        """Nodes of the newest row in the tree that was proposed last."""

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text; its n-grams are candidates, too (section 4)."""
        # The n-grams that end with a new token: with n-grams of 4 and 10 tokens so far, the first
        # begins at position 7, of which position 10 is the last token.
        first = max(len(self.tokens) - self.gram + 1, 0)
        self.tokens += tokens
        for start in range(first, len(self.tokens) - self.gram + 1):
            self.keep(tuple(self.tokens[start : start + self.gram]))

    def tree(self) -> Trie:
        """The window, and the n-grams that begin with the text's last token, which is the root."""
        root = self.tokens[-1]
        # 1. The first window may hold any tokens: the newest ones, repeated to fill it.
        if not self.rows:
            newest = self.tokens[-self.width :]
            self.rows = [(newest * self.width)[: self.width]]
        # 2. The first row is a path from the root; each later one hangs below the row above it,
        #    column by column. `column` holds the nodes of the row added last.
        trie = Trie([root])
        column = trie.add(self.rows[0])
        for row in self.rows[1:]:
            above = column
            column = []
            for token, parent in zip(row, above, strict=True):
                column += trie.add([token], parent)
        self.below = column
        # 3. The candidates, the newest first. What they share with the window is not repeated.
        for path in reversed(self.grams.get(root, OrderedDict())):
            trie.add(path)
        return trie

    def newest_gram(self) -> Trie:
        """The newest n-gram that begins with the text's last token, which is the root."""
        trie = Trie(self.tokens[-1:])
        for path in reversed(self.grams.get(self.tokens[-1], OrderedDict())):
            trie.add(path)
            break
        return trie

    def update(self, new: list[int]) -> None:
        """Add the target's outputs at the nodes `below`: the next row, and an n-gram per column."""
        # A full window has gram - 1 rows: with the new one, each column is an n-gram. Its oldest
        # row then makes room.
        if len(self.rows) == self.gram - 1:
            for gram in zip(*self.rows, new, strict=True):
                self.keep(gram)
            self.rows = self.rows[1:]
        self.rows.append(new)

    def keep(self, gram: tuple[int, ...]) -> None:
        """Add an n-gram, and drop the oldest ones."""
        continuations = self.grams.setdefault(gram[0], OrderedDict())
        self.grams.move_to_end(gram[0])
        continuations[gram[1:]] = None
        continuations.move_to_end(gram[1:])
        if len(continuations) > self.candidates:
            continuations.popitem(last=False)
        if len(self.grams) > KEPT_ROOTS:
            self.grams.popitem(last=False)


class LookaheadDrafter(BatchDrafter):
    """Drafts each text's window and its n-grams."""

    reads_best_tokens = True

    def __init__(self, width: int = 5, gram: int = 4, candidates: int = 5) -> None:
        """Set the window's columns (the paper's W), tokens per n-gram (N) and candidates (G).

        The candidates are the n-grams that are verified in a step, at most G.
        """
        if width < 1 or gram < 2 or candidates < 1:
            raise ValueError(
                "lookahead needs a window of at least 1 column, n-grams of 2 tokens and 1"
                f" candidate, not {width}, {gram} and {candidates}"
            )
        self.max_nodes = 1 + (width + candidates) * (gram - 1)
        self.texts: list[Window] = []
        """Each row's text."""
        self.width = width
        self.gram = gram
        self.most_candidates = candidates
        self.chains_only = False
        """Whether the target verifies one path only: then an n-gram of the text is drafted, and no
        window."""

    def begin(self, context: DraftContext) -> None:
        self.chains_only = context.chains_only
        self.texts = []
        for _ in range(context.batch_size):
            self.texts.append(Window(self.width, self.gram, self.most_candidates))

    def prefill(self, chunk: PrefillChunk) -> None:
        added = tokens_added(chunk, [not text.tokens for text in self.texts])
        for text, tokens in zip(self.texts, added, strict=True):
            text.append(tokens)

    def propose(self, roots_B: Tensor) -> DraftTree:
        if self.chains_only:
            tries = [text.newest_gram() for text in self.texts]
        else:
            tries = [text.tree() for text in self.texts]
        return draft_tree(tries, roots_B.device)

    def observe(self, finished: Round) -> None:
        self._update_windows(finished)
        for text, tokens in zip(self.texts, finished.tokens, strict=True):
            text.append(tokens)

    def select(self, rows_R: Tensor) -> None:
        self.texts = selected_rows(self.texts, rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self.texts = replaced_rows(self.texts, rows_R, other.texts)

    def _update_windows(self, finished: Round) -> None:
        """Update each window with the target's output at its nodes.

        A window with nodes that were not verified stays unchanged.
        """
        if not finished.drafted or self.chains_only:
            return
        # From the proposed nodes, by which `below` counts, to the verified ones: see `Round.nodes`.
        verified = finished.output.logits_BNV.shape[1]
        proposed_nodes = finished.nodes or range(verified)
        node_of = {proposed: node for node, proposed in enumerate(proposed_nodes)}
        # The target's best tokens, in sampling too: drafts need not be sampled.
        for window, outputs in zip(self.texts, finished.best_tokens, strict=True):
            if all(node in node_of for node in window.below):
                window.update([outputs[node_of[node]] for node in window.below])
