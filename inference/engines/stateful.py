"""Forwards of a transformers model whose layers keep states: its own modules, lane by lane.

See `state_cache`.

Letters in tensor names: B batch, T tokens of a lane, N nodes, R lanes, S slots of the cache, D
hidden size, F width of the chosen layers side by side.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...heads.layers.constants import counting
from ..cache.kv_cache import TreeCache
from ..cache.state_cache import Lanes, NodePath, StateCache
from ..trees.tree import DraftTree, NewNodes, path_from_root
from .base import TargetOutput
from .masks import in_window
from .model_engine import Masks, ModelEngine

MOST_PENDING = 8
"""Pending tokens from which on they are read alone, once; fewer are read again with the drafts of
every later forward. See benchmarks/hybrids.md."""
CHUNK_STEP = 8
"""Tokens by which the chunks of Mamba-2 grow."""
CAUSAL = 32
"""Minimum tokens of a lane that causal attention reads without a mask."""


class StatefulEngine(ModelEngine):
    """Runs the transformers model over the paths of each row's tree, side by side as lanes."""

    pads_prompts = False  # a state would read the padding
    recordable = False  # the number of lanes and their width change from round to round
    most_pending = MOST_PENDING

    @cached_property
    def _chunks(self) -> dict[Any, int]:
        """Modules of a packed copy that read in chunks, with the model's chunk size.

        transformers pads what Mamba-2 reads to whole chunks, of 256 tokens by default. The result
        does not depend on the chunk size, so short lanes are read in shorter chunks. The size is an
        attribute of the modules; the user's own are left alone, hence only those of a copy.
        """
        chunks: dict[Any, int] = {}
        if self.copies_weights:
            for module in self.model.modules():
                size = getattr(module, "chunk_size", None)
                if isinstance(size, int):
                    chunks[module] = size
        return chunks

    def new_cache(self, batch_size: int, tokens: int = 0, rows: int = 0) -> StateCache:
        target = self.target
        assert target.stateful is not None
        return StateCache(target.stateful, batch_size, target.device, tokens, rows, target.pool)

    def _cache_of_one_token(self) -> StateCache:
        cache = self.new_cache(1)
        cache.reserve(1, 0)
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.target.device)
        cache.tree_lanes(token_11, [[[0]]])  # one row with one path: the root
        return cache

    def read_chunk(
        self,
        tokens_BT: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept: list[int],
    ) -> TargetOutput:
        assert isinstance(cache, StateCache)
        # A chunk of a prompt is one chain in each row, and all of it is committed.
        size = tokens_BT.shape[1]
        cache.reserve(size, max(longest - size, 0))
        output = self._forward_lanes(cache, tokens_BT, _chains(tokens_BT), layers, kept)
        cache.advance_prompt(size)
        return output

    def forward_tree(
        self, tree: DraftTree, longest: int, cache: TreeCache, layers: tuple[int, ...]
    ) -> TargetOutput:
        assert isinstance(cache, StateCache)
        cache.reserve(tree.tokens_BN.shape[1], longest)
        paths = _chains(tree.tokens_BN) if tree.in_order else leaf_paths(tree)
        return self._forward_lanes(cache, tree.tokens_BN, paths, layers)

    def forward_nodes(
        self,
        nodes: NewNodes,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> TargetOutput:
        """One forward over a chain of tokens after the committed ones."""
        assert isinstance(cache, StateCache)
        assert nodes.cached == 0  # drafters that go level by level are refused
        tokens_BN = nodes.tokens_BN
        cache.reserve(tokens_BN.shape[1], longest)
        kept = None if kept_K is None else kept_K.tolist()
        return self._forward_lanes(cache, tokens_BN, _chains(tokens_BN), layers, kept)

    def _forward_lanes(
        self,
        cache: StateCache,
        tokens_BN: Tensor,
        paths: list[list[NodePath]],
        layers: tuple[int, ...],
        kept: list[int] | None = None,
    ) -> TargetOutput:
        """Forward over the paths of each row's tree, for whose nodes there is room.

        Returns the logits of the nodes `kept`, None for all, and the features of all.
        """
        # 1. The latest forward's states become snapshots; many pending tokens are read alone.
        cache.take_snapshots()
        self._read_pending(cache, tokens_BN.shape[1])

        # 2. Lanes: each row's pending tokens, then the path to a leaf of its tree.
        cache.tree_lanes(tokens_BN, paths)
        assert cache.lanes is not None
        lanes = cache.lanes
        nodes = tokens_BN.shape[1]
        wanted = list(range(nodes)) if kept is None else kept
        masks = self._lane_masks(cache)

        # 3a. One chain in each row, after equally many pending tokens: a lane's last tokens are the
        # nodes, in order. With 2 pending tokens and 3 nodes, node n is the lane's token 2 + n.
        before = lanes.width - nodes
        whole = all(
            len(lane.path) == nodes and len(lane.slots) == lanes.width for lane in lanes.lanes
        )
        if lanes.rows_R is None and whole:
            logits_BKV, features_BTF = self._lane_forward(
                cache, masks, layers, [before + node for node in wanted]
            )
            return _output(logits_BKV, features_BTF[:, before:])

        # 3b. A model whose logits `modules` do not compute: all logits of all lanes, some of them
        # several times, of which each node's are taken.
        wanted_N = torch.tensor(wanted, dtype=torch.int64, device=tokens_BN.device)
        if not self.target.computes_logits:
            logits_RTV, features_RTF = self._lane_forward(
                cache, masks, layers, list(range(lanes.width))
            )
            return _output(
                _of_nodes(logits_RTV, lanes)[:, wanted_N], _of_nodes(features_RTF, lanes)
            )

        # 3c. The LM head reads each node once, and no pending tokens: lanes yield no logits, but
        # features of layer -1 after the others, [R, T, F + D].
        with_last = (*layers, -1)
        _, features_RTF = self._lane_forward(cache, masks, with_last, [])
        features_BNF = _of_nodes(features_RTF, lanes)
        width = self.target.info.hidden_size
        logits_BKV = self.logits(features_BNF[:, wanted_N, -width:])
        return _output(logits_BKV, features_BNF[..., :-width])

    def _read_pending(self, cache: StateCache, nodes: int) -> None:
        """Read pending tokens alone if later forwards would read too many of them again."""
        while True:
            pending = cache.pending()
            rows = [row for row, count in enumerate(pending) if count >= self.most_pending]
            if not rows and nodes == 1 and len(set(pending)) > 1:
                # The lanes of rows with fewer pending tokens would be padded and their states not
                # kept. With one token a round such a row would never catch up. For pending tokens
                # [3, 0]: row 0 reads its 3, and then all lanes are equally long.
                most = max(pending)
                rows = [row for row, count in enumerate(pending) if count == most]
            if not rows:
                return
            count = min(pending[row] for row in rows)  # lanes of one length need no padding
            cache.advance_lanes(rows, count)
            self._lane_forward(cache, self._lane_masks(cache), (), [])
            cache.advanced()

    def _lane_forward(
        self, cache: StateCache, masks: Masks | None, layers: tuple[int, ...], kept: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Return each lane's model logits at the indices `kept`, and features of all its tokens."""
        assert cache.lanes is not None
        lanes = cache.lanes
        # Chunks about as long as the lanes, in whole steps: 13 tokens are read in a chunk of 16.
        # By now `own_attention` has chosen the modules that run.
        for module, size in self._chunks.items():
            module.chunk_size = min(size, -(-lanes.width // CHUNK_STEP) * CHUNK_STEP)
        positions_RT = lanes.positions_RT.clamp(max=self.target.max_positions - 1)
        return self._unrecorded_forward(lanes.tokens_RT, positions_RT, masks, cache, layers, kept)

    def _lane_masks(self, cache: StateCache) -> Masks | None:
        """Return masks of the slots that each lane's tokens see; None without attention layers.

        A token sees the committed slots up to its own, and those of its path.
        """
        target, lanes = self.target, cache.lanes
        assert lanes is not None
        kinds = target.attention_kinds
        if not kinds:
            return None
        # Long lanes without padding (chunks of a prompt) need no mask.
        # sync: as the others of a round
        last = int(lanes.slots_RT[0, -1]) + 1 if lanes.in_line else 0
        if (
            lanes.in_line
            and lanes.width >= CAUSAL
            and self.own_attention
            and kinds == ("full_attention",)
        ):
            cache.attended = last
            return self.attention.of_prompt(lanes.width, last)
        # Our attention reads only the slots that the mask covers; on a CPU those in use.
        short = self.on_cpu and self.own_attention
        slots = cache.bucketed_length if short else cache.capacity
        visible_RTS, slot_positions_RS = _visible(lanes, slots)
        visible = dict.fromkeys(kinds, visible_RTS)
        if "sliding_attention" in visible:
            visible["sliding_attention"] = in_window(
                target, lanes.positions_RT, slot_positions_RS, visible_RTS
            )
        masks = self.attention_masks(visible)
        if isinstance(masks, dict):  # layers with nothing but a state read no mask
            return {"linear_attention": None, "conv": None, **masks}
        return masks


def _output(logits: Tensor, features: Tensor) -> TargetOutput:
    return TargetOutput(logits.to(torch.promote_types(logits.dtype, torch.float32)), features)


def _of_nodes(values_RTX: Tensor, lanes: Lanes) -> Tensor:
    """The lanes' values at the nodes, [B, N, X]."""
    # Node n of row b is token index_BN[b, n] of lane first_BN[b, n].
    return values_RTX[lanes.first_BN, lanes.index_BN]


def _visible(lanes: Lanes, slots: int) -> tuple[Tensor, Tensor]:
    """Return the slots that each lane's tokens see [R, T, S], and the slots' positions [R, S]."""
    # For example 5 committed tokens, the last one pending, and the path [0, 2]: a lane in slots
    # [4, 5, 7]. Slot 6 holds node 1, of another path.
    #     slot          0 1 2 3   4 5 6 7      position of slot 7: 6, its depth after the text
    #     pending       x x x x   x
    #     root          x x x x   x x
    #     node 2        x x x x   x x   x
    device = lanes.slots_RT.device
    slots_S = counting(slots, device)

    # 1. Committed slots, up to the token's own.
    newest_RT = torch.minimum(lanes.slots_RT, lanes.committed_R[:, None] - 1)
    visible_RTS = slots_S <= newest_RT[..., None]

    # 2. Among the tokens of a lane each sees those up to itself. Padding repeats the last token's
    # slot, and sees what that token sees.
    index_T = counting(lanes.width, device)
    index_RT = torch.minimum(index_T, lanes.last_R[:, None])
    in_lane_RTT = index_RT[:, None] <= index_RT[..., None]
    visible_RTS.scatter_(2, lanes.slots_RT[:, None].expand_as(in_lane_RTT), in_lane_RTT)

    # 3. Positions: a slot's own index, but in a lane that of its token.
    positions_RS = slots_S.expand(len(lanes.slots_RT), -1).scatter(
        1, lanes.slots_RT, lanes.positions_RT
    )
    return visible_RTS, positions_RS


def _chains(tokens_BN: Tensor) -> list[list[NodePath]]:
    """The only path of each row's chain: [[[0, 1, 2]], [[0, 1, 2]]] for two rows of three nodes."""
    batch, nodes = tokens_BN.shape
    return [[list(range(nodes))] for _ in range(batch)]


def leaf_paths(tree: DraftTree) -> list[list[NodePath]]:
    """For each row, the path to each leaf of its tree, root first; no lane reads padding nodes."""
    paths_of_rows = []
    parents_of_rows = tree.parents_BN.tolist()  # sync: lanes are made on the host
    for parents, size in zip(parents_of_rows, tree.sizes_B.tolist(), strict=True):
        inner = set(parents[:size])  # nodes that are someone's parent are not leaves
        paths = []
        for node in range(size):
            if node in inner:
                continue
            paths.append(path_from_root(parents, node))
        paths_of_rows.append(paths)
    return paths_of_rows
