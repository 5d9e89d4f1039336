"""Lookahead decoding (arXiv:2402.02057): guesses that the target makes itself, beside the verification of others.

A window of `width` columns holds Jacobi trajectories: the first row is a guess of the next tokens, and each row below
what the target said of the one above. The window lies in the draft tree, the first row as a path from the root and
each column as a path below its token: one forward gives the next row, and every column with its new token is an
n-gram. Those that begin with the root are the candidates of a round (section 3.2).

Where the paper's mask lets a token see the first row up to its column and then its own column, a tree says the same;
hence the window may be accepted too, which costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from ..tree import DraftTree
from .base import DraftContext, Drafter, PrefillChunk, StepResult
from .ngram_index import NgramIndex
from .prompt_lookup import NgramDrafter, Trie, draft_tree

KEPT_ROOTS = 4096
"""First tokens whose n-grams are remembered, the latest used ones."""


class Window:
    """One text's trajectories and the n-grams that came of them."""

    def __init__(self, width: int, gram: int, candidates: int) -> None:
        """See `Lookahead`."""
        self.width, self.gram, self.candidates = width, gram, candidates
        self.rows: list[list[int]] = []
        """The window, the oldest row first; at most `gram` - 1 of them."""
        self.grams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        """By its first token, what followed it, the newest last."""
        self.below: list[int] = []
        """The nodes of the newest row in the last tree."""

    def start(self, text: list[int]) -> None:
        """Guess that the text repeats itself: any tokens will do."""
        self.rows = [(text[-self.width :] * self.width)[: self.width]]

    def tree(self, root: int) -> Trie:
        """The window, and the candidates that begin with the root."""
        trie = Trie([root])
        column = trie.add(self.rows[0])
        for row in self.rows[1:]:
            column = [trie.add([token], parent)[0] for token, parent in zip(row, column, strict=True)]
        self.below = column
        for path in reversed(self.grams.get(root, OrderedDict())):
            trie.add(path)
        return trie

    def learn(self, said: list[int]) -> None:
        """Take what the target said at every node: the next row, and an n-gram for each column."""
        new = [said[node] for node in self.below]
        if len(self.rows) == self.gram - 1:
            for gram in zip(*self.rows, new, strict=True):
                self.keep(gram)
            self.rows = self.rows[1:]
        self.rows.append(new)

    def keep(self, gram: tuple[int, ...]) -> None:
        """Remember an n-gram, and forget the oldest ones."""
        known = self.grams.setdefault(gram[0], OrderedDict())
        self.grams.move_to_end(gram[0])
        known[gram[1:]] = None
        known.move_to_end(gram[1:])
        if len(known) > self.candidates:
            known.popitem(last=False)
        if len(self.grams) > KEPT_ROOTS:
            self.grams.popitem(last=False)


class Lookahead(NgramDrafter):
    """Jacobi trajectories as a source of n-grams."""

    def __init__(self, width: int = 5, gram: int = 4, candidates: int = 5) -> None:
        """Set the limits.

        Args:
            width: columns of the window (the paper's W).
            gram: tokens of an n-gram (N).
            candidates: n-grams that are verified in a round, at most (G).

        Raises:
            ValueError: limits that allow nothing.
        """
        if width < 1 or gram < 2 or candidates < 1:
            raise ValueError(
                "lookahead needs a window of at least 1 column, n-grams of 2 tokens and 1 candidate, not "
                f"{width}, {gram} and {candidates}"
            )
        super().__init__(1 + (width + candidates) * (gram - 1), grams=0)
        self.limits = (width, gram, candidates)
        self.windows: list[Window] = []

    def begin(self, start: DraftContext) -> None:
        """Empty windows."""
        super().begin(start)
        self.windows = [Window(*self.limits) for _ in range(start.batch_size)]

    def read(self, passage: PrefillChunk) -> None:
        """The prompts' n-grams are candidates too (section 4)."""
        before = [max(len(text.tokens) - self.limits[1] + 1, 0) for text in self.texts]
        super().read(passage)
        for text, window, first in zip(self.texts, self.windows, before, strict=True):
            self._keep_all(text, window, first)

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Window and candidates."""
        for text, window in zip(self.texts, self.windows, strict=True):
            if not window.rows:
                window.start(text.tokens)
        tries = [window.tree(text.tokens[-1]) for window, text in zip(self.windows, self.texts, strict=True)]
        return draft_tree(tries, roots_B.device)

    def asks(self, finished: StepResult) -> Tensor:
        """What the target said everywhere, by its own likeliest tokens: they are guesses and need not be drawn."""
        return finished.output.logits_BNV.argmax(-1)

    def observe(self, finished: StepResult) -> None:
        """The next row of each window, and its n-grams."""
        before = [max(len(text.tokens) - self.limits[1] + 1, 0) for text in self.texts]
        super().observe(finished)
        for text, window, said, first in zip(self.texts, self.windows, finished.asked, before, strict=True):
            if finished.tree.max_depth > 0:  # else somebody decided not to guess in this round
                window.learn(said)
            self._keep_all(text, window, first)

    def select(self, rows_R: Tensor) -> None:
        """Keep these rows."""
        super().select(rows_R)
        self.windows = [self.windows[row] for row in rows_R.tolist()]

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Take over other rows."""
        assert isinstance(other, Lookahead)
        super().replace(rows_R, other)
        for row, window in zip(rows_R.tolist(), other.windows, strict=True):
            self.windows[row] = window

    def _keep_all(self, text: NgramIndex, window: Window, first: int) -> None:
        """The n-grams of a text from a place on."""
        gram = self.limits[1]
        for start in range(first, len(text.tokens) - gram + 1):
            window.keep(tuple(text.tokens[start : start + gram]))
