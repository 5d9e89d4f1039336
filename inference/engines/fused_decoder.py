"""A known decoder on a GPU: the model's own linear modules, with fused operations between them.

These are the operations of `heads.layers.fused`.

transformers' Llama layer launches 41 kernels for a forward over a few nodes, 34 of them small. Here
a layer takes 13:

    1      add_norm             the residual stream with the last layer's output, and its norm
    2-4    q_proj, k_proj, v_proj
    5      rotary_store         rotary embedding; keys and values into the cache
    6-7    attention            by the tree kernel: the parts of a text, and their sum
    8      o_proj
    9      add_norm
    10-11  gate_proj, up_proj
    12     silu_product
    13     down_proj

Weights are read where they lie and nothing is copied, so LoRA, quantised linear layers and weights
that change work as in the model. A draft head's decoder layers run in the same way.

Letters in tensor names: B batch, N nodes, K chosen nodes, H query heads, E head size, D hidden
size, F width of the chosen layers side by side, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...heads.base import DraftHead
from ...heads.eagle3 import FusionLayer
from ...heads.layers.constants import counting
from ...heads.layers.decoder_layer import DecoderLayer
from ...heads.layers.fused import add_norm, rotary_store, silu_product
from ...heads.layers.fused_reference import Norm, Place, Projected
from ...heads.layers.tree_attention import attend_to_slots
from ...heads.layers.tree_slots import has_tree_kernel
from ..cache.kv_cache import TreeCache
from ..targets.changes import has_hooks
from ..targets.target_model import TargetModel
from ..targets.twin import twin_of
from .attention import causal_attention
from .known import SILU, KnownDecoder, differs, known_decoder

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Attention [B, N, H, E] of queries [B, H, N, E] over a layer's keys and values, with the scale of
its scores."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference of logits from the model's, relative to the largest logit: sums are taken in
another order."""


@dataclass
class LayerStates:
    """In place of a KV cache, for a forward that keeps no states."""

    keys: list[Tensor]
    """Of each layer, [B, G, S, E]."""
    values: list[Tensor]
    slots_BN: Tensor
    """Slots of the new entries."""


