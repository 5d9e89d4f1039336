"""Draft trees: the tokens that a forward checks at once, and the policies by which they are grown.

Letters in tensor names: B batch, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..heads.layers.draft_cache import counting
from .tuning.tree_spec import TreeKind, TreeShape


@dataclass(frozen=True)
class DraftTree:
    """The guesses of one round: node 0 is the root, the newest token, which is not yet in the cache."""

    tokens_BN: Tensor
    parents_BN: Tensor
    """parents[0] is -1 and parents[i] < i; siblings stand in draw order."""
    sizes_B: Tensor
    """Nodes beyond a row's size are padding and never match."""
    max_depth: int
    """Number of tokens on the longest path that any row may hold, the root not counted."""
    kind: TreeKind = "top_k"
    draft_probs_BNV: Tensor | None = None
    """At node n: what the children of n were sampled from; None for top-k drafts."""
    shape: TreeShape | None = None
    """The structure, where the host knows it: the same in all rows. Drawn trees have one."""
    padding: bool = True
    """Whether any row may have fewer nodes than there are in `tokens_BN`."""

    def to(self, device: torch.device) -> DraftTree:
        """The same on another device, uploaded at once; a second time for what the nodes were drawn from."""
        if self.tokens_BN.device == device:
            return self
        nodes = self.tokens_BN.shape[1]
        whole = torch.cat([self.tokens_BN, self.parents_BN, self.sizes_B[:, None]], dim=1).to(device)
        tokens_BN, parents_BN, sizes_B1 = whole.split([nodes, nodes, 1], dim=1)
        probs_BNV = None if self.draft_probs_BNV is None else self.draft_probs_BNV.to(device)
        return replace(
            self, tokens_BN=tokens_BN, parents_BN=parents_BN, sizes_B=sizes_B1[:, 0], draft_probs_BNV=probs_BNV
        )

    @classmethod
    def of_shape(
        cls, shape: TreeShape, tokens_BN: Tensor, kind: TreeKind = "top_k", draft_probs_BNV: Tensor | None = None
    ) -> DraftTree:
        """A tree whose structure is known; nothing is computed for what every tree of that shape has."""
        same = structure(shape, len(tokens_BN), tokens_BN.device)
        return cls(tokens_BN, same.parents_BN, same.sizes_B, shape.depth, kind, draft_probs_BNV, shape, False)

    @property
    def in_order(self) -> bool:
        """Whether any path is known to be the first nodes in their order."""
        return self.shape is not None and self.shape.is_chain

    @property
    def structure(self) -> Structure | None:
        """What is known of it beforehand."""
        return None if self.shape is None else structure(self.shape, len(self.tokens_BN), self.tokens_BN.device)

    @cached_property
    def ancestors_BNN(self) -> Tensor:
        """True at [b, n, m] where m lies on the path from the root to n, both included.

        With P for "m is the parent of n", (I + P)^k counts the ways to get from n to m in k steps up, or none; squared
        again and again it reaches the root in log2(depth) products.
        """
        if self.structure is not None:
            return self.structure.ancestors_BNN
        nodes, device = self.tokens_BN.shape[1], self.tokens_BN.device
        reach = _parent_rows(nodes, device)[self.parents_BN] + _parent_rows(nodes, device)[:nodes]
        for _ in range(self.max_depth.bit_length()):
            reach = reach @ reach
            if self.max_depth > COUNTED:
                reach = reach.clamp(max=1)
        return reach > 0

    @cached_property
    def depths_BN(self) -> Tensor:
        """Distance from the root."""
        return self.ancestors_BNN.sum(-1) - 1 if self.structure is None else self.structure.depths_BN

    @cached_property
    def above_BN(self) -> Tensor:
        """The parent of every node, the root being its own."""
        return self.parents_BN.clamp(min=0) if self.structure is None else self.structure.above_BN

    @cached_property
    def framed_BNX(self) -> Tensor:
        """See `framed`."""
        return framed(self.ancestors_BNN) if self.structure is None else self.structure.framed_BNX

    def path_to(self, last_B: Tensor) -> tuple[Tensor, Tensor]:
        """The nodes from the root to a node of each row, [B, max_depth + 1] with padding, and how many there are."""
        # One graph is for trees of any shape.
        if not torch.compiler.is_compiling() and self.structure is not None:
            return self.structure.paths_NA[last_B], self.structure.lengths_N[last_B]
        nodes = self.tokens_BN.shape[1]
        on_path_BN = self.ancestors_BNN[counting(len(last_B), last_B.device), last_B]
        # Parents stand before their children: in ascending order nodes form the path, and the last node pads it.
        numbers_BN = counting(nodes, last_B.device).where(on_path_BN, counting(1, last_B.device, nodes - 1))
        return numbers_BN.topk(self.max_depth + 1, largest=False).values, on_path_BN.sum(-1)


COUNTED = 60
"""Depth up to which the ways of (I + P)^k can be counted in float32: at k = 64 there are at most 2e18."""


def framed(seen_BNM: Tensor) -> Tensor:
    """What nodes see of nodes, with a first column for all committed tokens and a last for what lies behind the nodes.

    [B, N, M + 2] of [B, N, M].
    """
    return F.pad(F.pad(seen_BNM, (1, 0), value=True), (0, 1), value=False)


def _parent_rows(nodes: int, device: torch.device) -> Tensor:
    """The unit vector of each node, and nothing for the parent -1 of the root: float32 [N + 1, N]."""
    return _unit_rows(nodes, device, torch.is_inference_mode_enabled())


@lru_cache(maxsize=256)
def _unit_rows(nodes: int, device: torch.device, inference: bool) -> Tensor:
    """See `_counting`."""
    return torch.eye(nodes + 1, nodes, device=device)


@dataclass(frozen=True)
class Structure:
    """What all trees of one shape have; see `DraftTree`."""

    parents_BN: Tensor
    above_BN: Tensor
    sizes_B: Tensor
    ancestors_BNN: Tensor
    framed_BNX: Tensor
    depths_BN: Tensor
    paths_NA: Tensor
    """The path to each node, the root first, padded with the last node."""
    lengths_N: Tensor
    """Nodes of each path."""


def structure(shape: TreeShape, batch: int, device: torch.device) -> Structure:
    """Made once for each shape and number of rows."""
    return _structure(shape, batch, device, torch.is_inference_mode_enabled())


@lru_cache(maxsize=256)
def _structure(shape: TreeShape, batch: int, device: torch.device, inference: bool) -> Structure:
    """See `_counting`."""
    paths = [(), *shape.paths]
    above = [[path[: len(other)] == other for other in paths] for path in paths]
    ancestors_BNN = torch.tensor(above, device=device).expand(batch, -1, -1)
    parents_N, lengths_N = (
        torch.tensor(numbers, device=device) for numbers in (shape.parents, [len(path) + 1 for path in paths])
    )
    places = [[node for node, on_path in enumerate(row) if on_path] for row in above]
    paths_NA = torch.tensor(
        [[*place, *[shape.size - 1] * (shape.depth + 1 - len(place))] for place in places], device=device
    )
    return Structure(
        parents_N.expand(batch, -1),
        parents_N.clamp(min=0).expand(batch, -1),
        torch.full((batch,), shape.size, device=device),
        ancestors_BNN,
        framed(ancestors_BNN),
        (lengths_N - 1).expand(batch, -1),
        paths_NA,
        lengths_N,
    )
