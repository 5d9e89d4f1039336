"""Fused operations between a block's linear layers: Triton kernels on CUDA, torch elsewhere.

fused_reference.py says what they compute.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from . import fused_reference
from .fused_reference import Norm, Place, Projected
from .tree_slots import KERNEL_DTYPES

MOST_BEST = 16
"""Most of the best tokens of a node that a kernel finds, one after another."""


def add_norm(x_BND: Tensor, out_BND: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """`fused_reference.add_norm`."""
    return _operations(x_BND).add_norm(x_BND, out_BND, norm)


def rotary_store(
    projected: Projected,
    rotary: tuple[Tensor, Tensor],
    place: Place,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """`fused_reference.rotary_store`."""
    return _operations(projected.query_BNX).rotary_store(projected, rotary, place, norms)


def silu_product(gate_BNI: Tensor, up_BNI: Tensor) -> Tensor:
    """`fused_reference.silu_product`."""
    return _operations(gate_BNI).silu_product(gate_BNI, up_BNI)


def top_log_probs(logits_BWV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`fused_reference.top_log_probs`."""
    # The kernel finds one best token after another, and has no float64.
    fits = width <= MOST_BEST and logits_BWV.dtype in KERNEL_DTYPES["cuda"]
    operations = _operations(logits_BWV) if fits else fused_reference
    return operations.top_log_probs(logits_BWV, width)


def _operations(tensor: Tensor) -> ModuleType:
    """The module whose functions compute with such a tensor."""
    if not tensor.is_cuda:
        return fused_reference
    from . import fused_kernels  # imports Triton

    return fused_kernels
