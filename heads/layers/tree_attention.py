"""Tree attention over a cache: by the tree kernel on CUDA, by an equivalent mask elsewhere.

Letters in tensor names: B batch, H query heads, G heads of keys and values, N new nodes, S slots, E
head size.
"""

from __future__ import annotations

from torch import Tensor

from .tree_slots import TreeSlots, attend_to_slots_reference


def attend_to_slots(
    query_BHNE: Tensor,
    key_BGSE: Tensor,
    value_BGSE: Tensor,
    slots: TreeSlots,
    scale: float | None = None,
) -> Tensor:
    """Attention of new nodes over a cache, [B, N, H, E]; on CUDA by the tree kernel.

    `scale` is that of the scores; None for 1 / sqrt(E).
    """
    if query_BHNE.is_cuda:
        from .tree_kernel import tree_attention  # imports Triton

        return tree_attention(query_BHNE, key_BGSE, value_BGSE, slots, scale)
    return attend_to_slots_reference(query_BHNE, key_BGSE, value_BGSE, slots, scale)
