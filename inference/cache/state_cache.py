"""A `TreeCache` with layers that keep a state: the window of a convolution, a recurrence, or both.

Keys and values of a rejected draft are overwritten; a state that has seen it is spoiled. So the
cache keeps each row's states as they were at a position that is certain, the snapshot, `read`
tokens into the text. The tokens committed since are pending: their keys and values are in the
cache, the snapshot has not seen them. A forward begins at the snapshot:

    text     The  cat  sat  on  the          snapshot after "cat", pending "sat on", root "the"
    forward            sat  on  the  mat  .  pending, root, drafts; a copy of the snapshot goes in

If all its tokens are accepted, the states that come out are the next snapshot and nothing is
pending. Else the snapshot stays, and the accepted tokens are pending: a rejected draft costs a few
tokens more in the next forward, and no other. Where many are pending, the engine reads them alone
(`advance_lanes`).

A recurrence follows one path. So the paths of a tree are read side by side, each a lane with a copy
of the snapshot:

    paths  root a b, root c          lane 0   pending  root  a  b
                                     lane 1   pending  root  c  (padding)

Attention layers store a node's keys and values once, from the first lane with it, in the node's
slot. Lanes are padded on the right. Padding spoils the states of its lane, so they are not kept.

A convolution's window after any token can be cut from its inputs. Without a recurrence nothing is
ever pending.

Letters in tensor names: B batch, N nodes, R lanes, T tokens of a lane, K entries that are stored, S
slots, G heads of keys and values, E head size, A accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...heads.layers.constants import counting, upload
from .kv_cache import CacheInterface, Pool, TreeCache, TreeLayer

KEPT_SNAPSHOTS = 2
"""Snapshots at the ends of prompts, the newest ones, to which a conversation can go back."""
NodePath = list[int]
"""Nodes of a tree from its root on."""


WINDOW = "window"
RECURRENCE = "recurrence"
Which = tuple[str, int]
"""A state of a layer: the `WINDOW` of a convolution or a `RECURRENCE`, and its number."""
Snapshot = dict[Which, Tensor]
"""A layer's states, whose first dimension is rows."""


@dataclass(frozen=True)
class CachedLayer:
    """Contents of the cache for one layer."""

    has_keys: bool
    states: Snapshot
    """Its states, of no rows."""


@dataclass(frozen=True)
class StatefulInterface:
    """How a model with states takes and returns its cache, and what the cache keeps by layer."""

    cache: CacheInterface
    """Its name, and the shapes of the keys and values of those layers that have them."""
    layers: list[CachedLayer]

    @property
    def recurrent(self) -> bool:
        """Whether a layer keeps more than the window of a convolution."""
        return any(kind == RECURRENCE for layer in self.layers for kind, _ in layer.states)

    def row_bytes(self) -> int:
        """Bytes of the states of a row."""
        total = 0
        for layer in self.layers:
            for state in layer.states.values():
                total += math.prod(state.shape[1:]) * state.dtype.itemsize
        return total


@dataclass(frozen=True)
class Lane:
    """Tokens of a row that a forward reads one after the other."""

    row: int
    path: NodePath
    """Nodes of the row's tree, which the lane reads after the row's pending tokens."""
    slots: list[int]
    """Slots of all its tokens."""
    positions: list[int]


@dataclass(frozen=True)
class Lanes:
    """A forward over lanes: what it reads, and where its results belong."""

    lanes: list[Lane]
    """The lanes of a row follow each other."""
    width: int
    """Tokens of a lane, padding included."""
    tokens_RT: Tensor
    slots_RT: Tensor
    """Slots of the tokens' keys and values; padding repeats the last."""
    positions_RT: Tensor
    committed_R: Tensor
    """Committed tokens of each lane's row."""
    last_R: Tensor
    """Index of the last token of each lane."""
    rows_R: Tensor | None
    """Row of each lane; None where lane r is row r of the cache, and there are no others."""
    stored: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """Entries of attention layers to store: their lanes, their indices in the lanes, and the rows
    and slots that they go to, each [K]; None for entries that are stored already."""
    first_BN: Tensor
    """The first lane with each node."""
    index_BN: Tensor
    """The index of each node in that lane."""
    in_line: bool
    """Whether every lane reads the slots from one on, in order, and all lanes the same slots,
    without padding."""


