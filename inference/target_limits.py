"""Targets that cannot verify every tree in one forward, and what a round does there instead.

Some targets verify chains alone; some compute a text differently beyond a length (`Segments`); and drafts whose keys or
values are not finite spoil the other nodes of their tree.

Letters in tensor names: B batch, T time, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .drafters.base import NoDraft
from .engines.base import TargetOutput
from .kv_cache import TreeCache
from .target import Target
from .tree import DraftTree
from .tuning.tree_spec import TreeShape


def verifiable(target: Target, tree: DraftTree, lengths: list[int]) -> DraftTree:
    """The part of a tree that one forward of the target can verify, for rows of these lengths, their roots included."""
    if target.engine.chains_only:
        tree = chain_of(target, tree, lengths[0])
    return within_segment(target, tree, lengths)


def chain_of(target: Target, tree: DraftTree, length: int) -> DraftTree:
    """The longest path of a tree of one row, the first of several, for a target that checks chains alone.

    It ends at the target's last position, beyond which a table of positions has no entry. Sampled drafts may only be
    cut to the root: a part of them would have another distribution.
    """
    room = target.max_positions - length
    if tree.in_order and tree.max_depth <= room:
        return tree
    parents = tree.parents_BN[0, : int(tree.sizes_B[0])].tolist()  # sync: these engines wait for their tokens anyway
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    node = depths.index(max(depths))
    path = [node]
    while path[0] > 0:
        path.insert(0, parents[path[0]])
    if path == list(range(tree.tokens_BN.shape[1])) and len(path) - 1 <= room:
        return tree
    if tree.draft_probs_BNV is not None:
        if len(path) < len(parents):
            raise ValueError(
                f"{target.name!r} checks chains alone, not drafts that are {tree.kind}; choose chain:LENGTH"
            )
        path = path[:1]
    path = path[: room + 1]
    if len(path) == 1:
        return NoDraft(tree.fallback).propose(tree.tokens_BN[:, 0])
    return DraftTree.of_shape(TreeShape.chain(len(path) - 1), tree.tokens_BN[:, path])


def within_segment(target: Target, tree: DraftTree, lengths: list[int]) -> DraftTree:
    """A tree for rows of these lengths, their roots included; the root alone where it would leave their `Segments`.

    That depends on the lengths alone, not on what was drafted, so sampled drafts may be dropped.
    """
    segments = target.segments
    if segments is None or tree.max_depth == 0:
        return tree
    reach = tree.max_depth if segments.by_last else tree.tokens_BN.shape[1] - 1
    inside = segments.of(min(lengths) - 1) == segments.of(max(lengths) - 1 + reach)
    if inside and not at_border(target, lengths):
        return tree
    return NoDraft("segment_border").propose(tree.tokens_BN[:, 0])


def at_border(target: Target, lengths: list[int]) -> bool:
    """Whether the target reads the whole text of its one row again, whose root is the first token of a segment."""
    return target.rereads_at_border and target.segments is not None and target.segments.first == lengths[0] - 1


def reread(target: Target, text_T: Tensor, cache: TreeCache, layers: tuple[int, ...]) -> TargetOutput:
    """Read all of a row's text again and return the output at its root, its newest token, which stays uncommitted."""
    committed_B = cache.lengths_B
    cache.lengths_B = torch.zeros_like(committed_B)
    cache.prefilled = 0
    last = len(text_T) - 1
    output = target.read_chunk(text_T[None].to(target.device), len(text_T), cache, layers, [last])
    cache.lengths_B = committed_B
    cache.slots_BN = committed_B[:, None]
    return TargetOutput(output.logits_BNV, output.features_BNF[:, -1:])


def forward_without_spoiled(
    target: Target, shortest: int, tree: DraftTree, longest: int, cache: TreeCache, layers: tuple[int, ...]
) -> TargetOutput:
    """`Target.forward_tree` for sampled drafts of which some spoil the others: these get NaN, the others their logits.

    A forward over each node's path alone tells which they are; in the tree the root's token stands in their places.
    The shortest row has `shortest` committed tokens.
    """
    assert tree.shape is not None  # of sampled trees
    spoiled = []
    for node in range(tree.shape.size):
        path = [node]
        while path[0] > 0:
            path.insert(0, tree.shape.parents[path[0]])
        cache.erase_uncommitted(shortest)
        output = target.forward_chain(tree.tokens_BN[:, path], longest, cache, ())
        spoiled.append(output.logits_BNV[:, -1].isnan().all(-1))
    spoiled_BN = torch.stack(spoiled, dim=1)
    tokens_BN = torch.where(spoiled_BN, tree.tokens_BN[:, :1], tree.tokens_BN)
    cache.erase_uncommitted(shortest)
    output = target.forward_tree(replace(tree, tokens_BN=tokens_BN), longest, cache, layers)
    return replace(output, logits_BNV=output.logits_BNV.masked_fill(spoiled_BN[..., None], torch.nan))
