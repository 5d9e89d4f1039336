"""Draft trees that are made on the host, from tokens that were found in a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...heads.layers.constants import upload
from ..trees.tree import DraftTree


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


def draft_tree(tries: Sequence[Trie], device: torch.device, size: int = 0) -> DraftTree:
    """Return tries as one batch, each padded with its root to the largest size, or to `size`.

    The root is a token of the text: the target's embedding of another one might contain NaN.
    """
    nodes = max(size, *[len(trie.tokens) for trie in tries])
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