class StateCache(TreeCache):
    """The cache of one `generate` call of a model with states."""

    def __init__(
        self,
        interface: StatefulInterface,
        batch_size: int,
        device: torch.device,
        tokens: int = 0,
        rows: int = 0,
        pool: Pool | None = None,
    ) -> None:
        """Create an empty cache of what a model keeps; other arguments are those of `TreeCache`."""
        super().__init__(interface.cache.state_shapes, batch_size, device, tokens, rows, pool)
        # One object for each layer of the model, in transformers' interface. `attending` counts the
        # layers with keys, which are the only ones in `self.keys` and `self.values`.
        attending = 0
        self.layers = []
        for layer in interface.layers:
            cached_layer: Any = _NoLayer()
            if layer.states and layer.has_keys:
                cached_layer = _StateAndKeys(self, attending, layer)
            elif layer.states:
                cached_layer = _StateLayer(self, layer)
            elif layer.has_keys:
                cached_layer = _LaneLayer(self, attending)
            attending += layer.has_keys
            self.layers.append(cached_layer)
        self.states = [layer for layer in self.layers if isinstance(layer, _StateLayer)]
        """The layers with a state."""
        self.recurrent = interface.recurrent
        self.read = [0] * batch_size
        """Tokens of each row that its snapshot has seen."""
        self.tokens_BS = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        """The token in each slot."""
        self.lanes: Lanes | None = None
        """Lanes of the forward that is running, or of the latest one until `take_snapshots` has
        taken its states; else None."""
        self._before: list[int] = []
        """Committed tokens of each row before that forward."""
        self._path_BA: Tensor | None = None
        """The path that was accepted of its tree; None for its first nodes, in order."""
        self._kept: list[tuple[int, list[Snapshot]]] = []
        """Snapshots that a conversation can go back to, by the tokens that they have seen."""

    def take_snapshots(self) -> None:
        """Take the latest forward's states as snapshots where all that they have seen is committed.

        For example a row of 5 tokens with a recurrence, whose lane read "root a b", nodes 0 to 2:

            lengths_B    committed       the states that came out
            8            "root a b"      are the new snapshot
            7            "root a"        have seen b: the snapshot stays, and "root a" is pending

        Call it before anything that depends on `read` or on the snapshots. Until then `lengths_B`
        may be set back.
        """
        lanes = self.lanes
        if lanes is None:
            return
        # sync: after the loop's own, for which all has been computed
        lengths: list[int] = self.lengths_B.tolist()
        paths = None if self._path_BA is None else self._path_BA.tolist()

        # 1. For each row that has grown, the lane whose states are certain now.
        rows: list[int] = []
        sources: list[int] = []  # lanes
        counts: list[int] = []  # tokens of these lanes that are committed
        for row, (before, length) in enumerate(zip(self._before, lengths, strict=True)):
            grown = length - before
            if grown <= 0:  # nothing was committed, or the row is idle
                continue
            last = grown - 1 if paths is None else paths[row][grown - 1]  # the last accepted node
            source = self._lane_after(row, last)
            if source is None:  # every lane with that node has read more: what is new is pending
                continue
            rows.append(row)
            sources.append(source)
            counts.append(before - self.read[row] + grown)  # pending tokens, then accepted nodes

        # 2. Its states become the row's snapshot, and the rest of the forward is freed.
        for layer in self.states:
            layer.take(rows, sources, counts, cut=not self.recurrent)
        for row in rows:
            self.read[row] = lengths[row]
        self.lanes = None
        for layer in self.states:
            layer.forget()

    def _lane_after(self, row: int, node: int) -> int | None:
        """Return the first lane of a row that contains this node; None if there is none.

        With a recurrence, the lane must also end at the node and have no padding.
        """
        assert self.lanes is not None
        width = self.lanes.width
        for number, lane in enumerate(self.lanes.lanes):
            if lane.row != row or node not in lane.path:
                continue
            if not self.recurrent or (lane.path[-1] == node and len(lane.slots) == width):
                return number
        return None

    def pending(self) -> list[int]:
        """Return how many committed tokens of each row its snapshot has not seen.

        Call it after `take_snapshots`.
        """
        lengths: list[int] = self.lengths_B.tolist()  # sync: as in `take_snapshots`
        return [length - read for length, read in zip(lengths, self.read, strict=True)]

    def tree_lanes(self, tokens_BN: Tensor, paths: list[list[NodePath]]) -> None:
        """Set up the next forward's lanes: a row's pending tokens, then the path to a leaf.

        There must be room for all nodes.
        """
        lengths: list[int] = self.lengths_B.tolist()
        # 1. Note the tokens of the forward's slots.
        nodes = tokens_BN.shape[1]
        if self.tokens_BS.shape[1] < self.capacity:
            self.tokens_BS = _widened(self.tokens_BS, self.capacity)
        slots_BN = self.lengths_B[:, None] + counting(nodes, tokens_BN.device)
        self.tokens_BS.scatter_(1, slots_BN, tokens_BN)

        # 2. The lanes, and for each node the first one that reads it.
        first_BN = [[0] * nodes for _ in lengths]
        index_BN = [[0] * nodes for _ in lengths]
        lanes: list[Lane] = []
        stored: list[tuple[int, int, int, int]] = []
        for row, row_paths in enumerate(paths):
            stored_nodes: set[int] = set()
            length = lengths[row]
            pending = list(range(self.read[row], length))
            for path in row_paths:
                # A committed token's slot is its position. With read = 3, length = 5 and the path
                # [0, 2]: slots [3, 4, 5, 7], positions [3, 4, 5, 6].
                slots = [*pending, *[length + node for node in path]]
                positions = [*pending, *range(length, length + len(path))]
                # A node is stored from the first lane that reads it.
                for index, node in enumerate(path, len(pending)):
                    if node in stored_nodes:
                        continue
                    stored_nodes.add(node)
                    stored.append((len(lanes), index, row, length + node))
                    first_BN[row][node] = len(lanes)
                    index_BN[row][node] = index
                lanes.append(Lane(row, path, slots, positions))
            # Padding of the tree is in no lane: its output is that of the root, and is not used.
            for node in set(range(nodes)) - stored_nodes:
                first_BN[row][node] = first_BN[row][0]
                index_BN[row][node] = index_BN[row][0]
        self._begin(lanes, lengths, stored, first_BN, index_BN)

    def advance_lanes(self, rows: list[int], count: int) -> None:
        """Set up lanes for a forward over the first `count` pending tokens of some rows.

        `advanced` takes their states.
        """
        lanes = []
        for row in rows:
            slots = list(range(self.read[row], self.read[row] + count))
            lanes.append(Lane(row, [], slots, positions=slots))
        self._begin(lanes, self.lengths_B.tolist(), [], [], [])

    def advanced(self) -> None:
        """Take the states of the forward of `advance_lanes`, which has run, as snapshots."""
        assert self.lanes is not None
        lanes = self.lanes.lanes
        rows = [lane.row for lane in lanes]
        counts = [len(lane.slots) for lane in lanes]
        for layer in self.states:
            layer.take(rows, list(range(len(lanes))), counts, cut=False)
        for row, count in zip(rows, counts, strict=True):
            self.read[row] += count
        self.lanes = None

    def _begin(
        self,
        lanes: list[Lane],
        lengths: list[int],
        stored: list[tuple[int, int, int, int]],
        first_BN: list[list[int]],
        index_BN: list[list[int]],
    ) -> None:
        """Hand out copies of the snapshots, and put what the forward needs on the device."""
        device = self.lengths_B.device

        # 1. Put the lanes, padded to one width, on the device.
        rows = [lane.row for lane in lanes]
        width = max(len(lane.slots) for lane in lanes)
        slots_RT = upload([_padded(lane.slots, width) for lane in lanes], device)
        each_row_once = rows == list(range(len(lengths)))
        rows_R = None if each_row_once else upload(rows, device)
        tokens_BS = self.tokens_BS if rows_R is None else self.tokens_BS[rows_R]
        entries = None
        if stored:
            lanes_K, index_K, rows_K, slots_K = upload(stored, device).unbind(1)
            entries = (lanes_K, index_K, rows_K, slots_K)
        # Such as [7, 8, 9] in all lanes, which a causal mask serves.
        first = lanes[0].slots[0]
        in_order = list(range(first, first + width))
        self.lanes = Lanes(
            lanes,
            width,
            tokens_RT=tokens_BS.gather(1, slots_RT),
            slots_RT=slots_RT,
            positions_RT=upload([_padded(lane.positions, width) for lane in lanes], device),
            committed_R=upload([lengths[row] for row in rows], device),
            last_R=upload([len(lane.slots) - 1 for lane in lanes], device),
            rows_R=rows_R,
            stored=entries,
            first_BN=upload(first_BN, device),
            index_BN=upload(index_BN, device),
            in_line=all(lane.slots == in_order for lane in lanes),
        )

        # 2. What `take_snapshots` needs after the forward.
        self._before = lengths
        self._path_BA = None

        # 3. States that the forward may overwrite.
        for layer in self.states:
            layer.hand_out(rows_R)

    def compact(self, path_BA: Tensor) -> None:
        super().compact(path_BA)
        self._path_BA = path_BA
        # The tokens move as their keys and values do.
        accepted_BA = self.tokens_BS.gather(1, self.slots_BN.gather(1, path_BA))
        self.tokens_BS.scatter_(1, self.slots_BN[:, : path_BA.shape[1]], accepted_BA)

    def select(self, rows_R: Tensor) -> None:
        self.take_snapshots()
        super().select(rows_R)
        self.tokens_BS = self.tokens_BS[rows_R]
        self.read = [self.read[row] for row in rows_R.tolist()]
        for layer in self.states:
            layer.select(rows_R)

    def replace(self, rows_R: Tensor, other: TreeCache) -> None:
        assert isinstance(other, StateCache)
        self.take_snapshots()
        other.take_snapshots()
        super().replace(rows_R, other)
        width = max(self.tokens_BS.shape[1], other.tokens_BS.shape[1])
        theirs_BS = _widened(other.tokens_BS, width)
        self.tokens_BS = _widened(self.tokens_BS, width).index_copy(0, rows_R, theirs_BS)
        for row, read in zip(rows_R.tolist(), other.read, strict=True):
            self.read[row] = read
        for layer, theirs in zip(self.states, other.states, strict=True):
            layer.replace(rows_R, theirs)

    def keep_snapshot(self) -> None:
        self.take_snapshots()
        states = [_of_rows(layer.snapshot) for layer in self.states]
        self._kept = [*self._kept, (self.read[0], states)][-KEPT_SNAPSHOTS:]

    def rewind(self, tokens: int) -> int:
        self.take_snapshots()
        # Keys and values can be cut anywhere, states not: go back to the newest snapshot that has
        # seen no more than `tokens`. With snapshots at 40 and 90 and tokens = 70: to 40.
        if tokens < self.read[0]:
            self._kept = [(read, states) for read, states in self._kept if read <= tokens]
            if not self._kept:
                return 0
            tokens, states = self._kept[-1]
            for layer, snapshot in zip(self.states, states, strict=True):
                layer.snapshot = _of_rows(snapshot)
            self.read = [tokens]
        return super().rewind(tokens)

    @property
    def nbytes(self) -> int:
        states = [state for layer in self.states for state in layer.snapshot.values()]
        return super().nbytes + sum(state.nbytes for state in states)


