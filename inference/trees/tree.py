"""Draft trees: the tokens drafted in one step, with ancestors, depths and paths.

The structure follows from the parents of the nodes.

Letters in tensor names: B batch, N nodes, M nodes that are attended to, A nodes of a path, X
columns of a framed tree attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from ...heads.layers.constants import constants, counting, upload
from ...heads.layers.tree_slots import seen_in_chain
from .tree_spec import TreeKind, TreeShape

FLOAT_DEPTH = 60
"""Depth up to which (I + P)^k is exact in float32, see `DraftTree.structure`: at k = 64 its entries
reach 2e18."""


@dataclass(frozen=True)
class TreeStructure:
    """Everything that follows from the parents of a tree's nodes, whatever their tokens are."""

    ancestors_BNN: Tensor
    """True at [b, n, m] where m lies on the path from the root to n, both included."""
    depths_BN: Tensor
    """Distance from the root."""
    above_BN: Tensor
    """Parent of each node, the root being its own."""
    framed_BNX: Tensor
    """`framed` ancestors."""
    paths_NA: Tensor | None = None
    """Path to each node from the root, padded with the last node; only where the host knows the
    shape."""
    lengths_N: Tensor | None = None
    """Nodes of each path."""


@dataclass(frozen=True)
class DraftTree:
    """The drafts of one step; node 0 is the root.

    The root is the newest token, which is not yet in the KV cache.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    """parents[0] is -1 and parents[i] < i; siblings stand in draw order."""
    sizes_B: Tensor
    """Nodes beyond a row's size are padding and never match."""
    max_depth: int
    """Number of tokens on the longest path that any row may hold, the root not counted."""
    kind: TreeKind = "top_k"
    draft_probs_BNV: Tensor | None = None
    """At node n: the distribution that the children of n were sampled from; None for top-k
    drafts."""
    shape: TreeShape | None = None
    """The structure, where the host knows it: the same in all rows. Sampled trees have one."""
    padding: bool = True
    """Whether any row may have fewer nodes than there are in `tokens_BN`."""
    in_order: bool = False
    """Whether every path is known to be the first nodes in their order, as on a chain."""
    fallback: str = ""
    """Why a drafter proposes the root alone: "slower", "drafter_failed", "large_batch",
    "out_of_memory"; "not_finite" where a round was repeated: NaN or inf that the target computed
    for a draft spoiled the others; "segment_border" where drafts would leave their segment of
    positions, see `targets.segments`. Else empty."""

    @classmethod
    def of_shape(
        cls,
        shape: TreeShape,
        tokens_BN: Tensor,
        kind: TreeKind = "top_k",
        draft_probs_BNV: Tensor | None = None,
    ) -> DraftTree:
        """Return a tree of a static shape, whose structure is computed once for all such trees."""
        batch, device = len(tokens_BN), tokens_BN.device
        parents_BN, sizes_B, _ = _static(shape, batch, device)
        return cls(
            tokens_BN,
            parents_BN,
            sizes_B,
            shape.depth,
            kind,
            draft_probs_BNV,
            shape,
            False,
            in_order=shape.is_chain,
        )

    def to(self, device: torch.device) -> DraftTree:
        """A copy on another device, uploaded in one transfer; in two with draft probabilities."""
        if self.tokens_BN.device == device:
            return self
        nodes = self.tokens_BN.shape[1]
        whole = upload(
            torch.cat([self.tokens_BN, self.parents_BN, self.sizes_B[:, None]], dim=1), device
        )
        tokens_BN, parents_BN, sizes_B1 = whole.split([nodes, nodes, 1], dim=1)
        probs_BNV = None if self.draft_probs_BNV is None else upload(self.draft_probs_BNV, device)
        return replace(
            self,
            tokens_BN=tokens_BN,
            parents_BN=parents_BN,
            sizes_B=sizes_B1[:, 0],
            draft_probs_BNV=probs_BNV,
        )

    @cached_property
    def structure(self) -> TreeStructure:
        """Ancestors and all that follows from them.

        With P for "m is the parent of n", (I + P)^k counts the ways to get from n to m in k steps
        up, or none; squared again and again it reaches the root in log2(depth) products.
        """
        (batch, nodes), device = self.tokens_BN.shape, self.tokens_BN.device
        if self.shape is not None:
            return _static(self.shape, batch, device)[2]
        unit_MN = _unit_rows(nodes, device)
        reach_BNN = unit_MN[self.parents_BN] + unit_MN[:nodes]
        for _ in range(self.max_depth.bit_length()):
            reach_BNN = reach_BNN @ reach_BNN
            if self.max_depth > FLOAT_DEPTH:
                reach_BNN = reach_BNN.clamp(max=1)
        ancestors_BNN = reach_BNN > 0
        framed_BNX = framed(ancestors_BNN)
        return TreeStructure(
            ancestors_BNN, ancestors_BNN.sum(-1) - 1, self.parents_BN.clamp(min=0), framed_BNX
        )

    def path_to(self, last_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's path from the root to a node, [B, max_depth + 1], and its length.

        The paths are padded.
        """
        known = self.structure
        if known.paths_NA is not None and known.lengths_N is not None:
            return known.paths_NA[last_B], known.lengths_N[last_B]
        nodes = self.tokens_BN.shape[1]
        on_path_BN = known.ancestors_BNN[counting(len(last_B), last_B.device), last_B]
        # Parents stand before their children: in ascending order nodes form the path, and the last
        # node pads it.
        numbers_BN = counting(nodes, last_B.device).where(
            on_path_BN, counting(1, last_B.device, nodes - 1)
        )
        return numbers_BN.topk(self.max_depth + 1, largest=False).values, on_path_BN.sum(-1)


def path_from_root(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root, 0, to a node, both included, by each node's parent."""
    path = [node]
    while path[-1] > 0:
        path.append(parents[path[-1]])
    return path[::-1]


def framed(seen_BNM: Tensor) -> Tensor:
    """Frame the tree attention of nodes [B, N, M] with two columns.

    The first is for all committed tokens, the last for unused cache slots.

    [B, N, M + 2]: the column of a cache slot is found by clamping its offset from the committed
    tokens.
    """
    return F.pad(F.pad(seen_BNM, (1, 0), value=True), (0, 1), value=False)


@dataclass(frozen=True)
class NewNodes:
    """The last N of M uncommitted nodes, for a forward that reads them.

    The other nodes are in the KV cache already.
    """

    tokens_BN: Tensor
    framed_BNX: Tensor
    """Their tree attention, see `framed`: X is M + 2."""
    depths_BM: Tensor
    """Positions of all M nodes, relative to the first one after the committed tokens."""

    @property
    def cached(self) -> int:
        """Uncommitted nodes before them, which are in the cache already."""
        return self.depths_BM.shape[1] - self.tokens_BN.shape[1]

    @classmethod
    def of_tree(cls, tree: DraftTree) -> NewNodes:
        """All nodes of a tree."""
        return cls(tree.tokens_BN, tree.structure.framed_BNX, tree.structure.depths_BN)

    @classmethod
    def of_chain(cls, tokens_BN: Tensor) -> NewNodes:
        """A chain of tokens after the committed ones."""
        batch, nodes = tokens_BN.shape
        framed_1NX, depths_1N = _chain(nodes, tokens_BN.device)
        return cls(tokens_BN, framed_1NX.expand(batch, -1, -1), depths_1N.expand(batch, -1))


@constants
def _chain(nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Framed attention and depths of a chain."""
    return framed(seen_in_chain(nodes, device)), torch.arange(nodes, device=device)[None]


@constants
def _unit_rows(nodes: int, device: torch.device) -> Tensor:
    """The unit vector of each node, and zeros for the parent -1 of the root: float32 [N + 1, N]."""
    return torch.eye(nodes + 1, nodes, dtype=torch.float32, device=device)


@constants
def _static(
    shape: TreeShape, batch: int, device: torch.device
) -> tuple[Tensor, Tensor, TreeStructure]:
    """Parents, sizes and structure of the trees of a static shape."""
    paths = [(), *shape.paths]
    above = [[path[: len(other)] == other for other in paths] for path in paths]
    ancestors_BNN = torch.tensor(above, device=device).expand(batch, -1, -1)
    parents_N, lengths_N = (
        torch.tensor(numbers, device=device)
        for numbers in (shape.parents, [len(path) + 1 for path in paths])
    )
    on_path = [[node for node, on in enumerate(row) if on] for row in above]
    paths_NA = torch.tensor(
        [[*nodes, *[shape.size - 1] * (shape.depth + 1 - len(nodes))] for nodes in on_path],
        device=device,
    )
    known = TreeStructure(
        ancestors_BNN,
        (lengths_N - 1).expand(batch, -1),
        parents_N.clamp(min=0).expand(batch, -1),
        framed(ancestors_BNN),
        paths_NA,
        lengths_N,
    )
    return parents_N.expand(batch, -1), torch.full((batch,), shape.size, device=device), known
