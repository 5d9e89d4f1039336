"""Forward of a Llama-like decoder over a tree in the CPU kernels: one call for all layers.

A packed decoder is used for the models of `known.py`, and only if its logits are the model's.

Letters in tensor names: B batch, N nodes, S slots of the cache, K wanted nodes, D hidden, F width
of the chosen layers side by side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...heads.base import DraftHead
from ...heads.eagle3 import FusionLayer
from ...heads.layers.constants import counting
from ...heads.layers.decoder_layer import DecoderLayer
from ...heads.layers.draft_cache import KVEntries
from ..cache.kv_cache import StateShape, TreeCache
from ..targets.changes import WeightWatch
from .cpu_kernels import (
    PackedLinear,
    Weights,
    is_plain,
    kernels,
    library,
    linear,
    norm,
    pack,
    packed_copy,
    pointer,
)
from .known import SILU, KnownDecoder, agrees, known_decoder

WHOLE = 32
"""Widths must be multiples of this."""
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Tolerance of logits relative to the largest: sums are taken in another order than by the
model."""
LlamaLayer = Any
"""A decoder layer of any class that has these parts, or a head's."""
INTEGER, POINTER, DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


LINEARS = ("query", "key", "value", "out", "gate", "up", "down")
"""Linear layers of a decoder layer, in the order of `Layer`."""


class Layer(ctypes.Structure):
    """`Layer` in cpu_kernels.cpp."""

    _fields_ = (
        *((name, Weights) for name in LINEARS),
        *(
            (name, POINTER)
            for name in ("input_norm", "embed_norm", "post_norm", "query_norm", "key_norm")
        ),
        *((name, POINTER) for name in ("keys", "values", "seen", "feature")),
    )


class Call(ctypes.Structure):
    """`Call` in cpu_kernels.cpp."""

    _fields_ = (
        *((name, INTEGER) for name in ("hidden", "heads", "groups", "size", "inner")),
        *(
            (name, INTEGER)
            for name in ("batch", "nodes", "slots", "capacity", "feature_step", "threads")
        ),
        *((name, DOUBLE) for name in ("eps", "scale")),
        *((name, INTEGER) for name in ("norm_before_residual", "finite")),
        *((name, POINTER) for name in ("places", "cosines", "sines", "embeds", "state")),
    )


