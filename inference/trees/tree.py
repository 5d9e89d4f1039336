"""Draft trees: the tokens drafted in one round, with ancestors, depths and paths.

The structure follows from the parents of the nodes. A tree of five nodes:

    node       0     1     2     3     4             0 "the"
    token     the   cat   dog   sat   ran            +-- 1 "cat"
    parent     -1     0     0     1     2            |   +-- 3 "sat"
    depth       0     1     1     2     2            +-- 2 "dog"
                                                         +-- 4 "ran"

    ancestors of node 3    [True, True, False, True, False]      itself included
    path to node 3         [0, 1, 3]

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
            False,  # no padding: all rows have this shape
            in_order=shape.is_chain,
        )

    def to(self, device: torch.device) -> DraftTree:
        """A copy on another device, uploaded in one transfer; in two with draft probabilities."""
        if self.tokens_BN.device == device:
            return self
        # Tokens, parents and sizes side by side, [B, 2 N + 1]: one transfer in place of three.
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
        """Ancestors, depths and what else follows from the parents.

        Let P[n, m] be 1 where m is the parent of n. Entry [n, m] of (I + P)^k counts the ways from
        n up to m in k moves, each of one step or none. Repeated squaring reaches the root from
        depth d in about log2(d) products.
        """
        batch, nodes = self.tokens_BN.shape
        device = self.tokens_BN.device
        if self.shape is not None:
            return _static(self.shape, batch, device)[2]
        # 1. I + P. Index -1, the root's parent, takes the last row of the table: zeros. Parents
        # [-1, 0, 1] give [[1, 0, 0], [1, 1, 0], [0, 1, 1]].
        unit_MN = _unit_rows(nodes, device)
        reach_BNN = unit_MN[self.parents_BN] + unit_MN[:nodes]
        # 2. Square it. For depth 5, bit_length 3: the powers 2, 4 and 8, which is enough.
        for _ in range(self.max_depth.bit_length()):
            reach_BNN = reach_BNN @ reach_BNN
            if self.max_depth > FLOAT_DEPTH:  # counts would overflow; only zero or not matters
                reach_BNN = reach_BNN.clamp(max=1)
        # 3. Whatever can be reached is an ancestor. A node at depth d has d + 1, itself included.
        ancestors_BNN = reach_BNN > 0
        framed_BNX = framed(ancestors_BNN)
        return TreeStructure(
            ancestors_BNN, ancestors_BNN.sum(-1) - 1, self.parents_BN.clamp(min=0), framed_BNX
        )

    def path_to(self, last_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's path from the root to a node, [B, max_depth + 1], and its length.

        Shorter paths are padded.
        """
        structure = self.structure
        if structure.paths_NA is not None and structure.lengths_N is not None:
            return structure.paths_NA[last_B], structure.lengths_N[last_B]
        nodes = self.tokens_BN.shape[1]
        # Row b takes the ancestors of its own node.
        on_path_BN = structure.ancestors_BNN[counting(len(last_B), last_B.device), last_B]
        # Parents stand before their children, so in ascending order the nodes form the path. Nodes
        # off the path become the last node, N - 1, which pads the end. For the path to node 3 of
        # the module's tree: numbers [0, 1, 4, 3, 4], of which the 3 smallest are [0, 1, 3].
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
    """Frame the tree attention of nodes [B, N, M] with two columns: [B, N, M + 2].

    The first column is for all committed tokens, which every node sees; the last for unused cache
    slots, which none does. A cache slot's column is its offset from the committed tokens, plus one,
    clamped. After 5 committed tokens, with M = 3:

        slot      0 1 2 3 4   5 6 7   8 9 ...
        column    0 0 0 0 0   1 2 3   4 4 ...
    """
    return F.pad(F.pad(seen_BNM, (1, 0), value=True), (0, 1), value=False)


@dataclass(frozen=True)
class NewNodes:
    """The last N of M uncommitted nodes, for a forward that reads them.

    The other nodes are in the KV cache already.
    """

    tokens_BN: Tensor
    framed_BNX: Tensor
    """Their tree attention, see `framed`; X is M + 2."""
    depths_BM: Tensor
    """Positions of all M nodes, relative to the first one after the committed tokens."""

    @property
    def cached(self) -> int:
        """Number of uncommitted nodes before the new ones, which are in the cache already."""
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
    paths = [(), *shape.paths]  # of ranks; the root's is empty
    is_ancestor: list[list[bool]] = []
    padded_paths: list[list[int]] = []
    for path in paths:
        # Ancestors are prefixes: (0,) is one of (0, 2), which is the third child of node (0,).
        ancestors = [path[: len(other)] == other for other in paths]
        is_ancestor.append(ancestors)
        # Nodes are sorted by depth, so the ancestors in order are the path. The last node pads it.
        nodes = [node for node, on_path in enumerate(ancestors) if on_path]
        padding = [shape.size - 1] * (shape.depth + 1 - len(nodes))
        padded_paths.append([*nodes, *padding])
    ancestors_BNN = torch.tensor(is_ancestor, device=device).expand(batch, -1, -1)
    paths_NA = torch.tensor(padded_paths, device=device)
    parents_N = torch.tensor(shape.parents, device=device)
    lengths_N = torch.tensor([len(path) + 1 for path in paths], device=device)  # the root counted
    structure = TreeStructure(
        ancestors_BNN,
        (lengths_N - 1).expand(batch, -1),  # depths
        parents_N.clamp(min=0).expand(batch, -1),
        framed(ancestors_BNN),
        paths_NA,
        lengths_N,
    )
    sizes_B = torch.full((batch,), shape.size, device=device)
    return parents_N.expand(batch, -1), sizes_B, structure
