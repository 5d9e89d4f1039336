"""Slots of a cache that the nodes of a tree attend to, in the place of a mask over all of them.

Letters in tensor names: B batch, H query heads, G heads of keys and values, N new nodes, M
uncommitted nodes, S slots, E head size.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from .constants import constants, counting
from .masked_attention import masked_attention

LARGEST_HEAD = 256
"""Largest head size that the tree kernel takes: a program holds the sums of its rows in
registers."""
KERNEL_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "cuda": (torch.float16, torch.bfloat16, torch.float32)
}
"""What the tree kernel computes in, by type of device."""


@dataclass(frozen=True)
class TreeSlots:
    """Slots that the last N of M uncommitted nodes see: committed tokens, their own path."""

    ancestors_BNM: Tensor
    """Bool, or bytes that are 0 where a new node does not attend to an uncommitted one."""
    lengths_B: Tensor
    """Committed tokens of each row."""
    depths_BM: Tensor | None = None
    """Distance of each uncommitted node from the root; only a window asks for it."""
    window: int | None = None
    """Newest positions that a node sees, its own included; None for all."""
    text_slot: int = 0
    """Slot of a row's first committed token."""
    node_slot: int | None = None
    """Slot of the first uncommitted node; None where the nodes follow each row's committed
    tokens."""


@constants
def seen_in_chain(tokens: int, device: torch.device) -> Tensor:
    """Which tokens of a chain each of them sees: itself and those before it, bool [1, N, N]."""
    return torch.ones(1, tokens, tokens, dtype=torch.bool, device=device).tril()


def has_tree_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether the tree kernel serves such tensors here."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return False
    return dtype in KERNEL_DTYPES.get(device.type, ()) and head_size <= LARGEST_HEAD


def attend_to_slots_reference(
    query_BHNE: Tensor,
    key_BGSE: Tensor,
    value_BGSE: Tensor,
    slots: TreeSlots,
    scale: float | None = None,
) -> Tensor:
    """`attend_to_slots` by a mask over all slots."""
    uncommitted = slots.ancestors_BNM.shape[2]
    slot_S = counting(key_BGSE.shape[2], query_BHNE.device)
    lengths_B1 = slots.lengths_B[:, None]

    # 1. Which committed token, and which node, lies in each slot. With text from slot 0, 3 tokens
    #    and 2 nodes after them, slots 0 to 5 hold tokens [0, 1, 2, 3, 4, 5], of which 0 to 2 exist,
    #    and nodes [-3, -2, -1, 0, 1, 2], of which 0 and 1 exist.
    token_BS = (slot_S - slots.text_slot).expand(len(lengths_B1), -1)
    first_slot_B1 = slots.text_slot + lengths_B1 if slots.node_slot is None else slots.node_slot
    node_BS = (slot_S - first_slot_B1).expand(len(lengths_B1), -1)
    is_token_BS = (token_BS >= 0) & (token_BS < lengths_B1)
    is_node_BS = (node_BS >= 0) & (node_BS < uncommitted)

    # 2. A new node sees all committed tokens, and a node where `ancestors` says so: [B, N, M]
    #    becomes [B, N, S].
    node_BS = node_BS.clamp(0, uncommitted - 1)
    column_BNS = node_BS[:, None].expand(-1, slots.ancestors_BNM.shape[1], -1)
    on_path_BNS = slots.ancestors_BNM.bool().gather(2, column_BNS) & is_node_BS[:, None]
    sees_BNS = is_token_BS[:, None] | on_path_BNS

    # 3. Of those, with a window, the newest positions. A node's position is its depth after the
    #    committed tokens.
    if slots.window is not None:
        assert slots.depths_BM is not None
        position_BS = torch.where(
            is_node_BS, lengths_B1 + slots.depths_BM.gather(1, node_BS), token_BS
        )
        query_position_BN = lengths_B1 + slots.depths_BM[:, uncommitted - query_BHNE.shape[2] :]
        in_window_BNS = position_BS[:, None] > query_position_BN[..., None] - slots.window
        sees_BNS = sees_BNS & in_window_BNS
    output_BHNE = masked_attention(query_BHNE, key_BGSE, value_BGSE, sees_BNS[:, None], scale)
    return output_BHNE.transpose(1, 2).contiguous()


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on a CUDA device."""
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])
