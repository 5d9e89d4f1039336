"""A preallocated KV cache with a length per row, for trees of tokens.

Row b's committed tokens lie in slots 0 .. lengths_B[b] - 1. A forward writes its new tokens to the
slots that follow, in node order. The capacity, which masks cover, grows in steps, so that shapes
rarely change. `accept` then moves the accepted nodes' entries together; the rest is overwritten
later. For example, row b has 5 tokens, and of a tree of 4 nodes the path [0, 1, 3] is accepted:

    lengths_B[b] = 5    slots_BN[b] = [5, 6, 7, 8]          `reserve`, before the forward
    slot   5  6  7  8                                       the forward writes nodes 0 to 3
    node   0  1  2  3
    slot   5  6  7                                          `compact`: node 3 moves to slot 7
    node   0  1  3
    lengths_B[b] = 8                                        `advance`

`accept` calls `compact`, if the path is scattered, and then `advance`. Where rounds are recorded as
CUDA graphs the two are called separately: `compact` is recorded, and `advance` sets an attribute on
the host, which no replay would do. For the same reason the recorded forward returns `slots_BN`, and
the recording of the verdict takes it as an input.

Keys and values of all layers of one shape lie in one tensor, a block [L, B, G, S, E], so that
compaction, selection and replacement take one operation per block: one or two for most models.
Blocks of finished generations are pooled.

Letters in tensor names: L layers, B batch, G heads of keys and values, S slots, E head size, A
accepted, R rows, N nodes.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...heads.layers.constants import counting
from ...heads.layers.draft_cache import STEP

BUCKET = 256
"""Slots by which the capacity grows."""
LEAST_DOUBLING = 1024
"""Slots of the smallest cache whose capacity doubles."""
Growth = Literal["buckets", "doubling", "room"]
MEMINFO = Path("/proc/meminfo")
"""Linux's table of memory."""
POOLED = 2
"""Largest number of caches of finished generations that are kept for the next ones."""


