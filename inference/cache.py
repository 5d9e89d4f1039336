"""A preallocated KV cache with a length per row, for trees of tokens.

Row b's committed tokens lie in slots 0 .. lengths_B[b] - 1. A forward writes its new tokens to the slots that follow,
in node order, and every query sees the whole capacity through its mask, so shapes change only when the capacity grows
by a bucket. `keep` then moves the accepted nodes' entries together and the rest is forgotten by being overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from ..heads.layers import STEP, counting, rounded, row_numbers, write_slots

BUCKET = 256
"""Slots by which the capacity grows."""


def free_memory(device: torch.device) -> float:
    """Bytes, those that torch holds without using them too; infinite for a device that does not tell."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + held)
    return float(psutil.virtual_memory().available) if device.type == "cpu" else float("inf")


def check_room(needed: Mapping[str, int], rows: int, tokens: int, device: torch.device) -> None:
    """Refuse what the device cannot hold, before anything is read.

    Args:
        needed: bytes, by what they are for.
        rows: decoded at once.
        tokens: that a row may come to hold.
        device: of all of it.

    Raises:
        ValueError: naming each size in GiB, what is free, and what would make it smaller.
    """
    free, whole = free_memory(device), sum(needed.values())
    if whole > free:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needed.items())
        raise ValueError(
            f"to decode {rows} rows of {tokens} tokens takes {whole / 2**30:.1f} GiB ({parts}), and {device} has "
            f"{free / 2**30:.1f} GiB free; ask for fewer new tokens, or decode fewer rows at once (slots)"
        )


def _scattered(path_BA: Tensor, lengths_B: Tensor) -> bool:
    """Whether the first `lengths_B` nodes of any path are others than those that were written first."""
    new_A = torch.arange(path_BA.shape[1], device=path_BA.device)
    return bool(((path_BA != new_A) & (new_A < lengths_B[:, None])).any())


