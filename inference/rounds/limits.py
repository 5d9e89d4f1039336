"""Limits of what one forward of a target can verify, and how a proposed tree is cut to them.

    memory    after it ran out: as many nodes as still fit, at last none
    chains    some targets verify a chain of tokens and no tree that branches
    borders   some compute a text differently beyond a length (`Segments`): no draft may cross that

Drafts whose keys or values are not finite spoil the other nodes of their tree:
`forward_without_spoiled`.

Letters in tensor names: B batch, T time, N nodes, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..cache.kv_cache import TreeCache
from ..drafters.base import NoDraft
from ..engines.base import TargetOutput
from ..engines.target import Target
from ..trees.tree import DraftTree, path_from_root
from ..trees.tree_spec import TreeKind, TreeShape
from .observers import DecodingCall

Cut = tuple[DraftTree, Sequence[int] | None]
"""The tree that is verified, and `Round.nodes`: its nodes' numbers in the proposed tree, None for
all of them."""


class Limits:
    """The limits of a generation's target."""

    def __init__(self, target: Target, most_nodes: int) -> None:
        """Begin with room for `most_nodes` of each row, the largest tree of the drafter."""
        self.target = target
        self.most_nodes = most_nodes
        self.ran_out = False
        """Whether memory has run out."""

    @property
    def gave_up(self) -> bool:
        """Whether memory ran out until no draft was left."""
        return self.ran_out and self.most_nodes < 2

    def shrink(self, proposed: DraftTree | None, kind: TreeKind) -> None:
        """Verify half as many nodes from now on, since memory ran out.

        It ran out with the tree `proposed`, or (None) while a tree of `kind` was drafted.

        A part of a sampled tree would have another distribution: it shrinks to the root at once.
        """
        self.ran_out = True
        before = self.most_nodes
        if proposed is not None:
            before = min(before, proposed.tokens_BN.shape[1])
            kind = proposed.kind  # in greedy decoding all trees are of top-k drafts
        self.most_nodes = max(before // 2, 1) if kind == "top_k" else 1
        warnings.warn(
            f"memory ran out with trees of {before} nodes; this generation goes on with"
            f" {self.most_nodes}",
            stacklevel=5,
        )

    def cut(self, proposed: DraftTree, lengths: list[int]) -> Cut:
        """The part of a tree to verify, for rows of these lengths, their roots included."""
        verified, nodes = first_nodes(proposed, self.most_nodes)
        if self.target.engine.chains_only:
            verified, path = chain_of(self.target, verified, lengths[0])
            # The path counts nodes of the shortened tree, which has the proposed tree's numbers.
            if path is not None:
                nodes = path
        # The root alone never crosses a border: node 0 of the proposed tree.
        if self._crosses_border(verified, lengths):
            return NoDraft("segment_border").propose(proposed.tokens_BN[:, 0]), (0,)
        return verified, nodes

    def _crosses_border(self, tree: DraftTree, lengths: list[int]) -> bool:
        """Whether drafts would leave their `Segments`.

        That depends on the lengths alone, not on what was drafted, so sampled drafts may be
        dropped.
        """
        segments = self.target.segments
        if segments is None or tree.max_depth == 0:
            return False
        # The last position of the forward, counted from the root at `length - 1`. A target that
        # takes positions reaches as far as the tree is deep; one that counts entries of its cache
        # reaches as far as the tree has nodes.
        reach = tree.max_depth if segments.by_last else tree.tokens_BN.shape[1] - 1
        inside = segments.of(min(lengths) - 1) == segments.of(max(lengths) - 1 + reach)
        return not inside or at_border(self.target, lengths)


def first_nodes(tree: DraftTree, most: int) -> Cut:
    """The first nodes of a top-k tree, which are a tree, as parents precede their children."""
    if tree.tokens_BN.shape[1] <= most:
        return tree, None
    assert tree.draft_probs_BNV is None
    first = DraftTree(
        tree.tokens_BN[:, :most].contiguous(),
        tree.parents_BN[:, :most].contiguous(),
        tree.sizes_B.clamp(max=most),
        max_depth=min(tree.max_depth, most - 1),
        padding=tree.padding,
        in_order=tree.in_order,
    )
    return first, range(most)


def chain_of(target: Target, tree: DraftTree, length: int) -> Cut:
    """Return the first longest path of a one-row tree, for a target that verifies chains only.

    It ends at the target's last position, beyond which a table of positions has no entry. Sampled
    drafts may only be cut to the root: a part of them would have another distribution.
    """
    room = target.max_positions - length
    if tree.in_order and tree.max_depth <= room:
        return tree, None
    # 1. The deepest node, the first of several. Parents [-1, 0, 0, 2, 3] have depths [0, 1, 1, 2,
    #    3]: the path to node 4 is [0, 2, 3, 4].
    # sync: these engines wait for their tokens anyway
    parents = tree.parents_BN[0, : int(tree.sizes_B[0])].tolist()
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    path = path_from_root(parents, depths.index(max(depths)))
    # 2. The tree is a chain already, and there is room for it.
    if path == list(range(tree.tokens_BN.shape[1])) and len(path) - 1 <= room:
        return tree, None
    if tree.draft_probs_BNV is not None:
        if len(path) < len(parents):
            raise ValueError(
                f"{target.name!r} checks chains alone, not drafts that are {tree.kind}; choose"
                " chain:LENGTH"
            )
        path = path[:1]
    # 3. The root and at most `room` drafts.
    path = path[: room + 1]
    if len(path) == 1:
        return NoDraft(tree.fallback).propose(tree.tokens_BN[:, 0]), path
    return DraftTree.of_shape(TreeShape.chain(len(path) - 1), tree.tokens_BN[:, path]), path


def at_border(target: Target, lengths: list[int]) -> bool:
    """Whether the target must reread its one row's text.

    It must if the row's root is the first token of a segment.
    """
    return (
        target.rereads_at_border
        and target.segments is not None
        and target.segments.first == lengths[0] - 1
    )


def reread(call: DecodingCall, cache: TreeCache) -> TargetOutput:
    """Read the only row's whole text again and return the output at its root.

    The root, the newest token, stays uncommitted.
    """
    target = call.target
    text_T = call.sequences.text(call.sequences.active[0])
    # An empty cache is filled again from position 0 on.
    committed_B = cache.lengths_B
    cache.lengths_B = torch.zeros_like(committed_B)
    cache.prefilled = 0
    last = len(text_T) - 1
    output = target.engine.read_chunk(
        text_T[None].to(target.device), len(text_T), cache, call.layers, [last]
    )
    # As after a round with the root alone: its entry is in the slot after the committed ones.
    cache.lengths_B = committed_B
    cache.slots_BN = committed_B[:, None]
    return TargetOutput(output.logits_BNV, output.features_BNF[:, -1:])


def forward_without_spoiled(call: DecodingCall, tree: DraftTree, cache: TreeCache) -> TargetOutput:
    """Run `Engine.forward_tree` on sampled drafts; those that would spoil others get NaN logits.

    A forward over each node's path alone tells which they are; in the tree the root's token stands
    in their places.
    """
    assert tree.shape is not None  # of sampled trees
    engine = call.target.engine
    lengths = call.sequences.lengths
    shortest = min(lengths) - 1  # committed tokens: all but the root
    longest = max(lengths) - 1
    # 1. A node is spoiled if a forward over the path to it gives NaN.
    spoiled = []
    for node in range(tree.shape.size):
        path = path_from_root(tree.shape.parents, node)
        # NaN that the last forward left would spoil this one, too.
        cache.erase_uncommitted(shortest)
        output = engine.forward_chain(tree.tokens_BN[:, path], longest, cache, ())
        spoiled.append(output.logits_BNV[:, -1].isnan().all(-1))
    spoiled_BN = torch.stack(spoiled, dim=1)
    # 2. The root's token is known to be valid. The rule sees the drafted tokens, with NaN after
    #    them, and cuts the path there.
    tokens_BN = torch.where(spoiled_BN, tree.tokens_BN[:, :1], tree.tokens_BN)
    cache.erase_uncommitted(shortest)
    replaced = replace(tree, tokens_BN=tokens_BN)
    output = engine.forward_tree(replaced, longest, cache, call.layers)
    return replace(
        output, logits_BNV=output.logits_BNV.masked_fill(spoiled_BN[..., None], torch.nan)
    )
