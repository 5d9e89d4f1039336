"""Drafts that are looked up: what followed the newest tokens where they stood before.

Prompt lookup looks in the text itself, retrieval (REST, arXiv:2311.08252) in a datastore. The longest n-gram at the
text's end that is found anywhere decides; its continuations are merged into a tree, and of its nodes those stay that
most continuations share, newer ones first among equals.

Everything here is counted on the host, which knows the tokens anyway; a round's tree is uploaded at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..tree import DraftTree
from .base import DraftContext, Drafter, PrefillChunk, StepResult
from .ngram_index import SORTED_TOKENS, Corpus, NgramIndex

CONTINUATIONS = 16
"""Places in a corpus that are looked at, at most."""


@dataclass
class Trie:
    """A tree that grows by paths; what begins alike is joined."""

    tokens: list[int]
    """Of all nodes, the root first."""
    parents: list[int] = field(default_factory=lambda: [-1])
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    """The node below a node with a token."""

    def add(self, path: Sequence[int], parent: int = 0) -> list[int]:
        """Put a path below a node; the numbers of its nodes."""
        nodes = []
        for token in path:
            node = self.children.get((parent, token))
            if node is None:
                node = self.children[parent, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
            nodes.append(node)
            parent = node
        return nodes

    def depths(self) -> list[int]:
        """Of all nodes; a parent stands before its children."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths


def draft_tree(tries: Sequence[Trie], device: torch.device) -> DraftTree:
    """One row for each, padded to the largest."""
    sizes = [len(trie.tokens) for trie in tries]
    nodes = max(sizes)
    columns = [
        [*trie.tokens, *padding, *trie.parents, *padding, size]
        for trie, size in zip(tries, sizes, strict=True)
        for padding in [[0] * (nodes - size)]
    ]
    tokens_BN, parents_BN, sizes_B1 = torch.tensor(columns, device=device).split([nodes, nodes, 1], dim=1)
    return DraftTree(tokens_BN, parents_BN, sizes_B1[:, 0], max_depth=max(max(trie.depths()) for trie in tries))


def merged(root: int, continuations: Sequence[Sequence[int]], size: int) -> Trie:
    """The part of all continuations together that most of them share."""
    whole = Trie([root])
    shared: dict[int, int] = {}
    for path in continuations:
        for node in whole.add(path):
            shared[node] = shared.get(node, 0) + 1
    # A child is shared by no more than its parent, and stands behind it: what is left is a tree.
    kept = sorted(sorted(shared, key=lambda node: (-shared[node], node))[: size - 1])
    place = {node: number for number, node in enumerate([0, *kept])}
    part = Trie([root])
    for node in kept:
        part.add([whole.tokens[node]], place[whole.parents[node]])
    return part


def continuations(corpus: Corpus, text: Sequence[int], longest: int, shortest: int, length: int) -> list[list[int]]:
    """What followed the longest n-gram at the end of a text that the corpus holds; nothing if it holds none.

    Args:
        corpus: where to look.
        text: whose end is looked for.
        longest: n-gram to begin with.
        shortest: n-gram that is still looked for.
        length: tokens of each continuation.
    """
    for size in range(min(longest, len(text)), shortest - 1, -1):
        places = corpus.places(text[len(text) - size :], CONTINUATIONS).tolist()
        found = [path for place in places if (path := corpus.read(place, length))]
        if found:
            return found
    return []


class NgramDrafter(Drafter):
    """A source that reads what is written; a subclass says what it guesses."""

    def __init__(self, size: int, grams: int) -> None:
        """Hold no text yet.

        Args:
            size: nodes of the largest tree, the root counted.
            grams: length of the n-grams that are looked for in the text itself.
        """
        self.max_nodes, self.grams = size, grams
        self.texts: list[NgramIndex] = []

    def begin(self, start: DraftContext) -> None:
        """Empty texts."""
        self.texts = [NgramIndex(self.grams) for _ in range(start.batch_size)]

    def read(self, passage: PrefillChunk) -> None:
        """The prompts."""
        rows = zip(self.texts, passage.tokens_BT.tolist(), passage.next_tokens_BT.tolist(), strict=True)
        for (text, tokens, following), length in zip(rows, passage.lengths_B.tolist(), strict=True):
            text.append([*([] if text.tokens else tokens[:1]), *following[:length]])

    def propose(self, roots_B: Tensor) -> DraftTree:
        """A tree for each row."""
        return draft_tree([self.guess(text) for text in self.texts], roots_B.device)

    def guess(self, text: NgramIndex) -> Trie:
        """What may follow a text, below its last token."""
        raise NotImplementedError

    def observe(self, finished: StepResult) -> None:
        """What was emitted."""
        for text, tokens in zip(self.texts, finished.tokens, strict=True):
            text.append(tokens)

    def select(self, rows_R: Tensor) -> None:
        """Keep these rows' texts."""
        self.texts = [self.texts[row] for row in rows_R.tolist()]

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Take over other texts."""
        assert isinstance(other, NgramDrafter)
        for row, text in zip(rows_R.tolist(), other.texts, strict=True):
            self.texts[row] = text


class PromptLookupDrafter(NgramDrafter):
    """Prompt lookup (Saxena, 2023), or retrieval where a corpus is given."""

    def __init__(
        self, size: int = 12, length: int = 10, longest: int = 3, shortest: int = 1, corpus: Corpus | None = None
    ) -> None:
        """Set the limits.

        Args:
            size: nodes of the largest tree, the root counted.
            length: tokens of a continuation.
            longest: n-gram at the text's end to begin with.
            shortest: n-gram that is still looked for.
            corpus: where to look; None for the text itself.

        Raises:
            ValueError: limits that allow nothing.
        """
        if size < 2 or length < 1 or not 1 <= shortest <= longest <= SORTED_TOKENS:
            raise ValueError(
                f"a lookup needs at least 2 nodes, continuations of 1 token, and n-grams of 1 to {SORTED_TOKENS}; not "
                f"{size}, {length}, and {shortest} to {longest}"
            )
        super().__init__(size, longest if corpus is None else 0)
        self.length, self.longest, self.shortest, self.corpus = length, longest, shortest, corpus

    def guess(self, text: NgramIndex) -> Trie:
        """See `merged`."""
        found = continuations(self.corpus or text, text.tokens, self.longest, self.shortest, self.length)
        return merged(text.tokens[-1], found, self.max_nodes)
