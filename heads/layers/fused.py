"""Fused operations between the linear layers of a block: Triton kernels on CUDA, elsewhere torch's operations.

What they compute is said in fused_reference.py.
"""

from __future__ import annotations

from torch import Tensor

from . import fused_reference
from .fused_reference import Norm, Place, Projected
from .tree_slots import KERNEL_DTYPES

MOST_BEST = 16
"""Most of the best tokens of a node that a kernel finds, one after another."""


def add_norm(x_BND: Tensor, out_BND: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + out, or of x alone, and that sum."""
    if x_BND.is_cuda:
        from . import fused_kernels  # imports Triton

        return fused_kernels.add_norm(x_BND, out_BND, norm)
    return fused_reference.add_norm(x_BND, out_BND, norm)


def rotary_store(
    projected: Projected,
    rotary: tuple[Tensor, Tensor],
    place: Place,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Queries [B, H, N, E] after norm and rotary embedding; keys and values are stored.

    `rotary` holds cosines and sines [B, N, E], `norms` those of queries and keys.
    """
    if projected.query_BNX.is_cuda:
        from . import fused_kernels

        return fused_kernels.rotary_store(projected, rotary, place, norms)
    return fused_reference.rotary_store(projected, rotary, place, norms)


def silu_product(gate_BNI: Tensor, up_BNI: Tensor) -> Tensor:
    """silu(gate) * up."""
    if gate_BNI.is_cuda:
        from . import fused_kernels

        return fused_kernels.silu_product(gate_BNI, up_BNI)
    return fused_reference.silu_product(gate_BNI, up_BNI)


def top_log_probs(logits_BWV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` highest log-probabilities of each node, float32 at least, and their indices, [B, W, width].

    The values of a node are -inf where its logits hold NaN or inf. Which of equal ones come first is not said.
    """
    if logits_BWV.is_cuda and width <= MOST_BEST and logits_BWV.dtype in KERNEL_DTYPES["cuda"]:
        from . import fused_kernels

        return fused_kernels.top_log_probs(logits_BWV, width)
    return fused_reference.top_log_probs(logits_BWV, width)