def _padded(numbers: list[int], width: int) -> list[int]:
    """The numbers with the last one repeated, up to a width."""
    return [*numbers, *[numbers[-1]] * (width - len(numbers))]


def _widened(tokens_BS: Tensor, slots: int) -> Tensor:
    """Tokens with zeros after them, up to a number of slots."""
    return torch.nn.functional.pad(tokens_BS, (0, slots - tokens_BS.shape[1]))


class _NoLayer:
    """A layer that keeps nothing, such as one of experts alone."""


def _of_rows(snapshot: Snapshot, rows_R: Tensor | None = None) -> Snapshot:
    """Copies of these rows' states; None for all."""
    if rows_R is None:
        return {which: state.clone() for which, state in snapshot.items()}
    return {
        which: state.index_select(0, rows_R.to(state.device)) for which, state in snapshot.items()
    }


class _StateLayer(LinearAttentionCacheLayerMixin):
    """One layer's states for transformers: a forward reads and overwrites snapshot copies."""

    def __init__(self, cache: StateCache, layer: CachedLayer) -> None:
        numbers = range(len({number for _, number in layer.states}))
        super().__init__(number_of_states=len(numbers))
        rows = len(cache.lengths_B)
        self.snapshot: Snapshot = {
            which: state.new_zeros(rows, *state.shape[1:]) for which, state in layer.states.items()
        }
        """Each row's states where they are certain."""
        self._inputs: dict[int, Tensor] = {}
        """What each convolution has read in the latest forward: the window before it, and the
        inputs of its tokens."""
        # True from the start, since zeros are the state of an empty text.
        self.has_previous_state = dict.fromkeys(numbers, True)
        self.is_conv_states_initialized = {
            number: (WINDOW, number) in layer.states for number in numbers
        }
        self.is_recurrent_states_initialized = {
            number: (RECURRENCE, number) in layer.states for number in numbers
        }
        self.conv_kernel_size = {
            number: state.shape[-1]
            for (kind, number), state in layer.states.items()
            if kind == WINDOW
        }

    def _after_forward(self, kind: str) -> dict[int, Tensor | None]:
        """The latest forward's states of a kind, by number, where transformers looks for them."""
        return self.conv_states if kind == WINDOW else self.recurrent_states

    def hand_out(self, rows_R: Tensor | None) -> None:
        """Copy the snapshots of the lanes' rows for a forward."""
        self.forget()
        for (kind, number), state in _of_rows(self.snapshot, rows_R).items():
            self._after_forward(kind)[number] = state

    def take(self, rows: list[int], lanes: list[int], counts: list[int], cut: bool) -> None:
        """Take the states of these lanes as those rows' snapshots.

        With `cut` a lane's windows are those after `counts` of its tokens, whatever it has read
        after them.
        """
        if not rows:
            return
        for (kind, number), state in self.snapshot.items():
            inputs = self._inputs.get(number) if kind == WINDOW and cut else None
            if inputs is None:
                new = _replaced(state, rows, self._after_forward(kind)[number], lanes)
            else:
                # `inputs` is the old window and then the tokens' inputs. With a window of 3, x0 to
                # x2, and tokens t0 to t3, the window after 2 tokens is inputs[2:5]:
                #     x0 x1 [x2 t0 t1] t2 t3
                size = state.shape[-1]
                cuts = [
                    inputs[lane, ..., count : count + size]
                    for lane, count in zip(lanes, counts, strict=True)
                ]
                new = _replaced(state, rows, torch.stack(cuts), list(range(len(cuts))))
            self.snapshot[kind, number] = new

    def forget(self) -> None:
        """Free what the latest forward left."""
        # transformers looks up both kinds by every number; None where a layer has no such state.
        self.conv_states = dict.fromkeys(range(self.number_of_states))
        self.recurrent_states = dict.fromkeys(range(self.number_of_states))
        self._inputs = {}

    def select(self, rows_R: Tensor) -> None:
        self.snapshot = _of_rows(self.snapshot, rows_R)

    def replace(self, rows_R: Tensor, other: _StateLayer) -> None:
        for which, state in self.snapshot.items():
            self.snapshot[which] = state.index_copy(
                0, rows_R.to(state.device), other.snapshot[which]
            )

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_: object) -> Tensor:
        """Shift the tokens' inputs into the window; return the old window and these inputs."""
        window: Any = self.conv_states[state_idx]
        inputs = torch.cat([window, conv_states], dim=-1)
        self._inputs[state_idx] = inputs
        self.conv_states[state_idx] = inputs[..., -window.shape[-1] :]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: object
    ) -> Tensor:
        before: Any = self.recurrent_states[state_idx]
        self.recurrent_states[state_idx] = recurrent_states.to(before.dtype)
        return recurrent_states

    def lazy_initialization(self, *_: object, **__: object) -> None:
        raise AssertionError("a StateCache has all states from the start")