class FusedDecoder:
    """Forward of a known decoder over the nodes of a tree."""

    def __init__(self, known: KnownDecoder) -> None:
        self.known = known

    def __call__(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        attend: dict[str, Attend],
        states: TreeCache | LayerStates,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the decoder over nodes, whose keys and values go to the `slots_BN` of `states`.

        Args:
            tokens_BN: the nodes' tokens.
            positions_BN: the nodes' positions.
            attend: the attention of each kind of layer.
            states: a KV cache, or what takes its place.
            layers: the feature layers to return.
            kept_K: the nodes whose logits are returned; None for all.

        Returns:
            Logits [B, K, V], and features [B, N, F].
        """
        known = self.known
        last = len(known.layers) - 1
        wanted = set(layers)
        features: dict[int, Tensor] = {}
        # `x` is the residual stream, and `out` the output of the latest attention or MLP, which the
        # next `add_norm` adds to it. Numbers are those of the kernels above.
        x_BND = known.embed(tokens_BN)
        rotary = known.rotary(x_BND, positions_BN)
        out_BND: Tensor | None = None
        for number, layer in enumerate(known.layers):
            # 1. Close the layer before: its residual stream is complete now.
            attention = layer.self_attn
            normed_BND, x_BND = add_norm(x_BND, out_BND, norm_of(layer.input_layernorm))
            if number - 1 in wanted:
                features[number - 1] = x_BND  # entry -1, of layer 0, is overwritten at the end

            # 2-5. Queries; keys and values go to the cache.
            keys_BGSE = states.keys[number]
            values_BGSE = states.values[number]
            place = Place(keys_BGSE, values_BGSE, states.slots_BN)
            query_BHNE = rotary_store(
                projected(attention, normed_BND), rotary, place, attention_norms(layer)
            )

            # 6-8. Attention.
            attended_BNHE = attend[known.kinds[number]](
                query_BHNE, keys_BGSE, values_BGSE, attention.scaling
            )
            out_BND = attention.o_proj(attended_BNHE.flatten(2))

            # 9-13. MLP.
            normed_BND, x_BND = add_norm(x_BND, out_BND, norm_of(layer.post_attention_layernorm))
            out_BND = mlp_output(layer.mlp, normed_BND)
        # The last block's residual stream, and the final norm, which is feature layer -1.
        normed_BND, x_BND = add_norm(x_BND, out_BND, norm_of(known.norm))
        features[last] = x_BND
        features[-1] = normed_BND
        logits_BKV = known.lm_head(normed_BND if kept_K is None else normed_BND[:, kept_K])
        if not layers:
            return logits_BKV, normed_BND[..., :0]  # features of width 0
        return logits_BKV, torch.cat([features[layer] for layer in layers], dim=-1)


class RowReader:
    """Reads whole rows without a cache.

    All layers write their keys and values to the same memory, one after another.
    """

    def __init__(self, target: TargetModel, known: KnownDecoder) -> None:
        self.decoder = FusedDecoder(known)
        self.groups = target.info.num_key_value_heads
        self.head_size = target.info.head_dim
        self.dtype = target.dtype

    def __call__(self, tokens_BT: Tensor, layers: tuple[int, ...]) -> Tensor:
        """Features [B, T, F] of right-padded rows, each of which holds one sequence."""
        batch, size = tokens_BT.shape
        device = tokens_BT.device
        shape = (batch, self.groups, size, self.head_size)
        keys_BGTE = torch.empty(shape, dtype=self.dtype, device=device)
        values_BGTE = torch.empty_like(keys_BGTE)
        kinds = self.decoder.known.kinds
        slots_BT = counting(size, device).expand(batch, -1)
        states = LayerStates([keys_BGTE] * len(kinds), [values_BGTE] * len(kinds), slots_BT)
        attend: dict[str, Attend] = dict.fromkeys(kinds, causally)
        none_K = torch.empty(0, dtype=torch.int64, device=device)
        _, features_BTF = self.decoder(tokens_BT, slots_BT, attend, states, layers, none_K)
        return features_BTF


def causally(
    query_BHTE: Tensor,
    keys_BGSE: Tensor,
    values_BGSE: Tensor,
    scale: float,
    slots: int | None = None,
) -> Tensor:
    """Causal attention of the last tokens of so many slots, by default all, [B, T, H, E]."""
    keys_BGSE = keys_BGSE[:, :, :slots]
    values_BGSE = values_BGSE[:, :, :slots]
    return causal_attention(query_BHTE, keys_BGSE, values_BGSE, scale).transpose(1, 2)


@torch.no_grad()
def row_reader(target: TargetModel) -> RowReader | None:
    """A reader of whole rows whose features are those of the target's model.

    None where the model's own code has to run: elsewhere than on a GPU, with hooks, with layers
    that are not known ones or see a part of the text.
    """
    model = target.model
    device = target.device
    spread = any(hasattr(module, "_hf_hook") for module in model.modules())
    if spread or not has_tree_kernel(device, target.dtype, target.info.head_dim):
        return None
    if target.attention_kinds != ("full_attention",) or has_hooks(model):
        return None
    known = known_decoder(model, target.layer_kinds)
    if known is None:
        return None
    # Tried on two rows, by the residual stream after every block (of the last one: normed).
    reader = RowReader(target, known)
    layers = (*range(target.info.num_layers - 1), -1)
    tokens_BT = (counting(26, device) * 37 % target.info.vocab_size).view(2, 13)
    expected = model(tokens_BT, use_cache=False, output_hidden_states=True).hidden_states[1:]
    expected_BTF = torch.cat([expected[layer] for layer in layers], dim=-1)
    if differs(reader(tokens_BT, layers), expected_BTF, TOLERANCE[target.dtype]):
        return None
    return reader


def side_by_side(device: torch.device, *calls: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    """Return the results of calls, as branches of the CUDA graph that is being recorded.

    The product of a small matrix and one vector ends before it has used the memory's full
    bandwidth. The projections to keys and values of an 8B model run at half of it by themselves,
    and at nearly all of it side by side with the projection to queries:

        main    fork --- q_proj ---------- join ---
                   |                        |
        side 0     +---- k_proj ------------+
        side 1     +---- v_proj ------------+

    Outside a recording they run in order.

    Memory that a branch frees is only reused by the same branch of a later fork. That fork comes
    after the join of this one, so nothing is overwritten early.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return tuple(call() for call in calls)
    # 1. Fork: side streams wait for all that the main stream has recorded so far.
    main = torch.cuda.current_stream(device)
    fork = main.record_event()
    results: list[Tensor] = []
    ends: list[torch.cuda.Event] = []
    for call, stream in zip(calls[1:], _side_streams(device, len(calls) - 1), strict=True):
        stream.wait_event(fork)
        with torch.cuda.stream(stream):
            results.append(call())
            ends.append(stream.record_event())

    # 2. The first call stays on the main stream.
    first = calls[0]()

    # 3. Join: the main stream waits for the side streams.
    for end in ends:
        main.wait_event(end)
    return first, *results


@cache
def _side_streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    """Streams on which branches are recorded; shared by all recordings, as their workspaces are."""
    return tuple(torch.cuda.Stream(device) for _ in range(count))


def projected(attention: Any, normed_BND: Tensor) -> Projected:
    """Queries, keys and values before their norms and rotary embedding."""
    return Projected(
        *side_by_side(
            normed_BND.device,
            partial(attention.q_proj, normed_BND),
            partial(attention.k_proj, normed_BND),
            partial(attention.v_proj, normed_BND),
        )
    )


def mlp_output(mlp: Any, normed_BND: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x))."""
    gate_BNI, up_BNI = side_by_side(
        normed_BND.device, partial(mlp.gate_proj, normed_BND), partial(mlp.up_proj, normed_BND)
    )
    return mlp.down_proj(silu_product(gate_BNI, up_BNI))


def norm_of(module: Any) -> Norm:
    """Weight and epsilon of an RMSNorm, transformers' or a head's."""
    epsilon = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(module.weight, epsilon)


def attention_norms(layer: Any) -> tuple[Norm, Norm] | None:
    """Norms of a layer's queries and keys, if it has any."""
    if isinstance(getattr(layer.self_attn, "q_norm", nn.Identity()), nn.Identity):
        return None
    return norm_of(layer.self_attn.q_norm), norm_of(layer.self_attn.k_norm)