class PackedLayers:
    """Decoder layers of one shape, and the call that runs them."""

    def __init__(
        self,
        layers: Sequence[LlamaLayer],
        eps: float,
        dtype: torch.dtype,
        rounded: bool = False,
        finite: bool = False,
    ) -> None:
        """Pack the weights of layers; the first may have a `hidden_norm`, as EAGLE-3's does.

        Values in the caches are rounded to `dtype`, float32 or bfloat16, and weights as in `pack`.
        With `finite`, NaN and inf enter the caches as 0, see `KVEntries.store`.
        """
        first, self.dtype = layers[0].self_attn, dtype
        self.size = int(first.head_dim)
        heads, self.groups = (
            part.out_features // self.size for part in (first.q_proj, first.k_proj)
        )
        self.call = Call(
            hidden=first.o_proj.out_features,
            heads=heads,
            groups=self.groups,
            size=self.size,
            inner=layers[0].mlp.up_proj.out_features,
            eps=eps,
            scale=getattr(first, "scaling", self.size**-0.5),
            norm_before_residual=getattr(layers[0], "norm_before_residual", False),
            finite=finite,
        )
        self.kept: list[Any] = []
        """Tensors to which the kernels hold pointers."""
        self.structs = (Layer * len(layers))()
        for struct, layer in zip(self.structs, layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
            linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            for name, module in zip(LINEARS, linears, strict=True):
                packed = pack(module.weight, module.bias, rounded)
                self.kept.append(packed)
                setattr(struct, name, packed.struct)
            fuses = hasattr(layer, "hidden_norm")
            struct.input_norm = self._vector(layer.hidden_norm if fuses else layer.input_layernorm)
            struct.embed_norm = self._vector(layer.input_layernorm) if fuses else None
            struct.post_norm = self._vector(layer.post_attention_layernorm)
            struct.query_norm, struct.key_norm = (
                self._vector(getattr(attention, f"{part}_norm", None)) for part in "qk"
            )

    def _vector(self, module: Any) -> int | None:
        if not hasattr(module, "weight"):
            return None
        vector = module.weight.detach().float().contiguous()
        self.kept.append(vector)
        return pointer(vector)

    def __call__(
        self,
        state_BND: Tensor,
        rotary: tuple[Tensor, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        slots_BN: Tensor,
        seen_BNS: Sequence[Tensor],
        features: dict[int, Tensor] | None = None,
        embeds_BND: Tensor | None = None,
    ) -> None:
        """Run all layers over new tokens, in place on `state_BND`, float32 and contiguous.

        `state_BND` becomes the last layer's output.

        `rotary` holds cosines and sines [B, N, head size], `caches` each layer's keys and values
        [B, groups, capacity, head size] with contiguous rows, `seen_BNS` its attention mask, bool,
        in which a token attends to itself, too. `features` are output tensors [B, N, D] by layer
        number; a first layer may read `embeds_BND` beside its state.
        """
        batch, nodes, _ = state_BND.shape
        cosines, sines = (part.expand(batch, -1, -1).float().contiguous() for part in rotary)
        slots_BN, seen = slots_BN.contiguous(), [each.contiguous() for each in seen_BNS]
        # the caches may be views
        room, slots = caches[0][0].stride(1) // self.size, seen[0].shape[2]
        whole = (self.groups * room * self.size, room * self.size, self.size, 1)
        assert cosines.shape == (batch, nodes, self.size)
        for number, (struct, (keys, values)) in enumerate(zip(self.structs, caches, strict=True)):
            for states in (keys, values):
                assert states.shape[:2] == (batch, self.groups) and slots <= states.shape[2] <= room
                assert states.stride() == whole and states.dtype == self.dtype
            assert seen[number].shape == (batch, nodes, slots) and seen[number].dtype == torch.bool
            struct.keys, struct.values, struct.seen = (
                keys.data_ptr(),
                values.data_ptr(),
                seen[number].data_ptr(),
            )
            struct.feature = pointer((features or {}).get(number))
        steps = {each.stride(1) for each in (features or {}).values()} or {0}
        assert len(steps) == 1
        call = self.call
        call.batch, call.nodes, call.slots, call.capacity = batch, nodes, slots, room
        call.feature_step, call.threads = steps.pop(), torch.get_num_threads()
        call.places, call.embeds, call.state = (
            slots_BN.data_ptr(),
            pointer(embeds_BND),
            state_BND.data_ptr(),
        )
        call.cosines, call.sines = cosines.data_ptr(), sines.data_ptr()
        kernels().headstart_decoder(
            ctypes.byref(call), self.structs, len(self.structs), self.dtype == torch.bfloat16
        )


class PackedDecoder:
    """Forward of a causal LM over nodes of a tree."""

    def __init__(self, known: KnownDecoder, dtype: torch.dtype) -> None:
        """Pack the weights of a decoder of this dtype."""
        self.embed = known.embed
        self.rotary = known.rotary
        self.kinds = known.kinds
        self.dtype = dtype
        self.eps = float(known.norm.variance_epsilon)
        self.layers = PackedLayers(known.layers, self.eps, dtype)
        self.norm_D = known.norm.weight.detach().float().contiguous()
        self.lm_head = PackedLinear(known.lm_head)
        shape = StateShape(self.layers.groups, self.layers.size, self.dtype, torch.device("cpu"))
        self.state_shapes = [shape] * (2 * len(self.layers.structs))

    def __call__(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        seen: dict[str, Tensor],
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, K, V], float32, of the nodes `kept_K`, or of all, and features [B, N, F].

        The attention masks in `seen`, [B, N, S], are those of each kind of attention.
        """
        rounds = self.dtype == torch.bfloat16
        state_BND = self.embed(tokens_BN).float().contiguous()
        rotary = self.rotary(state_BND.to(self.dtype), positions_BN)
        width = state_BND.shape[-1]
        features_BNF = state_BND.new_empty(*tokens_BN.shape, width * len(layers))
        wanted = {
            layer: features_BNF[..., i * width : (i + 1) * width]
            for i, layer in enumerate(layers)
            if layer >= 0
        }
        caches = list(zip(cache.keys, cache.values, strict=True))
        self.layers(
            state_BND, rotary, caches, cache.slots_BN, [seen[kind] for kind in self.kinds], wanted
        )
        if -1 in layers:
            place = layers.index(-1) * width
            features_BNF[..., place : place + width] = norm(
                state_BND, self.norm_D, self.eps, rounds
            )
        kept_BKD = (state_BND if kept_K is None else state_BND[:, kept_K]).contiguous()
        return self.logits(norm(kept_BKD, self.norm_D, self.eps, rounds)), features_BNF.to(
            self.dtype
        )

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., V], float32, of states [..., D] after the final norm."""
        return linear(self.lm_head.packed, states, self.dtype == torch.bfloat16)


class PackedBlock(nn.Module):
    """A decoder layer of a draft head, in the kernels."""

    def __init__(self, layer: DecoderLayer | FusionLayer) -> None:
        super().__init__()
        self.layer = layer
        self.dtype = layer.self_attn.q_proj.weight.dtype
        self.fuses = isinstance(layer, FusionLayer)
        self.pack()

    def pack(self) -> None:
        """Copy the layer's weights as they are now."""
        eps = self.layer.post_attention_layernorm.eps or 0.0
        self.layers = PackedLayers([self.layer], eps, self.dtype, rounded=True, finite=True)

    def forward(self, *given: Any) -> Tensor:
        """Run the layer; arguments are those of `FusionLayer.forward` or `DecoderLayer.forward`."""
        embeds_BTD, state_BTD, rotary, kv, layer = (*given, 0) if self.fuses else (None, *given)
        assert isinstance(kv, KVEntries) and kv.mask_BTS is not None
        batch, new, _ = state_BTD.shape
        slots_BT = kv.slots_BT
        if slots_BT is None:
            slots_BT = counting(new, state_BTD.device, kv.first).expand(batch, -1)
        out_BTD = state_BTD.float().clone(memory_format=torch.contiguous_format)
        embeds_BTD = None if embeds_BTD is None else embeds_BTD.float().contiguous()
        caches = [(kv.cache.keys[layer], kv.cache.values[layer])]
        self.layers(out_BTD, rotary, caches, slots_BT, [kv.mask_BTS], embeds_BND=embeds_BTD)
        return out_BTD.to(self.dtype)


def packed_head(head: DraftHead) -> DraftHead:
    """Return a copy of a head that drafts in the kernels, with 8-bit weights.

    Return the head itself where the kernels do not apply.
    """

    def block(module: nn.Module) -> nn.Module | None:
        if head.whole_layers and isinstance(module, DecoderLayer | FusionLayer) and _fits(module):
            return PackedBlock(module) if type(module.mlp.act) is SILU else None
        return None

    if library() is None or is_packed(head):
        return head
    packed = cast(DraftHead, packed_copy(head, block, rounded=True))
    if not is_packed(packed):
        return head
    watch = WeightWatch()
    cast(Any, packed).packed_from = watch, watch.version(packed)
    return packed


def renew_packed(head: DraftHead, force: bool = False) -> None:
    """Repack the weights of a head that drafts in the kernels.

    This happens if the weights have changed, or with `force`.
    """
    if not is_packed(head):
        return
    watch, before = cast(Any, head).packed_from
    version = watch.version(head)
    if force or version != before:
        for module in head.modules():
            if isinstance(module, PackedLinear | PackedBlock):
                module.pack()
        cast(Any, head).packed_from = watch, version


def is_packed(head: DraftHead) -> bool:
    """Whether a head drafts in the kernels."""
    return any(isinstance(module, PackedLinear | PackedBlock) for module in head.modules())


def packed_decoder(model: PreTrainedModel, kinds: Sequence[str]) -> PackedDecoder | None:
    """A packed decoder whose logits are the model's; None for a model of another architecture."""
    known = known_decoder(model, kinds)
    if known is None or model.dtype not in CLOSE:
        return None
    if not all(is_plain(weight) for weight in model.parameters()):
        return None
    if not all(_has_plain_linears(layer) and _fits(layer) for layer in known.layers):
        return None
    packed = PackedDecoder(known, model.dtype)

    def forward(tokens_1N: Tensor, cache: TreeCache) -> tuple[Tensor, Tensor]:
        seen_1NS = torch.arange(cache.bucketed_length) <= cache.slots_BN[..., None]
        return packed(
            tokens_1N, cache.slots_BN, dict.fromkeys(packed.kinds, seen_1NS), cache, (), None
        )

    return packed if agrees(model, packed.state_shapes, forward, CLOSE[model.dtype]) else None


def _has_plain_linears(layer: LlamaLayer) -> bool:
    """Whether each linear module is a matrix with an optional bias, which the kernels can copy."""
    attention = layer.self_attn
    mlp = layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    names = [{name for name, _ in linear.named_parameters()} for linear in linears]
    return all({"weight"} <= held <= {"weight", "bias"} for held in names) and not any(
        True for _ in layer.buffers()
    )


def _fits(layer: LlamaLayer) -> bool:
    """Whether a layer's widths are multiples of the kernels' vectors on every machine."""
    attention, size = layer.self_attn, layer.self_attn.head_dim
    widths = (size, attention.o_proj.out_features, layer.mlp.up_proj.out_features)
    norms = [getattr(getattr(attention, f"{part}_norm", None), "weight", None) for part in "qk"]
    return all(width % WHOLE == 0 for width in widths) and all(
        norm is None or norm.shape == (size,) for norm in norms
    )
