"""A head's tree joined with looked-up branches, whose common prefixes are shared.

The head's nodes come first, then those that only the lookup has. Both are top-k drafts, so the rule
for these is exact for them together.

    head      0 root ── 1 sat ── 2 on          lookup    root ── sat ── down
    joined    0 root ── 1 sat ──┬── 2 on
                                └── 3 down

A head's tree is on the device and a lookup's on the host. To avoid a synchronization they are
joined on the device, where nodes are compared by a hash of their path: the sum of (token + 1)
K^depth over its nodes, modulo 2^64. If two paths had the same hash, a draft would get a wrong
parent: it would be rejected, and the output would still be exact.

Letters in tensor names: B batch, N nodes of the head's tree, S of the lookup's without the root, M
of both, R selected rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from typing import Any, Self

import torch
from torch import Tensor

from ...heads.layers.constants import constants, counting, upload
from ..trees.tree import DraftTree
from .base import BatchDrafter, DraftContext, PrefillChunk
from .prompt_lookup import PromptLookupDrafter, Trie
from .round import Round

FACTOR = 0x9E3779B97F4A7C15
"""K: odd and large."""
WORD = 1 << 64
"""The number of hashes."""


class HeadAndLookup(BatchDrafter):
    """A head and a lookup that draft one tree."""

    def __init__(self, head: BatchDrafter, lookup: BatchDrafter) -> None:
        """Wrap both.

        Raises:
            ValueError: a second drafter that looks nothing up, or a head whose drafts are
                sampled, which must not be mixed with others.
        """
        if not isinstance(lookup, PromptLookupDrafter):
            raise ValueError(
                "beside a head, a drafter must be one that looks things up: prompt-lookup or"
                " retrieval"
            )
        if head.kind != "top_k":
            raise ValueError(
                "sampled drafts cannot be joined with those of a lookup; use a tree of top-k drafts"
            )
        self.head = head
        self.lookup = lookup
        self.parts = (head, lookup)
        self.feature_layers = head.feature_layers
        self.max_nodes = head.max_nodes + lookup.max_nodes - 1

    def begin(self, context: DraftContext) -> None:
        self.head.begin(context)
        self.lookup.begin(context)

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        self.head.resume(context, kept, state, whole)
        self.lookup.begin(context)
        self.lookup.prefill(kept)

    def saved_state(self) -> Any:
        """The head's; a lookup reads its text again."""
        return self.head.saved_state()

    def prefill(self, chunk: PrefillChunk) -> None:
        self.head.prefill(chunk)
        self.lookup.prefill(chunk)

    def propose(self, roots_B: Tensor) -> DraftTree:
        tree = self.head.propose(roots_B)
        tries = [self.lookup.candidates(text) for text in self.lookup.texts]
        return joined(tree, tries)

    def observe(self, finished: Round) -> None:
        self.head.observe(finished)
        self.lookup.observe(finished)

    def select(self, rows_R: Tensor) -> None:
        self.head.select(rows_R)
        self.lookup.select(rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self.head.replace(rows_R, other.head)
        self.lookup.replace(rows_R, other.lookup)

    def fresh(self) -> Self:
        return type(self)(self.head.fresh(), self.lookup.fresh())


def joined(tree: DraftTree, tries: Sequence[Trie]) -> DraftTree:
    """A tree with the nodes of one trie per row added."""
    batch, nodes = tree.tokens_BN.shape
    device = tree.tokens_BN.device
    more = max(len(trie.tokens) for trie in tries) - 1
    if more == 0:
        return tree
    size = nodes + more
    looked_up = upload([_row(trie, more) for trie in tries], device)
    tokens_BS, parents_BS, paths_BS = looked_up.split(more, dim=1)

    # 1. Which of the head's nodes, if any, has the same path as each looked-up one. A node's hash
    #    is the sum of the terms of its ancestors, itself included; padding matches nothing.
    terms_BN = (tree.tokens_BN + 1) * _powers(tree.max_depth, device)[tree.structure.depths_BN]
    head_paths_BN = (tree.structure.ancestors_BNN * terms_BN[:, None]).sum(-1)
    same_BSN = paths_BS[:, :, None] == head_paths_BN[:, None]
    if tree.padding:
        is_node_BN = counting(nodes, device) < tree.sizes_B[:, None]
        same_BSN = same_BSN & is_node_BN[:, None]
    is_shared_BS = same_BSN.any(-1)
    is_new_BS = (tokens_BS >= 0) & ~is_shared_BS  # token -1 is padding of `_row`

    # 2. Each looked-up node's index in the joined tree: of the head's node with the same path, or
    #    after the head's last node. With a head's tree of 5 nodes:
    #        is_new_BS            0  1  0  1
    #        cumsum - 1 + 5       4  5  5  6
    #        joined_BS            2  5  3  6      where nodes 2 and 3 have the same paths
    new_BS = tree.sizes_B[:, None] - 1 + is_new_BS.cumsum(-1)
    joined_BS = torch.where(is_shared_BS, same_BSN.byte().argmax(-1), new_BS)
    root_B1 = torch.zeros_like(joined_BS[:, :1])
    joined_parents_BS = torch.cat([root_B1, joined_BS], dim=1).gather(1, parents_BS)

    # 3. Scatter the new nodes after each row's tree. The others go to column `size`, one more than
    #    the tree has, which is cut off in the end. Columns that stay empty are read by the target,
    #    too: they hold the root, a token of the text, while token 0 might have weights with NaN.
    into_BS = torch.where(is_new_BS, joined_BS, size)
    roots_BM = tree.tokens_BN[:, :1].expand(-1, more + 1)
    zeros_BM = tree.tokens_BN.new_zeros(batch, more + 1)
    tokens_BM = torch.cat([tree.tokens_BN, roots_BM], dim=1)
    tokens_BM = tokens_BM.scatter(1, into_BS, tokens_BS)
    parents_BM = torch.cat([tree.parents_BN, zeros_BM], dim=1)
    parents_BM = parents_BM.scatter(1, into_BS, joined_parents_BS)

    depth = tree.max_depth
    for trie in tries:
        depth = max(depth, *trie.depths())
    sizes_B = tree.sizes_B + is_new_BS.sum(-1)
    # On a CPU, cut the columns that no row uses, so that nothing is computed for them. Elsewhere
    # that would be a synchronization.
    if device.type == "cpu":
        size = int(sizes_B.max())
    return DraftTree(tokens_BM[:, :size], parents_BM[:, :size], sizes_B, max_depth=depth)


@constants
def _powers(depth: int, device: torch.device) -> Tensor:
    """K^d for each depth d; 0 for the root, which is on every path."""
    powers = [0]
    for exponent in range(1, depth + 1):
        powers.append(c_int64(pow(FACTOR, exponent, WORD)).value)
    return torch.tensor(powers, dtype=torch.int64, device=device)


def _row(trie: Trie, size: int) -> list[int]:
    """Tokens, parents and path hashes of all nodes but the root, each padded to a size."""
    # The hash of each node's path, as `joined` computes it on the device; there in int64, whose
    # bits are the same.
    paths = [0]
    nodes = zip(trie.tokens[1:], trie.parents[1:], trie.depths()[1:], strict=True)
    for token, parent, depth in nodes:
        paths.append((paths[parent] + (token + 1) * pow(FACTOR, depth, WORD)) % WORD)
    hashes = [c_int64(path).value for path in paths[1:]]
    padding = size - len(hashes)
    return [
        *trie.tokens[1:],
        *[-1] * padding,
        *trie.parents[1:],
        *[0] * padding,
        *hashes,
        *[0] * padding,
    ]
