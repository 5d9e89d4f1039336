"""Prompt lookup: drafts are continuations of the newest tokens where these occurred before.

Prompt lookup (Saxena, 2023) searches the text itself, retrieval (REST, arXiv:2311.08252) a datastore. Of the n-grams at
the text's end the longest that occurs anywhere is taken; its continuations are merged into a tree, of which those nodes
are kept that most continuations share, newer ones first among equals.

All this runs on the host, which knows the tokens anyway; a step's tree is uploaded at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...heads.layers.constants import upload
from ..tree import DraftTree
from .base import DraftContext, Drafter, PrefillChunk, StepResult
from .ngram_index import SORTED_TOKENS, Corpus, NgramIndex

CONTINUATIONS = 16
"""Occurrences in a corpus that are read, at most."""


@dataclass
class Trie:
    """A tree of token paths, whose common prefixes are shared."""

    tokens: list[int]
    """Of each node, the root first."""
    parents: list[int] = field(default_factory=lambda: [-1])
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Node, token) to its child with that token."""

    def add(self, path: Sequence[int], parent: int = 0) -> list[int]:
        """Add a path below a node; return its nodes."""
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
        """Depth of each node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths


def draft_tree(tries: Sequence[Trie], device: torch.device) -> DraftTree:
    """A batch of tries, padded to the largest with their roots: other tokens might have weights that are NaN."""
    nodes = max(len(trie.tokens) for trie in tries)
    columns = []
    for trie in tries:
        size = len(trie.tokens)
        tokens = [*trie.tokens, *[trie.tokens[0]] * (nodes - size)]
        parents = [*trie.parents, *[0] * (nodes - size)]
        columns.append([*tokens, *parents, size])
    tokens_BN, parents_BN, sizes_B1 = upload(columns, device).split([nodes, nodes, 1], dim=1)
    return DraftTree(tokens_BN, parents_BN, sizes_B1[:, 0], max_depth=max(max(trie.depths()) for trie in tries))


def merged(root: int, continuations: Sequence[Sequence[int]], size: int) -> Trie:
    """The `size` - 1 nodes below a root that most continuations share."""
    whole = Trie([root])
    shared = Counter(node for path in continuations for node in whole.add(path))
    # A child is shared by no more continuations than its parent, and comes later: what is kept is a tree.
    kept = sorted(sorted(shared, key=lambda node: (-shared[node], node))[: size - 1])
    place = {node: number for number, node in enumerate([0, *kept])}
    part = Trie([root])
    for node in kept:
        part.add([whole.tokens[node]], place[whole.parents[node]])
    return part


class NgramDrafter(Drafter):
    """Drafts from an index of each row's text; these indexes are its `row_states`."""

    candidates: Callable[[Any], Trie]
    """Continuations of a text, below its last token."""
    new_text: Callable[[], NgramIndex]
    """Makes the index of an empty text."""

    def begin(self, context: DraftContext) -> None:
        self.row_states = [self.new_text() for _ in range(context.batch_size)]

    def prefill(self, chunk: PrefillChunk) -> None:
        rows = zip(self.row_states, chunk.tokens_BT.tolist(), chunk.next_tokens_BT.tolist(), strict=True)
        for (text, tokens, following), length in zip(rows, chunk.lengths_B.tolist(), strict=True):
            text.append([*([] if text.tokens else tokens[:1]), *following[:length]])

    def propose(self, roots_B: Tensor) -> DraftTree:
        return draft_tree([self.candidates(text) for text in self.row_states], roots_B.device)

    def observe(self, step: StepResult) -> None:
        for text, tokens in zip(self.row_states, step.tokens, strict=True):
            text.append(tokens)


class PromptLookupDrafter(NgramDrafter):
    """Prompt lookup, or retrieval where a corpus is given."""

    def __init__(
        self, size: int = 12, length: int = 10, longest: int = 3, shortest: int = 1, corpus: Corpus | None = None
    ) -> None:
        """Look up n-grams of `shortest` to `longest` tokens in a corpus, or with None in the text itself.

        The trees have up to `size` nodes, the root counted, from continuations of `length` tokens.
        """
        if size < 2 or length < 1 or not 1 <= shortest <= longest <= SORTED_TOKENS:
            raise ValueError(
                f"a lookup needs at least 2 nodes, continuations of 1 token, and n-grams of 1 to {SORTED_TOKENS}; not "
                f"{size}, {length}, and {shortest} to {longest}"
            )
        self.max_nodes, self.new_text = size, partial(NgramIndex, longest if corpus is None else 0)
        self.length, self.longest, self.shortest, self.corpus = length, longest, shortest, corpus

    def candidates(self, text: NgramIndex) -> Trie:
        tokens, corpus = text.tokens, self.corpus or text
        for size in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            found = corpus.continuations(tokens[len(tokens) - size :], CONTINUATIONS, self.length)
            if any(found):
                return merged(tokens[-1], found, self.max_nodes)
        return Trie(tokens[-1:])
