"""KV cache of a draft head, and the state of a head whose layers read their own outputs: EAGLE's, a truncated model's.

`observe` runs the layers on the committed tokens and keeps the last output, from which the root's children are drafted.
Each `expand` below the root runs them on a frontier, whose nodes attend to the committed tokens and to their own path.

Letters in tensor names: B batch, T new tokens, A accepted tokens, W width of the tree's frontier, N nodes, D hidden
size, H query heads, G key-value heads, S slots, E head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base import BatchCache, DraftHead, DraftState, TargetModules

STEP = 64
"""Slots by which the attended part of a cache grows, so that shapes do not change in every round."""
FEW = 256
"""Queries of a group that are packed side by side at most: their mask is repeated for every head of the group."""


def counting(size: int, device: torch.device, first: int = 0, column: bool = False) -> Tensor:
    """Cached `torch.arange(first, first + size)`, as a row [size] or a column [size, 1].

    Launching a kernel for so little takes an accelerator longer than the work itself.
    """
    if torch.compiler.is_compiling():  # a graph holds it by itself
        numbers = torch.arange(first, first + size, device=device)
        return numbers[:, None] if column else numbers
    return _counting(size, device, first, torch.is_inference_mode_enabled())[column]


@lru_cache(maxsize=256)
def _counting(size: int, device: torch.device, first: int, inference: bool) -> tuple[Tensor, Tensor]:
    """Apart for inference mode and outside: a tensor made in one is not fit for everything in the other."""
    numbers = torch.arange(first, first + size, device=device)
    return numbers, numbers[:, None]


def masked_attention(
    query_BHNE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, mask_BXNS: Tensor, scale: float | None = None
) -> Tensor:
    """Grouped-query attention of few queries over a long cache, [B, H, N, E].

    The query heads of a group are packed side by side, so that its keys and values are read in place instead of being
    copied once a head.

    Args:
        query_BHNE: queries.
        key_BGSE: keys.
        value_BGSE: values.
        mask_BXNS: additive, or True where a query attends; a mask with a row for every head of a group and query,
            as packed, is taken as it is.
        scale: of the scores; None for 1 / sqrt(E).
    """
    heads, queries = query_BHNE.shape[1] // key_BGSE.shape[1], query_BHNE.shape[2]
    blocks: Iterable[tuple[Tensor, Tensor]] = [(query_BHNE, mask_BXNS)]
    if mask_BXNS.shape[2] != heads * queries:
        size = max(1, FEW // heads)
        # It may have been repeated for groups of another size.
        masks = mask_BXNS[:, :, :queries].split(size, 2)
        masks = [mask.repeat(1, 1, heads, 1) if heads * mask.shape[2] <= FEW else mask for mask in masks]
        blocks = zip(query_BHNE.split(size, 2), masks, strict=True)
    found = []
    for query, mask in blocks:
        packed = query.unflatten(1, (-1, heads)).flatten(2, 3)
        out = F.scaled_dot_product_attention(packed, key_BGSE, value_BGSE, attn_mask=mask, scale=scale)
        found.append(out.unflatten(2, (heads, -1)).flatten(1, 2))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


@dataclass
class DraftCache:
    """Preallocated keys and values of a head, for one `generate` call.

    The first `nodes` slots hold the nodes of the round's tree in order of expansion, the others each row's committed
    tokens. The next round's entries overwrite drafts, which need not be erased.
    """

    nodes: int
    keys: list[Tensor]
    """[B, G, S, E] of each layer."""
    values: list[Tensor]
    attended: int | None = None
    """Slots that forwards attend to, from the first on; None for all. The drafter sets it: the host knows lengths."""

    @classmethod
    def empty(cls, head: DraftHead, batch_size: int, nodes: int, capacity: int) -> DraftCache:
        """Room for `nodes` drafts and `capacity` committed tokens in each row, in the head's dtype."""
        size = (batch_size, head.shape.num_key_value_heads, nodes + capacity, head.shape.head_dim)
        like = next(head.parameters())
        keys, values = ([like.new_zeros(size) for _ in range(head.cached_layers)] for _ in range(2))
        return cls(nodes, keys, values)

    def select(self, rows_R: Tensor) -> DraftCache:
        keys, values = ([states[rows_R] for states in both] for both in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def replace(self, rows_R: Tensor, other: BatchCache) -> None:
        assert isinstance(other, DraftCache)
        for states, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            states[rows_R] = theirs

    def resized(self, capacity: int) -> DraftCache:
        more = self.nodes + capacity - self.keys[0].shape[2]
        if more <= 0:
            return self
        keys, values = ([F.pad(states, (0, 0, 0, more)) for states in both] for both in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def sizes(self) -> list[tuple[Tensor, int]]:
        return [(states, dimension) for states in (*self.keys, *self.values) for dimension in (0, 2)]

    def commit(self, lengths_B: Tensor, new_tokens: int) -> tuple[Tensor, KVEntries]:
        """Positions [B, A] of new tokens behind each row's `lengths_B` committed ones, and their causal KV view."""
        device, slots = lengths_B.device, self.keys[0].shape[2]
        positions_BA = lengths_B[:, None] + counting(new_tokens, device)
        # Padding behind the end of a short prompt is overwritten later; it only must not lie outside.
        slots_BA = (self.nodes + positions_BA).clamp(max=slots - 1)
        slot_S = counting(slots if self.attended is None else min(slots, self.attended), device)
        mask_BAS = (slot_S >= self.nodes) & (slot_S <= slots_BA[..., None])
        return positions_BA, KVEntries(self, mask_BAS, slots_BA)


@dataclass(frozen=True)
class KVEntries:
    """KV view of one forward: the slots of its new entries, and those that they attend to."""

    cache: DraftCache
    mask_BTS: Tensor
    """True where a new token attends."""
    slots_BT: Tensor | None
    """Where the entries go; None for consecutive slots from `first` in every row."""
    first: int = 0
    drafts_N: Tensor | None = None

    def attend(self, layer: int, query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for states, new in ((keys, key_BGTE), (values, value_BGTE)):
            if self.slots_BT is None:
                states[:, :, self.first : self.first + new.shape[2]] = new
            else:  # not by `scatter_`, which would copy the whole cache on a CPU
                rows_B1 = counting(len(new), new.device, column=True)
                states.transpose(1, 2)[rows_B1, self.slots_BT] = new.transpose(1, 2)
        attended = self.mask_BTS.shape[-1]
        return masked_attention(query_BHTE, keys[:, :, :attended], values[:, :, :attended], self.mask_BTS[:, None])


@dataclass(frozen=True)
class DraftTreeState(DraftState):
    """The KV cache, and the outputs from which the next depth is drafted."""

    cache: DraftCache = field(kw_only=True)
    lengths_B: Tensor
    """Committed tokens of each row."""
    hidden_BWD: Tensor
    """Outputs of the frontier; at the root the last committed one."""
    paths_BWN: Tensor
    """True at the cached nodes on the path to each frontier node."""
    nodes: int = 0
    """Nodes in the cache since the last `observe`."""

    def committed(self, out_BAD: Tensor, lengths_B: Tensor) -> DraftTreeState:
        """The state at the root after the layers ran on new tokens, of which row b commits the first `lengths_B[b]`."""
        last_B11 = (lengths_B - 1).clamp(min=0)[:, None, None]
        return replace(
            self,
            depth=0,
            nodes=0,
            lengths_B=self.lengths_B + lengths_B,
            hidden_BWD=out_BAD.gather(1, last_B11.expand(-1, 1, out_BAD.shape[-1])),
            paths_BWN=torch.zeros_like(self.paths_BWN[:, :1]),
        )

    def below(self, parents_BW: Tensor) -> tuple[Tensor, KVEntries, DraftTreeState]:
        """A frontier below this one: its positions [B, W], its KV view, and the state that still lacks its outputs."""
        device, width, cache = parents_BW.device, parents_BW.shape[1], self.cache
        own_WN = counting(cache.nodes, device) == counting(width, device, self.nodes, column=True)
        paths_BWN = self.paths_BWN.gather(1, parents_BW[:, :, None].expand(-1, -1, cache.nodes)) | own_WN
        slots = cache.keys[0].shape[2]
        attended = slots if cache.attended is None else min(slots, cache.attended)
        text_BS = counting(attended - cache.nodes, device) < self.lengths_B[:, None]
        mask_BWS = torch.cat([paths_BWN, text_BS[:, None].expand(-1, width, -1)], dim=-1)
        positions_BW = (self.lengths_B[:, None] + self.depth - 1).expand_as(parents_BW)
        state = replace(self, nodes=self.nodes + width, paths_BWN=paths_BWN)
        return positions_BW, KVEntries(cache, mask_BWS, None, self.nodes), state


def begin_tree(
    head: DraftHead, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
) -> DraftTreeState:
    """`DraftHead.begin` of a head with a `DraftTreeState`."""
    like = next(head.parameters())
    return DraftTreeState(
        modules,
        depth=0,
        max_depth=max_depth,
        cache=DraftCache.empty(head, batch_size, nodes, capacity),
        lengths_B=torch.zeros(batch_size, dtype=torch.int64, device=like.device),
        hidden_BWD=like.new_zeros(batch_size, 1, head.shape.hidden_size),
        paths_BWN=torch.zeros(batch_size, 1, nodes, dtype=torch.bool, device=like.device),
    )
