"""Tree attention over a cache: by the tree kernel on CUDA, by an equivalent mask elsewhere.

Letters in tensor names: B batch, H query heads, G heads of keys and values, N new nodes, S slots, E
head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .constants import counting
from .masked_attention import masked_attention
from .tree_slots import TreeSlots


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
