"""Forwards of a Llama-like decoder in our CPU kernels: one call for all layers.

They are used for the models of `known.py`, and only if their logits are the model's.

Letters in tensor names: B batch, T time, N nodes, S slots of the cache, K wanted nodes, D hidden, F
width of the chosen layers side by side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...heads.base import DraftHead
from ...heads.eagle3 import FusionLayer
from ...heads.layers.constants import counting
from ...heads.layers.decoder_layer import DecoderLayer
from ...heads.layers.draft_cache import KVEntries
from ..cache.kv_cache import StateShape, TreeCache
from ..targets.changes import WeightWatch
from ..targets.prompt_inputs import in_one_dimension
from ..targets.target_model import TargetModel
from ..trees.tree import NewNodes
from .base import Engine, TargetOutput
from .cpu_kernels import (
    PackedLinear,
    Weights,
    is_plain,
    kernels,
    kernels_name,
    library,
    linear,
    norm,
    pack,
    packed_copy,
    pointer,
)
from .known import SILU, KnownDecoder, agrees, known_decoder
from .masks import visible_slots

PIECE = 512
"""Tokens of a prompt that are read at once, as a chain of nodes."""
WHOLE = 32
"""Layer widths must be multiples of this: it is a multiple of every machine's vector width."""
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference of logits from the model's, relative to the largest logit: sums are taken in
another order."""
LlamaLayer = Any
"""A decoder layer of any class that has these parts, or a head's."""
INTEGER = ctypes.c_int64
POINTER = ctypes.c_void_p
DOUBLE = ctypes.c_double
LINEARS = ("query", "key", "value", "out", "gate", "up", "down")
"""Linear layers of a decoder layer, in the order of `Layer`."""


class Layer(ctypes.Structure):
    """`Layer` in cpu_kernels.cpp: one decoder layer's weights, and its tensors in a call."""

    _fields_ = (
        *((name, Weights) for name in LINEARS),
        *(
            (name, POINTER)
            for name in ("input_norm", "embed_norm", "post_norm", "query_norm", "key_norm")
        ),
        *((name, POINTER) for name in ("keys", "values", "seen", "feature")),
    )


