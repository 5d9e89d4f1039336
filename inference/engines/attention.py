"""Attention over a tree or a prompt chunk, in a copy of the model's modules.

Given a mask, transformers copies keys and values for every query head of their group, at every
layer of every round. Our attention does not copy them, and reads a prompt chunk causally without a
mask in memory. It is registered with transformers under a name of its own, which stands in the
copy's own config: the user's model, and every other model of the process, stay as they are.

    engine       TreeAttention    what each mask of ours stands for: slots, or causal attention
    its copy     module.tree_attention, and NAME in its config: transformers calls `attention`
    a forward    the model hands each layer the mask of its kind; a mask that is not one of ours (a
                 model made another tensor of it, or made its own) gets transformers' sdpa

Letters in tensor names: B batch, N queries, H query heads, G heads of keys and values, S slots, E
head size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...heads.layers.masked_attention import masked_attention
from ...heads.layers.tree_attention import attend_to_slots
from ...heads.layers.tree_slots import TreeSlots
from ..targets.twin import twin_of

BLOCK = 256
"""Queries of a prompt that share a mask."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention options of some layers: a bound on scores, a sink, a bias by distance."""
NAME = "headstart"
"""Name of our attention in transformers' registry."""


class TreeAttention:
    """The attention of an engine: what the masks that it made stand for."""

    def __init__(self) -> None:
        self._slots: MutableMapping[Tensor, TreeSlots | None] = WeakTensorKeyDictionary()
        """The slots that a mask without values stands for; None for all other masks."""
        self._asked: list[int] | None = None

    @contextmanager
    def asked_for(self) -> Iterator[list[int]]:
        """In the block, note which layers ask for attention by one of the masks.

        Yields a list to which each of them appends its query heads per head of keys.
        """
        asked: list[int] = []
        self._asked = asked
        try:
            yield asked
        finally:
            self._asked = None

    def attend_by(self, mask: Tensor) -> None:
        """Attend by an additive mask [B, 1, N, S], or [B, 1, H / G * N, S]: repeated by group."""
        self._slots[mask] = None

    def of_prompt(self, tokens: int, slots: int) -> Tensor:
        """Make a stand-in for the causal mask of the last `tokens` of `slots`."""
        # On "meta" a tensor has a shape and no memory: the model passes it on, and reads no values.
        mask = torch.empty(1, 1, tokens, slots, dtype=torch.float32, device="meta")
        self._slots[mask] = None
        return mask

    def of_tree(self, slots: TreeSlots) -> Tensor:
        """Make a stand-in for the mask of a tree's nodes, by which the tree kernel attends."""
        batch, nodes, uncommitted = slots.ancestors_BNM.shape
        mask = torch.empty(batch, 1, nodes, uncommitted, dtype=torch.float32, device="meta")
        self._slots[mask] = slots
        return mask

    def __call__(
        self,
        module: torch.nn.Module,
        query_BHNE: Tensor,
        key_BGSE: Tensor,
        value_BGSE: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend by a mask of ours, or else as transformers' sdpa: [B, N, H, E], and no weights.

        Slots beyond the mask are not read.

        Raises:
            ValueError: a layer needs an option that sdpa does not support either.
        """
        # 1. Not one of our masks: the model made its own, or changed ours.
        if attention_mask is None or attention_mask not in self._slots:
            return sdpa_attention_forward(
                module, query_BHNE, key_BGSE, value_BGSE, attention_mask, **options
            )
        if self._asked is not None:
            self._asked.append(query_BHNE.shape[1] // key_BGSE.shape[1])
        unsupported = [name for name in UNSUPPORTED if options.get(name) is not None]
        if unsupported:
            raise ValueError(
                f"{type(module).__name__} asks for {unsupported[0]}: load it with"
                " attn_implementation='eager'"
            )

        # 2. A tree by the kernel, a prompt causally, or a mask with values.
        scale = options.get("scaling")
        slots = self._slots[attention_mask]
        if slots is not None:
            return attend_to_slots(query_BHNE, key_BGSE, value_BGSE, slots, scale), None
        if attention_mask.is_meta:
            output_BHNE = causal_attention(query_BHNE, key_BGSE, value_BGSE, scale)
        else:
            covered = attention_mask.shape[-1]  # often fewer slots than the cache has
            key_BGSE = key_BGSE[:, :, :covered]
            value_BGSE = value_BGSE[:, :, :covered]
            output_BHNE = masked_attention(query_BHNE, key_BGSE, value_BGSE, attention_mask, scale)
        return output_BHNE.transpose(1, 2).contiguous(), None  # [B, N, H, E]


def attention(module: torch.nn.Module, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
    """Let a module of a copy attend as the copy's engine does."""
    attend: Any = module.tree_attention
    attended: tuple[Tensor, None] = attend(module, *arguments, **options)
    return attended


def attending_copy(model: nn.Module, attend: TreeAttention) -> nn.Module:
    """A copy of a model whose sdpa layers attend by `attend`; all weights are shared."""
    # Modules share configs: the memo of deepcopy makes one copy of each for all of them.
    memo: dict[int, Any] = {}
    twin = twin_of(model, lambda module: None)
    for module in twin.modules():
        vars(module)["tree_attention"] = attend
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            vars(module)["config"] = copy.deepcopy(config, memo)
    # Configs in configs, such as a text config, are in the memo, too.
    for copied in memo.values():
        if isinstance(copied, PreTrainedConfig) and copied._attn_implementation == "sdpa":
            copied._attn_implementation_internal = NAME
    return twin


def causal_attention(
    query_BHNE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, scale: float | None = None
) -> Tensor:
    """Causal attention of the last N of S tokens, [B, H, N, E]."""
    queries = query_BHNE.shape[2]
    slots = key_BGSE.shape[2]
    grouped = query_BHNE.shape[1] != key_BGSE.shape[1]
    # The first chunk of a prompt. For later ones torch's `is_causal` would align the wrong corner:
    # query 0 would see key 0 alone.
    if queries == slots:
        return F.scaled_dot_product_attention(
            query_BHNE, key_BGSE, value_BGSE, is_causal=True, scale=scale, enable_gqa=grouped
        )
    # Flash attention needs no mask; on CUDA it takes 16-bit numbers only.
    if query_BHNE.is_cuda and query_BHNE.dtype in (torch.float16, torch.bfloat16):
        return F.scaled_dot_product_attention(
            query_BHNE,
            key_BGSE,
            value_BGSE,
            causal_lower_right(queries, slots),
            scale=scale,
            enable_gqa=grouped,
        )
    # Block by block of queries, each of which reads only the keys that it needs. A block's mask
    # begins at an address of its own: kernels on CUDA require a multiple of 16 bytes, and a slice
    # of a larger mask begins anywhere.
    outputs = []
    for first in range(0, queries, BLOCK):
        block = query_BHNE[:, :, first : first + BLOCK]
        rows = block.shape[2]
        # Query n sees keys 0 to slots - queries + n. With 3 of 5 slots in one block, stop = 5:
        #     1 1 1 0 0
        #     1 1 1 1 0
        #     1 1 1 1 1
        stop = slots - queries + first + rows
        mask = torch.ones(rows, stop, dtype=torch.bool, device=block.device).tril_(stop - rows)
        outputs.append(
            F.scaled_dot_product_attention(
                block,
                key_BGSE[:, :, :stop],
                value_BGSE[:, :, :stop],
                mask,
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, dim=2)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