class TreeCache(Cache):
    """The cache of one `generate` call.

    Each layer has its own tensors [batch, heads, capacity, head size], allocated at the first forward, when the model
    shows its shapes, if they are not known yet.
    """

    def __init__(self, num_layers: int, batch_size: int, device: torch.device, states: Sequence[Tensor] = ()) -> None:
        """An empty cache.

        Args:
            num_layers: of the model.
            batch_size: rows.
            device: of the cache.
            states: what `states` of an earlier cache of the model said.
        """
        super().__init__(layers=[_TreeLayer(self, i) for i in range(num_layers)])
        self.lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.capacity = 0
        self.used = 0
        """Slots, in whole steps, that hold all rows and the next forward's tokens."""
        empty = [state.new_empty(batch_size, state.shape[1], 0, state.shape[3]) for state in states]
        self.keys, self.values = empty[: len(empty) // 2], empty[len(empty) // 2 :]
        self.slots_BN = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        """Where the next forward's entries go."""
        self._slots: dict[torch.device, Tensor] = {}
        """The same on other devices, where layers lie."""
        self.read = 0
        """Tokens of every row that came with the prompts, padding too."""
        self.shown: int | None = None
        """Slots that the next forward is shown; None for the whole capacity."""
        self.start = 0
        """Place of the next forward's first token, for models that know no position ids; others are given them."""
        self.crossed: Cache | None = None
        """Of an encoder-decoder: what its decoder has read of the encoder."""

    def place(self, new_tokens: int, longest: int, guesses: int = 0) -> None:
        """Make room for `new_tokens` a row and direct the next forward's entries there.

        Args:
            new_tokens: tokens of every row in the next forward.
            longest: length of the longest row; the host knows it, so the device need not be asked.
            guesses: tokens of every row that forwards before wrote behind the committed ones, and that stay.
        """
        self.used = rounded(longest + guesses + new_tokens, STEP)
        self._grow(rounded(self.used + 1, BUCKET))  # never all of it: that would be a graph of its own
        new_N = counting(guesses + new_tokens, self.lengths_B.device)[guesses:]
        self.slots_BN, self._slots = self.lengths_B[:, None] + new_N, {}
        self.shown = None

    def keep(self, path_BA: Tensor, lengths_B: Tensor, in_order: bool = False) -> None:
        """Commit the first `lengths_B` nodes of `path_BA`, indices into what the last forward wrote.

        Args:
            path_BA: of each row.
            lengths_B: its nodes that count.
            in_order: whether all paths are known to be the first nodes in their order, which lie where they should.
        """
        # Every other path does, too. A CPU can be asked; another device would be waited for.
        if not in_order and (path_BA.device.type != "cpu" or _scattered(path_BA, lengths_B)):
            self.move(path_BA)
        self.commit(lengths_B)

    def move(self, path_BA: Tensor) -> None:
        """Bring the nodes of `path_BA` together behind the committed tokens; see `keep`."""
        accepted = path_BA.shape[1]
        if accepted > 1:
            source_BA, target_BA = self.lengths_B[:, None] + path_BA, self.slots_BN[:, :accepted]
            for device in {states.device for states in self.keys}:
                _move(
                    [states for states in (*self.keys, *self.values) if states.device == device],
                    source_BA.to(device),
                    target_BA.to(device),
                )

    def commit(self, lengths_B: Tensor) -> None:
        """Commit the first `lengths_B` tokens of the last forward where they lie: a chain needs no moving."""
        self.lengths_B = self.lengths_B + lengths_B

    def rewind(self, lengths_B: Tensor) -> None:
        """Forget what lies behind each row's first `lengths_B` tokens."""
        self.lengths_B = lengths_B

    def select(self, rows_R: Tensor) -> None:
        """Keep these rows only."""
        self.keys = [states[rows_R.to(states.device)] for states in self.keys]
        self.values = [states[rows_R.to(states.device)] for states in self.values]
        self.lengths_B = self.lengths_B[rows_R]

    def replace(self, rows_R: Tensor, other: TreeCache) -> None:
        """Put the rows of another cache in the places of these."""
        self._grow(other.capacity)
        for states, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            states[rows_R.to(states.device), :, : other.capacity] = theirs
        self.lengths_B = self.lengths_B.index_copy(0, rows_R, other.lengths_B)

    def sizes(self) -> list[tuple[Tensor, int]]:
        """All tensors, with the dimensions whose size differs between rounds: rows and slots."""
        return [(states, dimension) for states in (*self.keys, *self.values) for dimension in (0, 2)]

    def states(self) -> list[Tensor]:
        """What keys and values of every layer look like, as tensors without rows and slots."""
        return [states.new_empty(0, states.shape[1], 0, states.shape[3]) for states in (*self.keys, *self.values)]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new entries and return all that is shown; called by the model's attention, layer by layer."""
        if layer == len(self.keys):
            for kept, new in ((self.keys, keys), (self.values, values)):
                kept.append(new.new_zeros(*new.shape[:2], self.capacity, new.shape[3]))
        slots_BN = self.slots_BN
        if keys.device != slots_BN.device:  # of a model that is spread over several
            if keys.device not in self._slots:
                self._slots[keys.device] = slots_BN.to(keys.device)
            slots_BN = self._slots[keys.device]
        write_slots(self.keys[layer], slots_BN, keys)
        write_slots(self.values[layer], slots_BN, values)
        return self.keys[layer][:, :, : self.shown], self.values[layer][:, :, : self.shown]

    def _grow(self, capacity: int) -> None:
        grown = capacity - self.capacity
        if grown <= 0:
            return
        self.capacity = capacity
        for kept in (self.keys, self.values):
            for layer, states in enumerate(kept):  # one at a time: both sizes of all would be twice the memory
                kept[layer] = F.pad(states, (0, 0, 0, grown))


def _move(kept: Sequence[Tensor], source_BA: Tensor, target_BA: Tensor) -> None:
    """Copy entries of all layers from one slot to another, in place."""
    rows_B1, source_A, target_A = row_numbers(source_BA), source_BA[0], target_BA[0]
    for states in kept:
        if len(source_BA) == 1:  # takes half the time
            states.index_copy_(2, target_A, states.index_select(2, source_A))
        else:
            slots_BSHE = states.transpose(1, 2)
            slots_BSHE[rows_B1, target_BA] = slots_BSHE[rows_B1, source_BA]


class _TreeLayer(CacheLayerMixin):
    """What transformers sees of one layer; everything is kept by the `TreeCache`."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self.cache = cache
        self.index = index

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.cache.write(self.index, key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a TreeCache allocates all layers at once")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.capacity, 0

    def get_seq_length(self) -> int:
        return self.cache.start

    def get_max_length(self) -> int:
        return -1