def slots_for(tokens: int, growth: Growth) -> int:
    """Return the slots per row for a longest row of `tokens`, the next forward's included.

    For example 300 tokens: 512 slots in buckets, and 1024 otherwise.
    """
    whole_steps = -(-tokens // STEP) * STEP  # up to a multiple of STEP
    # Never equal to the length: equal sizes would specialise a compiled function.
    slots = (whole_steps // BUCKET + 1) * BUCKET
    if growth == "buckets":
        return slots
    return max(LEAST_DOUBLING, 1 << (slots - 1).bit_length())  # up to a power of two


def free_memory(device: torch.device) -> float:
    """Return the free bytes, torch's unused reserve included; infinite where not reported."""
    if device.type == "cuda":
        # torch's allocator holds memory that the driver reports as taken.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + unused)
    return free_host_memory() if device.type == "cpu" else float("inf")


def free_host_memory() -> float:
    """Return the host's free bytes; infinite on systems other than Linux without psutil."""
    if MEMINFO.exists():
        # A line reads "MemAvailable:   12345678 kB".
        for line in MEMINFO.read_text().splitlines():
            name, value = line.split(":")
            if name == "MemAvailable":
                return float(value.removesuffix("kB")) * 1024
    if importlib.util.find_spec("psutil") is None:
        return float("inf")
    import psutil

    return float(psutil.virtual_memory().available)


@dataclass(frozen=True)
class StateShape:
    """Shape of a layer's keys, or values, without rows and slots, which generations change."""

    heads: int
    size: int
    """Width of a head."""
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class CacheInterface:
    """How a model's forward takes and returns its KV cache."""

    name: str
    """The argument that takes it, and the output that returns it."""
    state_shapes: list[StateShape]
    """Shapes of each layer's keys, then of the values."""


@dataclass
class Pool:
    """Blocks of unused caches, the newest last.

    The next generation of the same size reuses them, so that the addresses that a CUDA graph was
    recorded with stay.
    """

    blocks: list[list[Tensor]] = field(default_factory=list)

    def take(self, shapes: Sequence[tuple[StateShape, int]], rows: int, slots: int) -> list[Tensor]:
        """Return uninitialized blocks [L, B, G, S, E] for a number of layers of each shape."""
        sizes = [(layers, rows, shape.heads, slots, shape.size) for shape, layers in shapes]
        # Reuse only what was made in the same mode: tensors made in inference mode do not fully
        # work outside it.
        for number, blocks in enumerate(self.blocks):
            usable = all(
                block.is_inference() == torch.is_inference_mode_enabled() for block in blocks
            )
            if usable and [block.shape for block in blocks] == sizes:
                return self.blocks.pop(number)
        return [
            torch.empty(size, dtype=shape.dtype, device=shape.device)
            for size, (shape, _) in zip(sizes, shapes, strict=True)
        ]


class TreeCache(Cache):
    """The cache of one `generate` call."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        batch_size: int,
        device: torch.device,
        tokens: int = 0,
        rows: int = 0,
        pool: Pool | None = None,
        growth: Growth = "buckets",
    ) -> None:
        """Create an empty cache for tokens on a device.

        Args:
            shapes: the shape of each layer's keys, then that of each layer's values.
            batch_size: rows.
            device: where `lengths_B` and `slots_BN` lie; layers may lie elsewhere.
            tokens: the expected length of a row, for which memory is taken at once.
            rows: the expected number of rows; like `tokens` it may be exceeded.
            pool: blocks to reuse.
            growth: how the capacity grows.
        """
        layers = len(shapes) // 2
        super().__init__(layers=[TreeLayer(self, i) for i in range(layers)])
        self.lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        """Committed tokens of each row; a smaller length crops it."""
        self.pool = Pool() if pool is None else pool
        self._block_of: dict[StateShape, list[int]] = {}
        """By shape, which entries of `shapes` lie in its block. For two layers of one shape s:
        {s: [0, 1, 2, 3]}, the keys of layers 0 and 1, then their values."""
        for number, shape in enumerate(shapes):
            self._block_of.setdefault(shape, []).append(number)
        self._rows = max(rows, batch_size)
        self._room = slots_for(tokens, growth) if tokens else 0
        self.capacity = 0
        """Slots that forwards attend to."""
        self.growth: Growth = growth
        """How the capacity grows: by buckets; by doubling, so that a recorded forward serves many
        lengths of text; or to all the room there is, where attention reads no more than what is in
        use."""
        self.bucketed_length = 0
        """Slots that hold all rows and the next forward's tokens, rounded up to whole steps."""
        self.blocks: list[Tensor] = []
        self.keys: list[Tensor] = []
        """Keys of each layer, [B, G, S, E]: views of the blocks."""
        self.values: list[Tensor] = []
        self.slots_BN = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        """Slots of the latest forward's entries."""
        self._slots: dict[torch.device, Tensor] = {}
        """`slots_BN` on the other devices that layers lie on."""
        self.prefilled = 0
        """Prompt tokens of every row that were read, padding too."""
        self.attended: int | None = None
        """Slots that the next forward attends to; None for the whole capacity."""
        self.start = 0
        """Position of the next forward's first token, for models without position ids."""
        self.position_offsets: Tensor | None = None
        """What to add to a token's index to get its position, for each dimension of positions; None
        where a token's position is its index. Set for one row, whose prompt had images."""
        self.cross_attention: Cache | None = None
        """Cross-attention cache of an encoder-decoder."""

    def ensure_capacity(self, tokens: int) -> None:
        """Allocate slots for rows of this length."""
        self._resize(self._rows, slots_for(tokens, self.growth))

    def release(self) -> None:
        """Leave the blocks to the next generation; this cache must not be used again."""
        if self.blocks:
            self.pool.blocks = [*self.pool.blocks, self.blocks][-POOLED:]
        self.blocks = []
        self.keys = []
        self.values = []

    def reserve(self, new_tokens: int, longest: int, drafted: int = 0) -> None:
        """Reserve slots for the next forward, which writes `new_tokens` in every row.

        The host knows `longest`, the committed tokens of the longest row, without a sync. `drafted`
        uncommitted tokens of earlier forwards stay. For example lengths_B = [5, 9], longest = 9,
        drafted = 2 and new_tokens = 3: slots_BN = [[7, 8, 9], [11, 12, 13]].
        """
        self.bucketed_length = -(-(longest + drafted + new_tokens) // STEP) * STEP
        # Whole steps: shapes that follow from the number of slots change rarely.
        capacity = slots_for(self.bucketed_length, self.growth)
        if not self.blocks or capacity > self.capacity:
            if self.growth == "room":
                capacity = max(capacity, self._room)
            self._grow(capacity)
        new_N = counting(drafted + new_tokens, self.lengths_B.device)
        if drafted:
            new_N = new_N[drafted:]
        self.slots_BN = self.lengths_B[:, None] + new_N
        self._slots = {}
        self.attended = None

    def follow(self, start: int, tokens: int) -> None:
        """Show the model a cache of `start` tokens, before a forward that reads `tokens` in order.

        For a forward whose masks and positions the model makes itself: all rows are equally long.
        """
        self.start = start
        self.attended = start + tokens

    def accept(self, path_BA: Tensor, lengths_B: Tensor, in_order: bool = False) -> None:
        """Commit the first `lengths_B` nodes of `path_BA`.

        Paths that are `in_order` need no compaction.
        """
        if not in_order:
            # A path such as [0, 1, 2] lies where it should; [0, 1, 3] does not. Padding, beyond
            # `lengths_B`, does not count. On other devices the check would be a sync.
            scattered = True
            if path_BA.device.type == "cpu":
                new_A = torch.arange(path_BA.shape[1], device=path_BA.device)
                scattered = bool(((path_BA != new_A) & (new_A < lengths_B[:, None])).any())
            if scattered:
                self.compact(path_BA)
        self.lengths_B = self.lengths_B + lengths_B

    def compact(self, path_BA: Tensor) -> None:
        """Move the entries of `path_BA` to the slots right after the committed tokens."""
        accepted = path_BA.shape[1]
        if accepted == 1:  # the root alone, which lies there already
            return
        # slots_BN[b] = [5, 6, 7, 8] and path_BA[b] = [0, 1, 3]: from [5, 6, 8] to [5, 6, 7].
        # What is read is copied before anything is written, so the two may overlap.
        source_BA = self.slots_BN.gather(1, path_BA)
        target_BA = self.slots_BN[:, :accepted]
        batch = len(source_BA)
        for block in self.blocks:  # [L, B, G, S, E]
            source = source_BA.to(block.device)
            target = target_BA.to(block.device)
            if batch == 1:
                # The slots of one row are one index, in all layers and heads: a faster copy.
                block[:, :1].index_copy_(3, target[0], block[:, :1].index_select(3, source[0]))
            else:
                # Indices [B, 1] and [B, A] are broadcast: row b takes its own A slots.
                slots_LBSGE = block[:, :batch].transpose(2, 3)
                rows_B1 = counting(batch, source.device, column=True)
                slots_LBSGE[:, rows_B1, target] = slots_LBSGE[:, rows_B1, source]

    def advance(self, lengths_B: Tensor) -> None:
        """Commit the first `lengths_B` tokens of the last forward where they lie."""
        self.lengths_B = self.lengths_B + lengths_B

    def advance_prompt(self, tokens: int) -> None:
        """Commit the prompt tokens of the last forward: equally many per row, padding included."""
        self.advance(torch.full_like(self.lengths_B, tokens))
        self.prefilled += tokens

    def erase_uncommitted(self, shortest: int) -> None:
        """Zero the slots after each row's committed tokens; the shortest row has `shortest`.

        Rejected drafts lie there until others overwrite them. Attention gives them weight 0, but
        0 * NaN and 0 * inf are NaN.
        """
        # Slots before `shortest` are committed in every row. For example lengths_B = [2, 3] and a
        # capacity of 5: slots_S = [2, 3, 4], of which row 0 leaves all unused, and row 1 [3, 4].
        slots_S = counting(self.capacity - shortest, self.lengths_B.device, shortest)
        unused_BS = slots_S >= self.lengths_B[:, None]
        for block in self.blocks:
            after_LBGSE = block[:, : len(unused_BS), :, shortest : self.capacity]
            after_LBGSE.masked_fill_(unused_BS.to(block.device)[None, :, None, :, None], 0)

    def erase_next(self, count: int) -> None:
        """Zero the `count` slots after each row's committed tokens, without a device sync."""
        if count <= 0:
            return
        # lengths_B = [2, 5] and count = 2: slots_BC = [[2, 3], [5, 6]].
        slots_BC = self.lengths_B[:, None] + counting(count, self.lengths_B.device)
        rows_B1 = counting(len(slots_BC), self.lengths_B.device, column=True)
        for block in self.blocks:
            block[:, rows_B1.to(block.device), :, slots_BC.to(block.device)] = 0

    def keep_snapshot(self) -> None:
        """Let `rewind` come back to here; `StateCache` copies its states.

        Keys and values alone can be cut anywhere.
        """

    def rewind(self, tokens: int) -> int:
        """Go back to the first `tokens` of a single row's text, or further where necessary.

        A conversation goes back to what its next prompt shares with the text so far.

        Returns:
            How many tokens remain.
        """
        self.lengths_B = torch.full_like(self.lengths_B, tokens)
        self.erase_uncommitted(tokens)
        self.prefilled = tokens
        return tokens

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(block.nbytes for block in self.blocks)

    def select(self, rows_R: Tensor) -> None:
        """Keep these rows only; an index may repeat."""
        rows = len(rows_R)
        if rows > self._rows:
            self._resize(rows, self._room)
        for block in self.blocks:
            attended = block[:, :, :, : self.capacity]
            chosen_R = rows_R.to(block.device)
            # Layer by layer: indexing makes a copy, which would be as large as the cache.
            for layer_BGSE in attended:
                layer_BGSE[:rows] = layer_BGSE[chosen_R]
        self.lengths_B = self.lengths_B[rows_R]
        self._view()

    def replace(self, rows_R: Tensor, other: TreeCache) -> None:
        """Overwrite these rows with those of another cache."""
        if other.capacity > self.capacity:
            self._grow(other.capacity)
        for block, theirs in zip(self.blocks, other.blocks, strict=True):
            block[:, rows_R.to(block.device), :, : other.capacity] = theirs[
                :, : len(rows_R), :, : other.capacity
            ]
        self.lengths_B = self.lengths_B.index_copy(0, rows_R, other.lengths_B)

    def _grow(self, capacity: int) -> None:
        """Attend to `capacity` slots.

        The new slots are zeroed, since uninitialized memory may hold NaN.
        """
        self._resize(self._rows, capacity)
        for block in self.blocks:
            block[:, :, :, self.capacity : capacity] = 0
        self.capacity = capacity
        self._view()

    def _resize(self, rows: int, slots: int) -> None:
        """Allocate at least this many rows and slots."""
        if self.blocks and rows <= self._rows and slots <= self._room:
            return
        rows = max(rows, self._rows)
        slots = max(slots, self._room)
        sizes = [(shape, len(numbers)) for shape, numbers in self._block_of.items()]
        # Take memory first: if there is none, this raises and the cache is as it was.
        blocks = self.pool.take(sizes, rows, slots)
        blocks_before = self.blocks
        self.blocks = blocks
        self._rows = rows
        self._room = slots
        # Not strict: there are no old blocks at the first allocation.
        for old, new in zip(blocks_before, self.blocks, strict=False):
            new[:, : old.shape[1], :, : self.capacity] = old[:, :, :, : self.capacity]
        self._view()

    def _view(self) -> None:
        """Update `keys` and `values`, each layer's part of the blocks."""
        # By their number in `shapes`: those of keys come first, then those of values.
        states: dict[int, Tensor] = {}
        for block, numbers in zip(self.blocks, self._block_of.values(), strict=False):
            attended = block[:, : len(self.lengths_B), :, : self.capacity]
            states.update(zip(numbers, attended.unbind(0), strict=True))
        ordered = [states[number] for number in sorted(states)]
        layers = len(ordered) // 2
        self.keys = ordered[:layers]
        self.values = ordered[layers:]


class TreeLayer(CacheLayerMixin):
    """One layer's interface for transformers; the `TreeCache` holds the entries."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        # Weakly: in a cycle of references, a dropped cache would keep its memory until the garbage
        # collector runs.
        self.cache: TreeCache = weakref.proxy(cache)
        self.index = index

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store the layer's new entries; return the keys and values to attend to."""
        cache = self.cache
        device = key_states.device
        slots_BN = cache.slots_BN
        if device != slots_BN.device:  # the model is spread over several devices
            # One transfer per forward, for the first layer on each device.
            if device not in cache._slots:
                cache._slots[device] = slots_BN.to(device)
            slots_BN = cache._slots[device]
        keys = cache.keys[self.index]  # [B, G, S, E]
        values = cache.values[self.index]
        # Row b's entries go to its slots, slots_BN[b]. On a CPU `scatter_` would copy the cache.
        rows_B1 = counting(len(key_states), device, column=True)
        keys.transpose(1, 2)[rows_B1, slots_BN] = key_states.transpose(1, 2)
        values.transpose(1, 2)[rows_B1, slots_BN] = value_states.transpose(1, 2)
        # With `attended` None the slice is the whole capacity.
        return keys[:, :, : cache.attended], values[:, :, : cache.attended]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a TreeCache allocates all layers at once")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        cache = self.cache
        return cache.capacity if cache.attended is None else cache.attended, 0

    def get_seq_length(self) -> int:
        return self.cache.start

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in older versions of transformers."""
        return self.get_max_length()
