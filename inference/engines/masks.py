"""Positions of new nodes, and the slots of the KV cache that each of them attends to.

Letters in tensor names: B batch, N nodes, S slots of the cache, X columns of a framed attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...heads.layers.constants import counting
from ..targets.target_model import TargetModel
from ..trees.tree import NewNodes


def visible_slots(
    target: TargetModel, nodes: NewNodes, lengths_B: Tensor, slots: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return position ids [B, N] of new nodes, and the slots they attend to [B, N, S].

    The slots are given for each kind of attention.
    """
    framed_BNX = nodes.framed_BNX
    uncommitted = nodes.depths_BM.shape[1]
    device = lengths_B.device
    lengths_B1 = lengths_B[:, None]

    # 1. Each slot takes the column of the framed tree attention that applies to it. For example 5
    # committed tokens and 3 uncommitted nodes (X = 5) in 10 slots:
    #     slot      0 1 2 3 4   5 6 7   8 9
    #     column    0 0 0 0 0   1 2 3   4 4      column 0: always visible; column 4: never
    if uncommitted == 1:  # the root alone sees the committed tokens and itself
        visible_BNS = (counting(slots, device) <= lengths_B1)[:, None]
    else:
        column_BS = (counting(slots, device, 1) - lengths_B1).clamp(0, uncommitted + 1)
        visible_BNS = framed_BNX.gather(2, column_BS[:, None].expand(-1, framed_BNX.shape[1], -1))
    positions_BN = node_positions(target, nodes, lengths_B)
    visible = dict.fromkeys(target.attention_kinds, visible_BNS)

    # 2. Local attention compares positions, and in a tree a slot's position is not its index:
    # siblings share one. After 5 tokens, nodes of depths [0, 1, 1] lie in slots 5, 6, 7 at
    # positions 5, 6, 6.
    local = [kind for kind in visible if kind in NEAR]
    if local:
        slots_S = counting(slots, device)
        # Index of the node in each slot; negative for committed tokens, too large for free slots.
        after_BS = slots_S - lengths_B1
        node_positions_BS = lengths_B1 + nodes.depths_BM.gather(
            1, after_BS.clamp(0, uncommitted - 1)
        )
        slot_positions_BS = torch.where(
            (after_BS >= 0) & (after_BS < uncommitted), node_positions_BS, slots_S
        )
        for kind in local:
            visible[kind] = NEAR[kind](target, positions_BN, slot_positions_BS, visible_BNS)
    return positions_BN, visible


def node_positions(target: TargetModel, nodes: NewNodes, lengths_B: Tensor) -> Tensor:
    """Position ids [B, N] of new nodes.

    A node beyond the last position is never returned, but must not break an embedding table.
    """
    # Only the new nodes: the cached ones come first.
    depths_BN = nodes.depths_BM[:, nodes.cached :]
    return (lengths_B[:, None] + depths_BN).clamp(max=target.max_positions - 1)


def in_window(
    target: TargetModel, positions_BN: Tensor, slot_positions_BS: Tensor, visible_BNS: Tensor
) -> Tensor:
    """Visible slots [B, N, S] that lie within the sliding window of each node."""
    return visible_BNS & (
        slot_positions_BS[:, None] > positions_BN[..., None] - target.config.sliding_window
    )


def in_chunk(
    target: TargetModel, positions_BN: Tensor, slot_positions_BS: Tensor, visible_BNS: Tensor
) -> Tensor:
    """Visible slots [B, N, S] that lie in the same chunk of the text as each node."""
    size = target.config.attention_chunk_size
    return visible_BNS & ((slot_positions_BS // size)[:, None] == (positions_BN // size)[..., None])


NEAR: dict[str, Callable[[TargetModel, Tensor, Tensor, Tensor], Tensor]] = {
    "sliding_attention": in_window,
    "chunked_attention": in_chunk,
}
"""Kinds of attention that see only a part of the text, with the function that narrows a mask."""
