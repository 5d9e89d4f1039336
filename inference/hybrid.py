"""A head's tree with the branches of a source that looks things up: what begins alike is joined.

The head's nodes come first; the source's fill up what room is left. Both are picked, so the rule for picked trees is
exact for them together.
"""

from __future__ import annotations

import copy
from collections import Counter

from torch import Tensor

from .rounds import Drafter, Passage, Round, Start
from .texts import Lookup, Trie, draft_tree
from .tree import DraftTree, Origin

SHARES = ("head", "source", "both")


class Hybrid:
    """Two drafters' guesses in one tree."""

    origin: Origin = "picked"

    def __init__(self, head: Drafter, source: Drafter) -> None:
        """Put them together.

        Raises:
            ValueError: a source that looks nothing up, or a head whose guesses are drawn, which must not be mixed with
                others.
        """
        if not isinstance(source, Lookup):
            raise ValueError("beside a head, a drafter must be one that looks things up: prompt-lookup or retrieval")
        if head.origin != "picked":
            raise ValueError("guesses that are drawn cannot be joined with those of another source; pick them instead")
        self.head, self.source = head, source
        self.feature_layers = head.feature_layers
        self.max_nodes = head.max_nodes + source.max_nodes - 1
        self.accepted: Counter[str] = Counter()
        """Accepted tokens by whose guesses they were."""
        self._owners: list[list[str]] = []

    def __copy__(self) -> Hybrid:
        """One for other rows."""
        other = Hybrid(copy.copy(self.head), copy.copy(self.source))
        other.accepted = self.accepted
        return other

    def begin(self, start: Start) -> None:
        """Start both."""
        self.head.begin(start)
        self.source.begin(start)

    def read(self, passage: Passage) -> None:
        """Show both."""
        self.head.read(passage)
        self.source.read(passage)

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Join both trees, row by row."""
        tree = self.head.propose(roots_B)
        tries, self._owners = [], []
        rows = zip(tree.tokens_BN.tolist(), tree.parents_BN.tolist(), tree.sizes_B.tolist(), strict=True)
        for (tokens, parents, size), text in zip(rows, self.source.texts, strict=True):
            trie, place = Trie(tokens[:1]), [0]
            for token, parent in zip(tokens[1:size], parents[1:size], strict=True):
                place += trie.add([token], place[parent])
            owners = ["head"] * len(trie.tokens)
            guessed = self.source.guess(text)
            place = [0]
            for token, parent in zip(guessed.tokens[1:], guessed.parents[1:], strict=True):
                place += trie.add([token], place[parent])
            for node in place[1:]:
                if node < len(owners):
                    owners[node] = "both"
            tries.append(trie)
            self._owners.append(owners + ["source"] * (len(trie.tokens) - len(owners)))
        return draft_tree(tries, roots_B.device)

    def observe(self, finished: Round) -> None:
        """Show both; count whose guesses were right."""
        paths, lengths = finished.verdict.path_BA.tolist(), finished.verdict.lengths_B.tolist()
        if finished.tree.max_depth > 0:  # else somebody decided not to guess in this round
            for owners, path, length in zip(self._owners, paths, lengths, strict=True):
                self.accepted.update(owners[node] for node in path[1:length])
        self.head.observe(finished)
        self.source.observe(finished)

    def compile(self) -> None:
        """The head."""
        self.head.compile()

    def select(self, rows_R: Tensor) -> None:
        """Both keep these rows."""
        self.head.select(rows_R)
        self.source.select(rows_R)

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Both take over theirs."""
        assert isinstance(other, Hybrid)
        self.head.replace(rows_R, other.head)
        self.source.replace(rows_R, other.source)