class FusedBlock(nn.Module):
    """A decoder layer of a draft head, by fused operations; its parameters are the layer's own."""

    def __init__(self, layer: DecoderLayer | FusionLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any) -> Tensor:
        """Run the layer; arguments are those of `FusionLayer.forward` or `DecoderLayer.forward`."""
        layer = self.layer
        attention = layer.self_attn
        if isinstance(layer, FusionLayer):
            embeds_BTD, state_BTD, rotary, kv = inputs
            number = 0  # it is its head's first layer
        else:
            state_BTD, rotary, kv, number = inputs
        if kv.sees is None:  # attention by a mask, which the tree kernel does not take
            return layer(*inputs)

        # 1. What the attention reads. EAGLE-3's layer reads the token's embedding and the state
        #    side by side, 2 D wide; some heads' first layer has no input norm.
        residual_BTD = state_BTD
        if isinstance(layer, FusionLayer):
            normed_embeds_BTD, _ = add_norm(embeds_BTD, None, norm_of(layer.input_layernorm))
            normed_BTD, _ = add_norm(state_BTD, None, norm_of(layer.hidden_norm))
            if layer.norm_before_residual:
                residual_BTD = normed_BTD
            normed_BTD = torch.cat([normed_embeds_BTD, normed_BTD], dim=-1)
        elif isinstance(layer.input_layernorm, nn.Identity):
            normed_BTD = state_BTD
        else:
            normed_BTD, _ = add_norm(state_BTD, None, norm_of(layer.input_layernorm))

        # 2. Attention. New keys and values are stored with NaN and inf as 0.
        slots_BT = kv.slots_BT
        if slots_BT is None:  # the same in all rows: T slots from `first` on
            batch, new, _ = state_BTD.shape
            slots_BT = counting(new, state_BTD.device, kv.first).expand(batch, -1)
        keys_BGSE = kv.cache.keys[number]
        values_BGSE = kv.cache.values[number]
        place = Place(keys_BGSE, values_BGSE, slots_BT, finite=True)
        query_BHTE = rotary_store(
            projected(attention, normed_BTD), rotary, place, attention_norms(layer)
        )
        attended_BTHE = attend_to_slots(query_BHTE, keys_BGSE, values_BGSE, kv.sees)
        out_BTD = attention.o_proj(attended_BTHE.flatten(2))

        # 3. MLP.
        normed_BTD, x_BTD = add_norm(residual_BTD, out_BTD, norm_of(layer.post_attention_layernorm))
        return x_BTD + mlp_output(layer.mlp, normed_BTD)


def fused_head(head: DraftHead) -> DraftHead:
    """Return a head that shares all weights with `head` and runs its decoder layers fused.

    Layers that the fused operations do not fit run unchanged.
    """
    if not head.attends_by_slots or head.window is not None:
        return head
    return cast(DraftHead, twin_of(head, fused_block))


def fused_block(module: nn.Module) -> nn.Module | None:
    """The fused form of a decoder layer; None for any other module, which is copied."""
    if isinstance(module, FusedBlock):  # the head drafts here already
        return module
    if isinstance(module, DecoderLayer | FusionLayer) and type(module.mlp.act) is SILU:
        return FusedBlock(module)
    return None
