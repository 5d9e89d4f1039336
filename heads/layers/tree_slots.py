"""Slots of a cache that the nodes of a tree attend to, in the place of a mask over all of them.

Letters in tensor names: B batch, H query heads, G heads of keys and values, N new nodes, M
uncommitted nodes, S slots, E head size.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from .constants import constants

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
