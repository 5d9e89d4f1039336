"""KV cache of a draft head, and attention of a few new tokens over it.

Letters in tensor names: B batch, T new tokens, A accepted tokens, N queries, H query heads, G
key-value heads, S slots, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .constants import counting
from .masked_attention import masked_attention
from .tree_attention import attend_to_slots
from .tree_slots import TreeSlots, seen_in_chain

STEP = 64
"""Slots by which the attended part of a cache grows, so that shapes do not change in every
round."""
MOST_NEW_TOKENS = 512
"""Tokens that one `commit` adds to a row at most."""


@dataclass
class DraftCache:
    """Preallocated keys and values of a head, for one `generate` call.

    The first `nodes` slots hold the nodes of the round's tree in order of expansion, the others
    each row's committed tokens. The next round's entries overwrite drafts, which need not be
    erased.

    With a window, the token at position p lies in slot `nodes + p mod R` of a ring of R slots, so
    that size and time do not grow with the text. New tokens, padding included, must overwrite
    nothing that the first of them sees: R = window + MOST_NEW_TOKENS - 1.
    """

    nodes: int
    keys: list[Tensor]
    """[B, G, S, E] of each layer."""
    values: list[Tensor]
    attended: int | None = None
    """Slots that forwards attend to, from the first on; None for all. The drafter sets it: the host
    knows lengths."""
    window: int | None = None
    """Newest positions that a token sees, its own included; None for all."""
    by_slots: bool = False
    """Whether attention reads the slots in use by their lengths on the device, with no mask; the
    drafter sets it."""

    @staticmethod
    def slots_for(capacity: int, window: int | None) -> int:
        """Slots for a row of `capacity` committed tokens."""
        return capacity if window is None else window + MOST_NEW_TOKENS - 1

    @property
    def slots(self) -> int:
        """Slots of each row."""
        return self.keys[0].shape[2]

    @property
    def attended_slots(self) -> int:
        """Slots that a forward attends to."""
        return self.slots if self.attended is None else min(self.slots, self.attended)

    def window_mask(self, ends_B: Tensor, positions_BT: Tensor, first_B: Tensor | None) -> Tensor:
        """Which slots of the ring queries at these positions see, [B, T, attended - nodes].

        Each row has stored the tokens before `ends_B`, padding of its last commit included. Of a
        row whose end was cropped, the ring holds tokens from position `first_B` on.
        """
        assert self.window is not None
        slot_S = counting(self.attended_slots - self.nodes, positions_BT.device)
        newest_B1 = ends_B[:, None] - 1
        # The newest position of each row that lies in a slot; negative if there is none. In a ring
        # of 4 with 6 tokens, slots 0 to 3 hold positions [4, 5, 2, 3]; with 2, [0, 1, -2, -1].
        held_BS = newest_B1 - (newest_B1 - slot_S) % (self.slots - self.nodes)
        # An empty slot, or one from before a crop, gets a position before every window.
        first_B1 = 0 if first_B is None else first_B[:, None]
        held_B1S = torch.where(held_BS >= first_B1, held_BS, -1 - self.window)[:, None]
        # A query at position p sees positions p - window + 1 to p.
        position_BT1 = positions_BT[..., None]
        return (held_B1S <= position_BT1) & (held_B1S > position_BT1 - self.window)

    def select(self, rows_R: Tensor) -> DraftCache:
        """A cache of some rows, which replaces this one; in its memory if it has room for them."""
        rows = len(rows_R)
        if not self.keys or rows > len(self.keys[0]):
            keys = [states[rows_R] for states in self.keys]
            values = [states[rows_R] for states in self.values]
            return replace(self, keys=keys, values=values)
        # `states[rows_R]` is a copy, so overlapping rows are safe. One layer at a time, for memory.
        for states in (*self.keys, *self.values):
            states[:rows] = states[rows_R]
        keys = [states[:rows] for states in self.keys]
        values = [states[:rows] for states in self.values]
        return replace(self, keys=keys, values=values)

    def replace(self, rows_R: Tensor, other: DraftCache) -> None:
        """Overwrite rows by those of a cache of the same capacity."""
        ours = (*self.keys, *self.values)
        theirs = (*other.keys, *other.values)
        for states, new_states in zip(ours, theirs, strict=True):
            states[rows_R] = new_states

    def resized(self, capacity: int) -> DraftCache:
        """This cache, or a copy with room for `capacity` committed tokens in each row."""
        more = self.nodes + self.slots_for(capacity, self.window) - self.slots
        if more <= 0:
            return self
        # Empty slots at the end of S, the last dimension but one.
        keys = [F.pad(states, (0, 0, 0, more)) for states in self.keys]
        values = [F.pad(states, (0, 0, 0, more)) for states in self.values]
        return replace(self, keys=keys, values=values)

    def commit(
        self, lengths_B: Tensor, new_tokens: int, first_B: Tensor | None = None
    ) -> tuple[Tensor, KVEntries]:
        """Return the positions [B, A] of new tokens and their causal KV view.

        The tokens follow the `lengths_B` committed tokens of each row.
        """
        assert self.window is None or new_tokens <= MOST_NEW_TOKENS, new_tokens
        device = lengths_B.device
        # Rows of 5 and 2 committed tokens with 3 new ones: positions [[5, 6, 7], [2, 3, 4]].
        positions_BA = lengths_B[:, None] + counting(new_tokens, device)

        # A ring: no node is seen, so the mask begins with False for their slots.
        if self.window is not None:
            slots_BA = self.nodes + positions_BA % (self.slots - self.nodes)
            seen_BAS = self.window_mask(lengths_B + new_tokens, positions_BA, first_B)
            return positions_BA, KVEntries(self, F.pad(seen_BAS, (self.nodes, 0)), slots_BA)

        # Padding after the end of a short prompt is overwritten later; it only must not lie
        # outside.
        slots_BA = (self.nodes + positions_BA).clamp(max=self.slots - 1)

        # By slots: the new tokens are a chain of nodes that follows the committed ones.
        if self.by_slots:
            ancestors_BAA = seen_in_chain(new_tokens, device).expand(len(lengths_B), -1, -1)
            sees = TreeSlots(ancestors_BAA, lengths_B, text_slot=self.nodes)
            return positions_BA, KVEntries(self, None, slots_BA, sees=sees)

        # By a mask: every slot of the text, up to the token's own.
        slot_S = counting(self.attended_slots, device)
        mask_BAS = (slot_S >= self.nodes) & (slot_S <= slots_BA[..., None])
        return positions_BA, KVEntries(self, mask_BAS, slots_BA)


@dataclass
class KVEntries:
    """KV view of one forward: the slots of its new entries, and those that they attend to."""

    cache: DraftCache
    mask_BTS: Tensor | None
    """True where a new token attends; None where `sees` says it."""
    slots_BT: Tensor | None
    """Where the entries go; None for consecutive slots from `first` in every row."""
    first: int = 0
    drafts_N: Tensor | None = None
    sees: TreeSlots | None = None

    def store(self, layer: int, key_BGTE: Tensor, value_BGTE: Tensor) -> tuple[Tensor, Tensor]:
        """Put new entries into the cache; return all keys and values of the layer.

        NaN and inf are stored as 0: attention multiplies by 0 what a token does not see, and 0 x
        NaN is NaN, so one draft would spoil all others and, left in the cache, those of later
        rounds.
        """
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for states, new in ((keys, key_BGTE), (values, value_BGTE)):
            new = new.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            if self.slots_BT is None:
                states[:, :, self.first : self.first + new.shape[2]] = new
            else:  # not by `scatter_`, which would copy the whole cache on a CPU
                rows_B1 = counting(len(new), new.device, column=True)
                # [B, S, G, E] at [rows, slots] is [B, T, G, E]
                states.transpose(1, 2)[rows_B1, self.slots_BT] = new.transpose(1, 2)
        return keys, values

    def attend(
        self, layer: int, query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor
    ) -> Tensor:
        keys, values = self.store(layer, key_BGTE, value_BGTE)
        if self.sees is not None:
            return attend_to_slots(query_BHTE, keys, values, self.sees).transpose(1, 2)
        assert self.mask_BTS is not None
        # Slots after the mask's end hold nothing that counts: do not read them.
        attended = self.mask_BTS.shape[-1]
        return masked_attention(
            query_BHTE, keys[:, :, :attended], values[:, :, :attended], self.mask_BTS[:, None]
        )