class Call(ctypes.Structure):
    """`Call` in cpu_kernels.cpp: what all layers of a call share."""

    _fields_ = (
        # The model's dimensions: D, query heads, heads of keys, head size, width of the MLP.
        *((name, INTEGER) for name in ("hidden", "heads", "groups", "size", "inner")),
        # The call's: `slots` are attended to, of `capacity` allocated ones in a row of the cache.
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
        # 1. Dimensions, which are those of the first layer.
        first = layers[0].self_attn
        self.dtype = dtype
        self.size = int(first.head_dim)
        heads = first.q_proj.out_features // self.size
        self.groups = first.k_proj.out_features // self.size
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
            # 2. The weights of the layer's linear modules.
            attention = layer.self_attn
            for name, module in zip(LINEARS, _linears(layer), strict=True):
                packed = pack(module.weight, module.bias, rounded)
                self.kept.append(packed)
                setattr(struct, name, packed.struct)
            # 3. Norms. EAGLE-3's layer calls the norm of its state `hidden_norm`, and that of the
            # token's embedding `input_layernorm`; other layers read no embedding.
            fuses = hasattr(layer, "hidden_norm")
            struct.input_norm = self._vector(layer.hidden_norm if fuses else layer.input_layernorm)
            struct.embed_norm = self._vector(layer.input_layernorm) if fuses else None
            struct.post_norm = self._vector(layer.post_attention_layernorm)
            struct.query_norm = self._vector(getattr(attention, "q_norm", None))
            struct.key_norm = self._vector(getattr(attention, "k_norm", None))

    def _vector(self, module: Any) -> int | None:
        """Address of a float32 copy of a norm's weight; None for a module without a weight."""
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
        """Run all layers over new tokens, in place.

        Args:
            state_BND: the residual stream, float32 and contiguous; it becomes the last layer's
                output.
            rotary: cosines and sines [B, N, head size].
            caches: each layer's keys and values [B, groups, capacity, head size], whose rows are
                contiguous.
            slots_BN: the slots of the new tokens.
            seen_BNS: each layer's attention mask, bool; a token attends to itself, too.
            features: by layer number, tensors [B, N, D] that take the layer's output.
            embeds_BND: the embeddings that a first layer of EAGLE-3 reads, too.
        """
        # 1. The kernels read contiguous memory. The tensors must live until the call returns.
        batch, nodes, _ = state_BND.shape
        cosines, sines = (part.expand(batch, -1, -1).float().contiguous() for part in rotary)
        slots_BN = slots_BN.contiguous()
        seen = [mask_BNS.contiguous() for mask_BNS in seen_BNS]

        # 2. Caches may be views of the first slots of larger tensors [B, groups, room, size]: the
        # stride of a head tells how many slots are allocated.
        room = caches[0][0].stride(1) // self.size
        slots = seen[0].shape[2]
        strides = (self.groups * room * self.size, room * self.size, self.size, 1)
        assert cosines.shape == (batch, nodes, self.size)

        # 3. Each layer's pointers.
        for number, (struct, (keys, values)) in enumerate(zip(self.structs, caches, strict=True)):
            for states in (keys, values):
                assert states.shape[:2] == (batch, self.groups) and slots <= states.shape[2] <= room
                assert states.stride() == strides and states.dtype == self.dtype
            assert seen[number].shape == (batch, nodes, slots) and seen[number].dtype == torch.bool
            struct.keys = keys.data_ptr()
            struct.values = values.data_ptr()
            struct.seen = seen[number].data_ptr()
            struct.feature = pointer((features or {}).get(number))

        # 4. The call's sizes and pointers. Features of all layers lie side by side in one tensor,
        # so `feature_step`, from one node to the next, is the same for all.
        steps = {feature_BND.stride(1) for feature_BND in (features or {}).values()} or {0}
        assert len(steps) == 1
        call = self.call
        call.batch = batch
        call.nodes = nodes
        call.slots = slots
        call.capacity = room
        call.feature_step = steps.pop()
        call.threads = torch.get_num_threads()
        call.places = slots_BN.data_ptr()
        call.embeds = pointer(embeds_BND)
        call.state = state_BND.data_ptr()
        call.cosines = cosines.data_ptr()
        call.sines = sines.data_ptr()
        kernels().headstart_decoder(
            ctypes.byref(call), self.structs, len(self.structs), self.dtype == torch.bfloat16
        )


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

    def forward(self, *inputs: Any) -> Tensor:
        """Run the layer; arguments are those of `FusionLayer.forward` or `DecoderLayer.forward`."""
        embeds_BTD: Tensor | None = None
        layer = 0  # a fusion layer is its head's first
        if self.fuses:
            embeds_BTD, state_BTD, rotary, kv = inputs
        else:
            state_BTD, rotary, kv, layer = inputs
        assert isinstance(kv, KVEntries) and kv.mask_BTS is not None
        batch, new, _ = state_BTD.shape
        slots_BT = kv.slots_BT
        if slots_BT is None:  # the same in all rows: the slots from `first` on
            slots_BT = counting(new, state_BTD.device, kv.first).expand(batch, -1)
        # A copy, since the kernels write to it.
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
    # 8 bits are enough for drafts, which are verified anyway.
    packed = cast(DraftHead, packed_copy(head, block, rounded=True))
    if not is_packed(packed):
        return head
    # Parameters are shared with `head`, so the copy's version changes with its weights.
    watch = WeightWatch()
    cast(Any, packed).packed_from = (watch, watch.version(packed))
    return packed


def renew_packed(head: DraftHead, force: bool = False) -> None:
    """Repack the weights of a head that drafts in the kernels.

    This happens if the weights have changed, or with `force`.
    """
    if not is_packed(head):
        return
    watch, packed_version = cast(Any, head).packed_from
    version = watch.version(head)
    if force or version != packed_version:
        for module in head.modules():
            if isinstance(module, PackedLinear | PackedBlock):
                module.pack()
        cast(Any, head).packed_from = (watch, version)


def is_packed(head: DraftHead) -> bool:
    """Whether a head drafts in the kernels."""
    return any(isinstance(module, PackedLinear | PackedBlock) for module in head.modules())


class CpuEngine(Engine):
    """A decoder that runs as a whole in the kernels, with its weights in their shortest format.

    The kernels hold a copy of the weights, and of those of heads.
    """

    copies_weights = True
    features_are_free = True

    def __init__(self, target: TargetModel, known: KnownDecoder) -> None:
        """Pack the weights of a target's decoder."""
        super().__init__(target)
        self.name = kernels_name()
        self.embed = known.embed
        self.rotary = known.rotary
        self.kinds = known.kinds
        self.eps = float(known.norm.variance_epsilon)
        self.layers = PackedLayers(known.layers, self.eps, target.dtype)
        self.norm_D = known.norm.weight.detach().float().contiguous()
        self._lm_head = PackedLinear(known.lm_head)

    @property
    def state_shapes(self) -> list[StateShape]:
        layers = self.layers
        shape = StateShape(layers.groups, layers.size, layers.dtype, self.target.device)
        return [shape] * (2 * len(layers.structs))

    @property
    def lm_head(self) -> nn.Module:
        return self._lm_head

    def draft_head(self, head: DraftHead) -> DraftHead:
        return packed_head(head)

    def renew_head(self, head: DraftHead, force: bool = False) -> None:
        renew_packed(head, force)

    def logits(self, states: Tensor) -> Tensor:
        return linear(self._lm_head.packed, states, self.target.dtype == torch.bfloat16)

    def read_chunk(
        self,
        tokens_BT: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept: list[int],
    ) -> TargetOutput:
        # 1. The prompt in pieces, to limit memory. Where the rotary frequencies depend on the last
        # position of a forward (longrope), the whole prompt is one.
        size = tokens_BT.shape[1]
        segments = self.target.segments
        piece = size if segments is not None and segments.reads_whole(longest) else PIECE
        cache.reserve(size, max(longest - size, 0))

        # 2. Each piece is a chain of nodes after the tokens before it, committed at once.
        logits: list[Tensor] = []
        features: list[Tensor] = []
        for start, piece_BN in zip(
            range(0, size, piece), tokens_BT.split(piece, dim=1), strict=True
        ):
            nodes = piece_BN.shape[1]
            # Wanted tokens that lie in this piece: of kept = [100, 700] the second has [700 - 512].
            here_K = torch.tensor(
                [index - start for index in kept if start <= index < start + nodes]
            ).long()
            output = self.forward_nodes(
                NewNodes.of_chain(piece_BN), cache.prefilled, cache, layers, here_K
            )
            cache.advance_prompt(nodes)
            logits.append(output.logits_BNV)
            features.append(output.features_BNF)
        return TargetOutput(torch.cat(logits, dim=1), torch.cat(features, dim=1))

    def forward_nodes(
        self,
        nodes: NewNodes,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> TargetOutput:
        cache.reserve(nodes.tokens_BN.shape[1], longest, nodes.cached)
        positions_BN, visible = visible_slots(
            self.target, nodes, cache.lengths_B, cache.bucketed_length
        )
        # After a prompt with images, positions are not indices.
        rotary_BN = in_one_dimension(positions_BN, cache.position_offsets)
        return self.decode(nodes.tokens_BN, rotary_BN, visible, cache, layers, kept_K)

    def decode(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        seen: dict[str, Tensor],
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None,
    ) -> TargetOutput:
        """Run all layers over nodes, and the LM head over the nodes `kept_K`, or over all.

        The attention masks in `seen`, [B, N, S], are those of each kind of attention.
        """
        # 1. The residual stream in float32, rounded to bfloat16 where a bfloat16 model rounds.
        dtype = self.target.dtype
        rounds = dtype == torch.bfloat16
        state_BND = self.embed(tokens_BN).float().contiguous()
        rotary = self.rotary(state_BND.to(dtype), positions_BN)

        # 2. Run the layers, which write features to their parts of one tensor. For the layers
        # (2, 5, -1) and D = 4: layer 2 to [..., 0:4], layer 5 to [..., 4:8].
        width = state_BND.shape[-1]
        features_BNF = state_BND.new_empty(*tokens_BN.shape, width * len(layers))
        features: dict[int, Tensor] = {}
        for i, layer in enumerate(layers):
            if layer >= 0:
                features[layer] = features_BNF[..., i * width : (i + 1) * width]
        caches = list(zip(cache.keys, cache.values, strict=True))
        seen_of_layers = [seen[kind] for kind in self.kinds]
        self.layers(state_BND, rotary, caches, cache.slots_BN, seen_of_layers, features)

        # 3. Layer -1 is after the final norm.
        if -1 in layers:
            start = layers.index(-1) * width
            normed_BND = norm(state_BND, self.norm_D, self.eps, rounds)
            features_BNF[..., start : start + width] = normed_BND

        # 4. Logits of the wanted nodes alone: the LM head is the largest matrix.
        kept_BKD = (state_BND if kept_K is None else state_BND[:, kept_K]).contiguous()
        logits_BKV = self.logits(norm(kept_BKD, self.norm_D, self.eps, rounds))
        return TargetOutput(logits_BKV, features_BNF.to(dtype))


def cpu_engine(target: TargetModel) -> CpuEngine | None:
    """An engine whose logits are the model's; None for a model of another architecture."""
    # 1. Refuse what the kernels do not know, before any weight is packed.
    model = target.model
    known = known_decoder(model, target.layer_kinds)
    if known is None or model.dtype not in CLOSE:
        return None
    if not all(is_plain(weight) for weight in model.parameters()):
        return None
    if not all(_has_plain_linears(layer) and _fits(layer) for layer in known.layers):
        return None

    # 2. Pack, and try a short text: the same parts may be put together in another way.
    engine = CpuEngine(target, known)

    def forward(tokens_1N: Tensor, cache: TreeCache) -> tuple[Tensor, Tensor]:
        # Each token sees its own slot and all before it.
        seen_1NS = torch.arange(cache.bucketed_length) <= cache.slots_BN[..., None]
        seen = dict.fromkeys(known.kinds, seen_1NS)
        output = engine.decode(tokens_1N, cache.slots_BN, seen, cache, (), None)
        return output.logits_BNV, output.features_BNF

    return engine if agrees(model, engine.state_shapes, forward, CLOSE[model.dtype]) else None


def _linears(layer: LlamaLayer) -> list[Any]:
    """A layer's linear modules, in the order of `LINEARS`."""
    attention = layer.self_attn
    mlp = layer.mlp
    return [
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    ]


def _has_plain_linears(layer: LlamaLayer) -> bool:
    """Whether each linear module is a matrix with an optional bias, which the kernels can copy."""
    for module in _linears(layer):
        names = {name for name, _ in module.named_parameters()}
        if not {"weight"} <= names <= {"weight", "bias"}:
            return False
    return not any(True for _ in layer.buffers())  # such as a quantized layer's scales


def _fits(layer: LlamaLayer) -> bool:
    """Whether a layer's widths are multiples of the kernels' vectors on every machine."""
    attention = layer.self_attn
    size = attention.head_dim
    widths = (size, attention.o_proj.out_features, layer.mlp.up_proj.out_features)
    if any(width % WHOLE != 0 for width in widths):
        return False
    # Norms of queries and keys, if there are any, must be of single heads.
    for name in ("q_norm", "k_norm"):
        weight = getattr(getattr(attention, name, None), "weight", None)
        if weight is not None and weight.shape != (size,):
            return False
    return True
