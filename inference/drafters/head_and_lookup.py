"""A head's tree with the branches of a source that looks things up: what begins alike is joined.

The head's nodes come first; the source's fill up what room is left. Both are picked, so the rule for picked trees is
exact for them together.

A head's tree is on the device and a source's on the host. So that nobody waits for either they are joined on the
device, where nodes are compared by a number for their path: the sum of (token + 1) K^depth over its nodes, modulo 2^64.
Were two paths ever to have the same number, a guess would hang in the wrong place: a guess lost, and no exactness.

Letters in tensor names: B batch, N nodes of the head's tree, S of the source's without the root, M of both, A accepted.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...heads.layers.draft_cache import counting
from ..tree import DraftTree
from .base import DraftContext, Drafter, PrefillChunk, StepResult
from .prompt_lookup import PromptLookupDrafter, Trie

SHARES = ("head", "source", "both")
HEAD, SOURCE, BOTH = range(3)
FACTOR, WORD = 0x9E3779B97F4A7C15, 1 << 64
"""K, odd and large; and the numbers that there are."""


class HeadAndLookup(Drafter):
    """Two drafters' guesses in one tree."""

    def __init__(self, head: Drafter, source: Drafter) -> None:
        """Put them together.

        Raises:
            ValueError: a source that looks nothing up, or a head whose guesses are drawn, which must not be mixed with
                others.
        """
        if not isinstance(source, PromptLookupDrafter):
            raise ValueError("beside a head, a drafter must be one that looks things up: prompt-lookup or retrieval")
        if head.kind != "top_k":
            raise ValueError("guesses that are drawn cannot be joined with those of another source; pick them instead")
        self.head, self.source = head, source
        self.feature_layers = head.feature_layers
        self.max_nodes = head.max_nodes + source.max_nodes - 1
        self.accepted: Counter[str] = Counter()
        """Accepted tokens by whose guesses they were."""
        self._owners_BM: Tensor | None = None

    def __repr__(self) -> str:
        return f"Hybrid({self.head!r} + {self.source!r})"

    def __copy__(self) -> HeadAndLookup:
        """One for other rows."""
        other = HeadAndLookup(copy.copy(self.head), copy.copy(self.source))
        other.accepted = self.accepted
        return other

    def begin(self, start: DraftContext) -> None:
        """DraftContext both."""
        self.head.begin(start)
        self.source.begin(start)

    def read(self, passage: PrefillChunk) -> None:
        """Show both."""
        self.head.read(passage)
        self.source.read(passage)

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Join both trees, row by row."""
        tree = self.head.propose(roots_B)
        tries = [self.source.guess(text) for text in self.source.texts]
        joint, self._owners_BM = joined(tree, tries)
        return joint

    def asks(self, finished: StepResult) -> Tensor | None:
        """Whose the accepted tokens are."""
        if self._owners_BM is None or finished.tree.max_depth == 0:  # or somebody decided not to guess in this round
            return None
        return self._owners_BM.gather(1, finished.verdict.path_BA)

    def observe(self, finished: StepResult) -> None:
        """Show both; count whose guesses were right."""
        for owners, tokens in zip(finished.asked, finished.tokens, strict=True):
            self.accepted.update(SHARES[owner] for owner in owners[1 : len(tokens)])
        self.head.observe(finished)
        self.source.observe(finished)

    def compile(self) -> None:
        """The head."""
        self.head.compile()

    def resume(self, start: DraftContext, kept: PrefillChunk, memory: Any, whole: bool) -> None:
        """Both go on."""
        self.head.resume(start, kept, memory[0], whole)
        self.source.resume(start, kept, memory[1], whole)

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """The head's: the source lies on the host."""
        return self.head.cache_bytes(rows, tokens)

    def memory(self) -> Any:
        """Both keep theirs."""
        head = self.head.memory()
        return None if head is None and self.feature_layers else (head, self.source.memory())

    def select(self, rows_R: Tensor) -> None:
        """Both keep these rows."""
        self.head.select(rows_R)
        self.source.select(rows_R)

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Both take over theirs."""
        assert isinstance(other, HeadAndLookup)
        self.head.replace(rows_R, other.head)
        self.source.replace(rows_R, other.source)


def joined(tree: DraftTree, tries: Sequence[Trie]) -> tuple[DraftTree, Tensor]:
    """A tree with more nodes, each row's in a trie of its own.

    Returns:
        the tree, and whose each node is, [B, M]: `HEAD`, `SOURCE` or `BOTH`.
    """
    batch, nodes = tree.tokens_BN.shape
    device, more = tree.tokens_BN.device, max(len(trie.tokens) for trie in tries) - 1
    if more == 0:
        return tree, torch.full_like(tree.tokens_BN, HEAD)
    found = torch.tensor([_row(trie, more) for trie in tries], device=device)
    tokens_BS, parents_BS, paths_BS = found.split(more, dim=1)
    powers_D = _powers(tree.max_depth + 1, device)
    terms_BN = (tree.tokens_BN + 1) * powers_D[tree.depths_BN]
    ours_BN = (tree.ancestors_BNN * terms_BN[:, None]).sum(-1)
    same_BSN = paths_BS[:, :, None] == ours_BN[:, None]
    if tree.padding:
        same_BSN = same_BSN & (counting(nodes, device) < tree.sizes_B[:, None])[:, None]
    there_BS, is_new_BS = same_BSN.any(-1), tokens_BS >= 0
    is_new_BS = is_new_BS & ~there_BS
    place_BS = torch.where(there_BS, same_BSN.byte().argmax(-1), tree.sizes_B[:, None] - 1 + is_new_BS.cumsum(-1))
    size = nodes + more
    into_BS, shared_BS = torch.where(is_new_BS, place_BS, size), torch.where(there_BS, place_BS, size)
    room_BM = tree.tokens_BN.new_zeros(batch, more + 1)  # the last place is for what is thrown away
    below_BS = torch.cat([torch.zeros_like(place_BS[:, :1]), place_BS], dim=1).gather(1, parents_BS)
    joint = DraftTree(
        torch.cat([tree.tokens_BN, room_BM], dim=1).scatter(1, into_BS, tokens_BS)[:, :size],
        torch.cat([tree.parents_BN, room_BM], dim=1).scatter(1, into_BS, below_BS)[:, :size],
        tree.sizes_B + is_new_BS.sum(-1),
        max_depth=max(tree.max_depth, *(max(trie.depths()) for trie in tries)),
    )
    if device.type == "cpu":  # which can be asked for free: nothing is computed for places that stay empty
        size = int(joint.sizes_B.max())
        joint = replace(joint, tokens_BN=joint.tokens_BN[:, :size], parents_BN=joint.parents_BN[:, :size])
    owners_BM = torch.full_like(tree.tokens_BN[:, :1], HEAD).repeat(1, nodes + more + 1)
    owners_BM = owners_BM.scatter(1, into_BS, SOURCE).scatter(1, shared_BS, BOTH)[:, :size]
    return joint, owners_BM


def _row(trie: Trie, size: int) -> list[int]:
    """Of all nodes but the root: tokens, parents, and the numbers of their paths, each padded to a size."""
    paths = [0]
    for token, parent, depth in zip(trie.tokens[1:], trie.parents[1:], trie.depths()[1:], strict=True):
        paths.append((paths[parent] + (token + 1) * pow(FACTOR, depth, WORD)) % WORD)
    padding = size + 1 - len(paths)
    return [
        *trie.tokens[1:],
        *[-1] * padding,
        *trie.parents[1:],
        *[0] * padding,
        *map(_signed, paths[1:]),
        *[0] * padding,
    ]


@lru_cache(maxsize=64)
def _powers(count: int, device: torch.device) -> Tensor:
    """K^depth; 0 for the root, which is on every path."""
    return torch.tensor([0, *(_signed(pow(FACTOR, depth, WORD)) for depth in range(1, count))], device=device)


def _signed(number: int) -> int:
    """As an int64 holds it."""
    return number - WORD if number >= WORD // 2 else number
