"""A head's tree joined with looked-up branches, whose common prefixes are shared.

The head's nodes come first, those that only the lookup has after them. Both are top-k drafts, so the rule for these is
exact for them together.

A head's tree is on the device and a lookup's on the host. To avoid a synchronization they are joined on the device,
where nodes are compared by a hash of their path: the sum of (token + 1) K^depth over its nodes, modulo 2^64. If two
paths had the same hash, a draft would get a wrong parent: it would be rejected, and the output still be exact.

Letters in tensor names: B batch, N nodes of the head's tree, S of the lookup's without the root, M of both, A accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import replace

import torch
from torch import Tensor

from ...heads.layers.constants import counting, upload
from ..tree import DraftTree
from .base import Drafter, StepResult, constant
from .prompt_lookup import PromptLookupDrafter, Trie

OWNERS = ("head", "source", "both")
HEAD, SOURCE, BOTH = range(3)
FACTOR, WORD = 0x9E3779B97F4A7C15, 1 << 64
"""K, odd and large; and the number of hashes."""


class HeadAndLookup(Drafter):
    """A head and a lookup that draft one tree."""

    def __init__(self, head: Drafter, lookup: Drafter) -> None:
        """Wrap both.

        Raises:
            ValueError: a drafter beside the head that looks nothing up, or a head whose drafts are sampled, which must
                not be mixed with others.
        """
        if not isinstance(lookup, PromptLookupDrafter):
            raise ValueError("beside a head, a drafter must be one that looks things up: prompt-lookup or retrieval")
        if head.kind != "top_k":
            raise ValueError("sampled drafts cannot be joined with those of a lookup; use a tree of top-k drafts")
        super().__init__(head, lookup)
        self.max_nodes, self.needs_host_values = head.max_nodes + lookup.max_nodes - 1, True
        self.accepted: Counter[str] = Counter()
        """Accepted tokens by who drafted them."""
        self._owners_BM: Tensor | None = None

    def propose(self, roots_B: Tensor) -> DraftTree:
        head, lookup = self.parts
        assert isinstance(lookup, PromptLookupDrafter)
        tree = head.propose(roots_B)
        joint, self._owners_BM = joined(tree, [lookup.candidates(text) for text in lookup.row_states])
        return joint

    def host_values(self, step: StepResult) -> Tensor | None:
        """Who drafted the accepted tokens."""
        if self._owners_BM is None or step.tree.max_depth == 0:  # or this step had no drafts
            return None
        return self._owners_BM.gather(1, step.path_BA)

    def observe(self, step: StepResult) -> None:
        for owners, tokens in zip(step.host_values, step.tokens, strict=True):
            self.accepted.update(OWNERS[owner] for owner in owners[1 : len(tokens)])
        super().observe(step)


def joined(tree: DraftTree, tries: Sequence[Trie]) -> tuple[DraftTree, Tensor]:
    """A tree with the nodes of one trie per row added.

    Returns:
        the tree, and who drafted each node, [B, M]: `HEAD`, `SOURCE` or `BOTH`.
    """
    batch, nodes = tree.tokens_BN.shape
    device, more = tree.tokens_BN.device, max(len(trie.tokens) for trie in tries) - 1
    if more == 0:
        return tree, torch.full_like(tree.tokens_BN, HEAD)
    found = upload([_row(trie, more) for trie in tries], device)
    tokens_BS, parents_BS, paths_BS = found.split(more, dim=1)
    powers = (0, *(c_int64(pow(FACTOR, depth, WORD)).value for depth in range(1, tree.max_depth + 1)))
    powers_D = constant(powers, torch.int64, device)  # 0 for the root, which is on every path
    terms_BN = (tree.tokens_BN + 1) * powers_D[tree.structure.depths_BN]
    ours_BN = (tree.structure.ancestors_BNN * terms_BN[:, None]).sum(-1)
    same_BSN = paths_BS[:, :, None] == ours_BN[:, None]
    if tree.padding:
        same_BSN = same_BSN & (counting(nodes, device) < tree.sizes_B[:, None])[:, None]
    there_BS, is_new_BS = same_BSN.any(-1), tokens_BS >= 0
    is_new_BS = is_new_BS & ~there_BS
    place_BS = torch.where(there_BS, same_BSN.byte().argmax(-1), tree.sizes_B[:, None] - 1 + is_new_BS.cumsum(-1))
    size = nodes + more
    into_BS, shared_BS = torch.where(is_new_BS, place_BS, size), torch.where(there_BS, place_BS, size)
    room_BM = tree.tokens_BN.new_zeros(batch, more + 1)  # the last column is discarded
    # What stays empty is read, too: the root is a token of the text, while token 0 might have weights that are NaN.
    roots_BM = tree.tokens_BN[:, :1].expand(-1, more + 1)
    below_BS = torch.cat([torch.zeros_like(place_BS[:, :1]), place_BS], dim=1).gather(1, parents_BS)
    joint = DraftTree(
        torch.cat([tree.tokens_BN, roots_BM], dim=1).scatter(1, into_BS, tokens_BS)[:, :size],
        torch.cat([tree.parents_BN, room_BM], dim=1).scatter(1, into_BS, below_BS)[:, :size],
        tree.sizes_B + is_new_BS.sum(-1),
        max_depth=max(tree.max_depth, *(max(trie.depths()) for trie in tries)),
    )
    if device.type == "cpu":  # no synchronization there: nothing is computed for nodes that stay empty
        size = int(joint.sizes_B.max())
        joint = replace(joint, tokens_BN=joint.tokens_BN[:, :size], parents_BN=joint.parents_BN[:, :size])
    owners_BM = torch.full_like(tree.tokens_BN[:, :1], HEAD).repeat(1, nodes + more + 1)
    owners_BM = owners_BM.scatter(1, into_BS, SOURCE).scatter(1, shared_BS, BOTH)[:, :size]
    return joint, owners_BM


def _row(trie: Trie, size: int) -> list[int]:
    """Tokens, parents and path hashes of all nodes but the root, each padded to a size."""
    paths = [0]
    for token, parent, depth in zip(trie.tokens[1:], trie.parents[1:], trie.depths()[1:], strict=True):
        paths.append((paths[parent] + (token + 1) * pow(FACTOR, depth, WORD)) % WORD)
    hashes, padding = [c_int64(path).value for path in paths[1:]], [0] * (size + 1 - len(paths))
    return [*trie.tokens[1:], *([-1] * len(padding)), *trie.parents[1:], *padding, *hashes, *padding]