def _replaced(states: Tensor, rows: list[int], of_lanes: Any, lanes: list[int]) -> Tensor:
    """Replace the states of these rows by those of these lanes."""
    # Every row by the lane of its number: the tensor itself, without a copy.
    if rows == lanes == list(range(len(of_lanes))) and len(of_lanes) == len(states):
        return of_lanes
    return states.index_copy(0, upload(rows, states.device), of_lanes[upload(lanes, states.device)])


class _LaneLayer(TreeLayer):
    """Keys and values of a layer, whose entries come in lanes."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        cache = self.cache
        assert isinstance(cache, StateCache) and cache.lanes is not None
        lanes = cache.lanes
        device = key_states.device
        attended = []
        for cached_BGSE, new_RGTE in (
            (cache.keys[self.index], key_states),
            (cache.values[self.index], value_states),
        ):
            # 1. Store each node's entry, from one of the lanes that have read it.
            if lanes.stored is not None:
                lanes_K, index_K, rows_K, slots_K = (
                    indices_K.to(device) for indices_K in lanes.stored
                )
                entries_KGE = new_RGTE.transpose(1, 2)[lanes_K, index_K]
                cached_BGSE.transpose(1, 2)[rows_K, slots_K] = entries_KGE
            # 2. Each lane attends to its row's entries. With a single row nothing is copied.
            attended_RGSE = cached_BGSE[:, :, : cache.attended]
            if lanes.rows_R is not None:
                if len(attended_RGSE) == 1:
                    attended_RGSE = attended_RGSE.expand(len(lanes.lanes), -1, -1, -1)
                else:
                    attended_RGSE = attended_RGSE[lanes.rows_R.to(device)]
            attended.append(attended_RGSE)
        return attended[0], attended[1]


# transformers' two base classes differ in the type of `is_croppable`.
class _StateAndKeys(_StateLayer, _LaneLayer):  # type: ignore[override]
    """A layer with a state and with keys and values."""

    def __init__(self, cache: StateCache, index: int, layer: CachedLayer) -> None:
        _LaneLayer.__init__(self, cache, index)
        _StateLayer.__init__(self, cache, layer)
