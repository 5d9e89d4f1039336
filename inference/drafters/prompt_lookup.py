"""Prompt lookup: drafts are continuations of the newest tokens where these occurred before.

Prompt lookup (Saxena, 2023) searches the text itself, retrieval (REST, arXiv:2311.08252) a
datastore. Of the n-grams at the text's end the longest that occurs anywhere is taken. Its
continuations are merged into a tree, which keeps the nodes that most continuations share, newer
ones first among equals. For example, the text ends with "a cat", which was followed by "sat by" and
before that by "sat on", and the tree has 4 nodes:

    cat ── sat ──┬── by
                 └── on

All this runs on the host, which knows the tokens anyway; a round's trees are uploaded at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ...heads.layers.constants import upload
from ..trees.tree import DraftTree
from .base import BatchDrafter, DraftContext, PrefillChunk, replaced_rows, selected_rows
from .ngram_index import SORTED_TOKENS, Corpus, NgramIndex
from .round import Round

CONTINUATIONS = 16
"""Occurrences in a corpus that are read, at most."""


@dataclass
class Trie:
    """A tree of token paths, whose common prefixes are shared."""

    tokens: list[int]
    """Of each node, the root first."""
    parents: list[int] = field(default_factory=lambda: [-1])
    """Of each node; the root's is -1."""
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Node, token) to its child with that token."""

    def add(self, path: Sequence[int], parent: int = 0) -> list[int]:
        """Add a path below a node; return its nodes."""
        nodes = []
        for token in path:
            node = self.children.get((parent, token))
            if node is None:
                node = len(self.tokens)
                self.children[parent, token] = node
                self.tokens.append(token)
                self.parents.append(parent)
            nodes.append(node)
            parent = node
        return nodes

    def depths(self) -> list[int]:
        """Depth of each node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths


def draft_tree(tries: Sequence[Trie], device: torch.device) -> DraftTree:
    """Return tries as one batch, each padded with its root to the size of the largest.

    The root is a token of the text: the target's embedding of another one might contain NaN.
    """
    nodes = max(len(trie.tokens) for trie in tries)
    depth = 0
    columns = []  # of each row: N tokens, N parents and the size, uploaded as one
    for trie in tries:
        size = len(trie.tokens)
        tokens = [*trie.tokens, *[trie.tokens[0]] * (nodes - size)]
        parents = [*trie.parents, *[0] * (nodes - size)]
        columns.append([*tokens, *parents, size])
        depth = max(depth, *trie.depths())
    tokens_BN, parents_BN, sizes_B1 = upload(columns, device).split([nodes, nodes, 1], dim=1)
    return DraftTree(tokens_BN, parents_BN, sizes_B1[:, 0], max_depth=depth)


def merged(root: int, continuations: Sequence[Sequence[int]], size: int) -> Trie:
    """The `size` - 1 nodes below a root that most continuations share."""
    whole = Trie([root])
    shared: Counter[int] = Counter()
    for path in continuations:
        shared.update(whole.add(path))
    # A child is shared by no more continuations than its parent, and comes later, so the best nodes
    # are a tree.
    best_first = sorted(shared, key=lambda node: (-shared[node], node))
    part = Trie([root])
    node_in_part = {0: 0}  # from the nodes of `whole`
    for node in sorted(best_first[: size - 1]):
        node_in_part[node] = len(part.tokens)
        part.add([whole.tokens[node]], node_in_part[whole.parents[node]])
    return part


class NgramDrafter(BatchDrafter):
    """Drafts from an index of each row's text."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.texts: list[Any] = []
        """The index of each row's text."""

    @abstractmethod
    def new_text(self) -> NgramIndex:
        """The index of an empty text."""

    @abstractmethod
    def candidates(self, text: Any) -> Trie:
        """Continuations of a text, below its last token."""

    def begin(self, context: DraftContext) -> None:
        self.texts = [self.new_text() for _ in range(context.batch_size)]

    def prefill(self, chunk: PrefillChunk) -> None:
        tokens_of_rows = chunk.tokens_BT.tolist()
        following_of_rows = chunk.next_tokens_BT.tolist()
        lengths = chunk.lengths_B.tolist()
        for row, text in enumerate(self.texts):
            # The first token of a prompt is no other token's successor.
            if not text.tokens:
                text.append(tokens_of_rows[row][:1])
            text.append(following_of_rows[row][: lengths[row]])

    def propose(self, roots_B: Tensor) -> DraftTree:
        tries = [self.candidates(text) for text in self.texts]
        return draft_tree(tries, roots_B.device)

    def observe(self, finished: Round) -> None:
        for text, tokens in zip(self.texts, finished.tokens, strict=True):
            text.append(tokens)

    def select(self, rows_R: Tensor) -> None:
        self.texts = selected_rows(self.texts, rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self.texts = replaced_rows(self.texts, rows_R, other.texts)


class PromptLookupDrafter(NgramDrafter):
    """Prompt lookup, or retrieval where a corpus is given."""

    def __init__(
        self,
        size: int = 12,
        length: int = 10,
        longest: int = 3,
        shortest: int = 1,
        corpus: Corpus | None = None,
    ) -> None:
        """Look up n-grams of `shortest` to `longest` tokens in a corpus, or (None) in the text.

        The trees have up to `size` nodes, the root counted, from continuations of `length` tokens.
        """
        if size < 2 or length < 1 or not 1 <= shortest <= longest <= SORTED_TOKENS:
            raise ValueError(
                "a lookup needs at least 2 nodes, continuations of 1 token, and n-grams of 1 to"
                f" {SORTED_TOKENS}; not {size}, {length}, and {shortest} to {longest}"
            )
        super().__init__(size)
        self.length = length
        self.longest = longest
        self.shortest = shortest
        self.corpus = corpus

    def new_text(self) -> NgramIndex:
        # With a corpus the text itself is not searched.
        return NgramIndex(self.longest if self.corpus is None else 0)

    def candidates(self, text: NgramIndex) -> Trie:
        tokens = text.tokens
        corpus = self.corpus or text
        # The longest n-gram at the text's end that has a continuation.
        for size in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            gram = tokens[len(tokens) - size :]
            continuations = corpus.continuations(gram, CONTINUATIONS, self.length)
            if any(continuations):
                return merged(tokens[-1], continuations, self.max_nodes)
        return Trie(tokens[-1:])
