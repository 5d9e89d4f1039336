"""Blocks that two or more heads share: rotary attention over a memory, the gated MLP, the draft's own KV cache.

A head runs the same layers while training and while decoding; what differs is the memory that its attention reads:
`TrainingTimeTest` for whole sequences, `DraftCache` for one round after the other.

Letters in tensor names: B batch, T time, H heads, G key-value heads, E head size, S slots, L layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ..base import BatchCache, TargetInfo, at_least_fp32
from .attention import masked_attention
from .training_time_test import PackedTexts, attend_step

STEP = 64
"""Slots of a cache by which what is looked at grows where a forward's shape may change from round to round."""


def rounded(slots: int, step: int) -> int:
    """The smallest number of whole steps that holds `slots`."""
    return -(-slots // step) * step


@dataclass(frozen=True)
class LayerShape:
    """Dimensions of a decoder layer, by the names of a Llama config."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    qk_norm: bool
    """RMSNorm on each head's queries and keys, as in Qwen3."""

    @classmethod
    def of(cls, target: TargetInfo, own: Any = None) -> LayerShape:
        """The target's dimensions, but for those that a head's config gives, and no norms of queries and keys."""
        names = [key.name for key in fields(cls) if key.name != "qk_norm"]
        chosen = {name: getattr(own, name, None) or getattr(target, name) for name in names}
        return cls(**chosen, qk_norm=getattr(own, "qk_norm", False))

    def __post_init__(self) -> None:
        """Refuse dimensions that do not fit each other."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class KVView(Protocol):
    """What a layer's attention reads: earlier positions, kept in whatever way."""

    def attend(self, layer: int, query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor) -> Tensor:
        """Take in new keys and values, and return what the queries find: [B, H, T, E], if all are answered."""

    def answered(self, layer: int, states_BTD: Tensor) -> Tensor:
        """Of a layer's input, the positions whose queries `attend` answers."""


class RMSNorm(nn.RMSNorm):
    """In the states' own format, which the fused kernels need: under autocast they differ from the weight's."""

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Rotary(nn.Module):
    """The target's own rotary embedding, its scaling included, or another; it has no weights and nothing to save."""

    def __init__(self, target: TargetInfo, head_dim: int, other: dict[str, Any] | None = None) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=target.max_positions,
            rope_parameters=dict(other or target.rope_parameters),
        )
        # Not a submodule: its frequencies are computed, must stay float32, and are no part of a checkpoint.
        self._embedding = [LlamaRotaryEmbedding(config)]

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, E] of positions."""
        embedding = self._embedding[0]
        if embedding.inv_freq.device != positions_BT.device:
            embedding.to(positions_BT.device)
        cos, sin = embedding(torch.empty(0, dtype=dtype, device=positions_BT.device), positions_BT)
        return cos, sin


class Attention(nn.Module):
    """Grouped-query attention with Llama's parameter names."""

    def __init__(self, shape: LayerShape, input_size: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps) if shape.qk_norm else nn.Identity()

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], memory: KVView, layer: int) -> Tensor:
        """States [B, T, D] to what attention adds to those of them that `memory` answers."""

        def split(states_BTX: Tensor) -> Tensor:
            return states_BTX.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query, key = self.q_norm(split(self.q_proj(x_BTD))), self.k_norm(split(self.k_proj(x_BTD)))
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        found_BHTE = memory.attend(layer, query, key, split(self.v_proj(x_BTD)))
        mixed: Tensor = self.o_proj(found_BHTE.transpose(1, 2).flatten(2))
        return mixed


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with Llama's parameter names."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.act = ACT2FN[shape.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        mixed: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class DecoderLayer(nn.Module):
    """A Llama layer; without its input norm where its input is no residual stream (EAGLE-1)."""

    def __init__(self, shape: LayerShape, input_norm: bool = True) -> None:
        super().__init__()
        norm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.input_layernorm = norm if input_norm else nn.Identity()
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = GatedMLP(shape)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], memory: KVView, layer: int) -> Tensor:
        """The residual stream before the layer, and after it at the positions that `memory` answers."""
        found_BTD = self.self_attn(self.input_layernorm(x_BTD), rotary, memory, layer)
        x_BTD = memory.answered(layer, x_BTD) + found_BTD
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class TrainingTimeTest:
    """Attention over whole sequences while a head feeds on its own outputs (EAGLE-3, arXiv:2503.01840, section 3.2).

    At step 0, position t reads true features and attends causally. At step s, position t stands for position t + s,
    reached from t by s drafts: it attends to step 0 up to t, and to its own earlier drafts, one key a step.

    Where only the drafts of some positions are judged, the anchors, nothing else is computed at the other positions
    than what anchors attend to: step 0 up to the keys and values of the last layer.
    """

    def __init__(self, num_layers: int, sequences_BT: Tensor | None = None, anchors_N: Tensor | None = None) -> None:
        """Begin at step 0.

        Args:
            num_layers: of the head.
            sequences_BT: of packed rows: which sequence each token is of; it sees no other.
            anchors_N: of the flattened [B * T] positions, those whose drafts are judged; None for all. Step 0 takes
                states [B, T, D] and gives [1, N, D], which the later steps take and give.
        """
        self.texts = PackedTexts(sequences_BT)
        self.anchors_N = anchors_N
        self._steps: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(num_layers)]

    def at(self, step: int) -> KVView:
        """The memory of one step, which may be run again when its activations are recomputed."""
        return _Step(self, step)

    def judged(self, states_BT: Tensor) -> Tensor:
        """Of [B, T, ...] the anchors, [1, N, ...]."""
        return states_BT if self.anchors_N is None else states_BT.flatten(0, 1)[self.anchors_N][None]

    def spread(self, states_1XNE: Tensor, like_BXTE: Tensor) -> Tensor:
        """The anchors' states at their places among all, [B, X, T, E], and zeros elsewhere."""
        if self.anchors_N is None:
            return states_1XNE
        batch, _, time, size = like_BXTE.shape
        whole = states_1XNE.new_zeros(batch * time, states_1XNE.shape[1], size)
        whole = whole.index_copy(0, self.anchors_N, states_1XNE[0].transpose(0, 1))
        return whole.unflatten(0, (batch, time)).transpose(1, 2)


@dataclass(frozen=True)
class _Step:
    test: TrainingTimeTest
    step: int

    def attend(self, layer: int, query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor) -> Tensor:
        """See `KVView.attend`."""
        test, steps = self.test, self.test._steps[layer]
        if self.step > 0:
            like = steps[0][0]
            query_BHTE, key_BGTE, value_BGTE = (test.spread(s, like) for s in (query_BHTE, key_BGTE, value_BGTE))
        steps[self.step] = key_BGTE, value_BGTE
        keys, values = zip(*(steps[i] for i in range(self.step + 1)), strict=True)
        found_BHTE = attend_step(query_BHTE, keys, values, test.texts)
        if self.step == 0 and layer < len(test._steps) - 1:
            return found_BHTE  # the next layer wants keys and values of all
        return test.judged(found_BHTE.transpose(1, 2)).transpose(1, 2)

    def answered(self, layer: int, states_BTD: Tensor) -> Tensor:
        """See `KVView.answered`."""
        narrows = self.step == 0 and layer == len(self.test._steps) - 1
        return self.test.judged(states_BTD) if narrows else states_BTD


def counting(size: int, device: torch.device, first: int = 0) -> Tensor:
    """`size` numbers from `first` on, made once: asking an accelerator for so little takes longer than its work."""
    if torch.compiler.is_compiling():  # a graph holds it by itself
        return torch.arange(first, first + size, device=device)
    return _counting(size, device, first, torch.is_inference_mode_enabled())[0]


@lru_cache(maxsize=256)
def _counting(size: int, device: torch.device, first: int, inference: bool) -> tuple[Tensor, Tensor]:
    """Numbers as a row and as a column, for use in inference mode or outside.

    A tensor that is made in one of them is not fit for all of the other.
    """
    numbers = torch.arange(first, first + size, device=device)
    return numbers, numbers[:, None]


def row_numbers(slots_BT: Tensor) -> Tensor:
    """The row of every entry, as an index beside `slots_BT`: [B, 1]."""
    if torch.compiler.is_compiling():
        return torch.arange(len(slots_BT), device=slots_BT.device)[:, None]
    return _counting(len(slots_BT), slots_BT.device, 0, torch.is_inference_mode_enabled())[1]


def write_slots(kept_BGSE: Tensor, slots_BT: Tensor, new_BGTE: Tensor) -> None:
    """Put new entries into each row's slots, in place; `scatter_` would copy all that is kept on the CPU."""
    kept_BGSE.transpose(1, 2)[row_numbers(slots_BT), slots_BT] = new_BGTE.transpose(1, 2)


class DraftCache:
    """A head's preallocated keys and values of one `generate` call.

    The first `nodes` slots hold the nodes of the round's tree in the order of their expansion, the rest the committed
    tokens of each row. A forward's memory says where its entries go and what they may see; the cache keeps no other
    state, so that guesses are forgotten by being overwritten.
    """

    def __init__(self, num_layers: int, batch_size: int, nodes: int, capacity: int) -> None:
        self.num_layers, self.batch_size, self.nodes = num_layers, batch_size, nodes
        self.capacity = nodes + capacity
        self.shown: int | None = None
        """Committed tokens of each row that forwards look at, at most; None for as many as there is room for."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def slots(self) -> int:
        """All slots; as soon as there are any the size of a tensor, which a compiled graph takes as a symbol."""
        return self.keys[0].shape[2] if self.keys else self.capacity

    @property
    def looked_at(self) -> int:
        """Slots, from the first on, that forwards look at."""
        return self.slots if self.shown is None else min(self.slots, self.nodes + self.shown)

    def show(self, tokens: int) -> None:
        """Look at no more than so many committed tokens of each row: it holds no more, whatever there is room for."""
        self.shown = rounded(tokens, STEP)

    def select(self, rows_R: Tensor) -> DraftCache:
        """A cache of these rows only."""
        chosen = DraftCache(self.num_layers, len(rows_R), self.nodes, self.capacity - self.nodes)
        chosen.keys = [states[rows_R] for states in self.keys]
        chosen.values = [states[rows_R] for states in self.values]
        chosen.shown = self.shown
        return chosen

    def replace(self, rows_R: Tensor, other: BatchCache) -> None:
        """Put the rows of a cache of the same size in the places of these."""
        assert isinstance(other, DraftCache) and other.capacity == self.capacity
        for states, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            states[rows_R] = theirs

    def resized(self, capacity: int) -> DraftCache:
        """With room for so many committed tokens, and what it holds."""
        more = self.nodes + capacity - self.capacity
        if more <= 0:
            return self
        grown = DraftCache(self.num_layers, self.batch_size, self.nodes, capacity)
        grown.shown = self.shown
        grown.keys = [F.pad(states, (0, 0, 0, more)) for states in self.keys]
        grown.values = [F.pad(states, (0, 0, 0, more)) for states in self.values]
        return grown

    def sizes(self) -> list[tuple[Tensor, int]]:
        """Rows and slots."""
        return [(states, dimension) for states in (*self.keys, *self.values) for dimension in (0, 2)]

    def commit(self, lengths_B: Tensor, new_tokens: int) -> KVView:
        """The next entries go behind each row's `lengths_B` committed tokens; they see these and each other."""
        slots_S = torch.arange(self.looked_at, device=lengths_B.device)
        slots_BT = self.nodes + lengths_B[:, None] + torch.arange(new_tokens, device=lengths_B.device)
        # What a short prompt's row is given behind its end is forgotten; it only must not lie outside.
        slots_BT = slots_BT.clamp(max=self.slots - 1)
        return KVEntries(self, (slots_S >= self.nodes) & (slots_S <= slots_BT[..., None]), slots_BT=slots_BT)

    def draft(self, lengths_B: Tensor, first: int, seen_BWN: Tensor) -> KVView:
        """The next entries go to the nodes' slots from `first` on; they see the committed tokens and `seen_BWN`."""
        slots_S = torch.arange(self.looked_at - self.nodes, device=lengths_B.device)
        committed_BWS = (slots_S < lengths_B[:, None])[:, None].expand(-1, seen_BWN.shape[1], -1)
        return KVEntries(self, torch.cat([seen_BWN, committed_BWS], dim=-1), first=first)


@dataclass(frozen=True)
class KVEntries:
    """The memory of one forward."""

    cache: DraftCache
    visible_BTS: Tensor
    slots_BT: Tensor | None = None
    """Where the entries go; None for as many slots from `first` on."""
    first: int = 0

    def attend(self, layer: int, query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor) -> Tensor:
        """See `KVView.attend`."""
        keys, values = self.of_layer(layer, key_BGTE)
        for states, new in ((keys, key_BGTE), (values, value_BGTE)):
            if self.slots_BT is None:
                states[:, :, self.first : self.first + new.shape[2]] = new
            else:
                write_slots(states, self.slots_BT, new)
        looked_at = self.visible_BTS.shape[-1]
        return masked_attention(query_BHTE, keys[:, :, :looked_at], values[:, :, :looked_at], self.visible_BTS[:, None])

    def answered(self, layer: int, states_BTD: Tensor) -> Tensor:
        """See `KVView.answered`: all."""
        return states_BTD

    def of_layer(self, layer: int, like_BGTE: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [B, G, S, E], made at its first forward."""
        for states in (self.cache.keys, self.cache.values):
            if layer == len(states):
                batch, groups, _, size = like_BGTE.shape
                states.append(like_BGTE.new_zeros(batch, groups, self.cache.capacity, size))
        return self.cache.keys[layer], self.cache.values[layer]

    def places_BT(self) -> Tensor:
        """The slots that the entries go to."""
        if self.slots_BT is not None:
            return self.slots_BT
        batch, new, _ = self.visible_BTS.shape
        return torch.arange(self.first, self.first + new, device=self.visible_BTS.device).expand(batch, -1)


def llama_config(
    shape: LayerShape, num_layers: int, target: TargetInfo, other_rope: dict[str, Any] | None
) -> dict[str, Any]:
    """The keys by which a server reads a head whose layers are those of a Llama; rotary parameters old and new."""
    rope = other_rope or target.rope_parameters
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": shape.rms_norm_eps,
        "num_hidden_layers": num_layers,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": target.max_positions,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
    }


@torch.no_grad()
def norm_gain(norm: nn.Module, size: int) -> Tensor | None:
    """The gain g of an RMSNorm g x / rms(x), however a model keeps it (Gemma's weight is g - 1); else None."""
    weights = {name: _whole(weight) for name, weight in norm.named_parameters()}
    if len(weights) != 1:
        return None
    (weight,) = weights.values()

    def normed(x_D: Tensor) -> Tensor:
        return functional_call(norm, weights, (x_D.to(weight)[None],))[0]

    gain_D = normed(torch.full((size,), 1024.0))  # so large that what is added to the variance is nothing
    x_D = torch.linspace(-1024, 2048, size)  # of which the mean is not 0, as a LayerNorm would make it
    expected_D = at_least_fp32(gain_D) * (x_D / x_D.square().mean().sqrt()).to(gain_D.device)
    return gain_D if torch.allclose(at_least_fp32(normed(x_D)), expected_D, rtol=2e-2, atol=1e-3) else None


def required_gain(norm: nn.Module, target: TargetInfo, head: str) -> Tensor:
    """As `norm_gain`, for a head that starts from a target's layers.

    Raises:
        ValueError: the norm is no RMSNorm.
    """
    gain_D = norm_gain(norm, target.hidden_size)
    if gain_D is None:
        raise ValueError(f"{head} cannot start from {target.name!r}: its norm is no RMSNorm; choose start: random")
    return gain_D


@torch.no_grad()
def target_layer_weights(blocks: Sequence[nn.Module], layer: int, target: TargetInfo, head: str) -> dict[str, Tensor]:
    """One of the target's blocks as weights of a `DecoderLayer`, for a head that starts from it.

    The layer is compared with the block on a few states: what computes in another way is refused, not approximated.

    Raises:
        ValueError: a block that is not there, or that is no Llama layer; with the reason.
    """
    if not -len(blocks) <= layer < len(blocks):
        raise ValueError(f"{head} cannot start from block {layer}: the target has {len(blocks)}; choose from 0")
    block = blocks[layer]
    where = f"{head} cannot start from block {layer} of {target.name!r}, a {type(block).__name__}"
    weights = {name: _whole(tensor.detach()) for name, tensor in block.state_dict().items()}
    ours = DecoderLayer(replace(LayerShape.of(target), qk_norm="self_attn.q_norm.weight" in weights))
    for name in sorted(ours.state_dict().keys() ^ weights.keys()):
        what = "has, unlike a Llama layer," if name in weights else "lacks"
        raise ValueError(f"{where}, which {what} {name!r}; choose start: random")
    for name, module in ours.named_modules():
        if isinstance(module, RMSNorm):
            gain = norm_gain(block.get_submodule(name), len(weights[f"{name}.weight"]))
            if gain is None:
                raise ValueError(f"{where}, whose {name} is no RMSNorm; choose start: random")
            weights[f"{name}.weight"] = gain
    ours = ours.to(weights["mlp.up_proj.weight"])
    start_layer(ours, weights, f"block {layer}", head)
    if not _alike(ours, block, target):
        raise ValueError(f"{where}, which computes something else than a Llama layer; choose start: random")
    return weights


def _whole(tensor: Tensor) -> Tensor:
    """All of a weight, of which this process may hold a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _alike(ours: DecoderLayer, block: nn.Module, target: TargetInfo) -> bool:
    """Whether a layer and a target's block answer a short text alike."""
    weight = ours.mlp.up_proj.weight
    flex = getattr(getattr(block.self_attn, "config", None), "_attn_implementation", "") == "flex_attention"
    time = 1 if flex else 4  # which takes no such mask
    x_1TD = torch.randn(1, time, target.hidden_size, generator=torch.Generator().manual_seed(0)).to(weight)
    places_1T = torch.arange(time, device=weight.device)[None]
    rotary = Rotary(target, target.head_dim)(places_1T, weight.dtype)
    hidden_TT = torch.ones(time, time, dtype=torch.bool, device=weight.device).triu(1)
    mask_11TT = torch.zeros_like(hidden_TT, dtype=weight.dtype).masked_fill(hidden_TT, torch.finfo(weight.dtype).min)
    try:
        found = block(
            x_1TD,
            position_embeddings=rotary,
            attention_mask=None if flex else mask_11TT[None, None],
            position_ids=places_1T,
        )
    except (TypeError, RuntimeError, ValueError):
        return False
    moved_1TD = (found[0] if isinstance(found, tuple) else found) - x_1TD
    apart = (ours(x_1TD, rotary, TrainingTimeTest(1).at(0), 0) - x_1TD - moved_1TD).norm() / moved_1TD.norm()
    return bool(apart < (1e-3 if weight.dtype in (torch.float32, torch.float64) else 5e-2))


def start_layer(layer: nn.Module, weights: dict[str, Tensor], where: str, head: str) -> None:
    """Load starting values that must fit.

    Raises:
        ValueError: a weight of another shape, or norms of queries and keys that the layer has no place for; named.
    """
    own = layer.state_dict()
    if "self_attn.q_norm.weight" in weights.keys() - own.keys():
        raise ValueError(
            f"{head} cannot start {where} from the target's block, which has norms of queries and keys; choose "
            "start: random, or where there is such an option qk_norm: true"
        )
    for name, tensor in own.items():
        if name in weights and weights[name].shape != tensor.shape:
            raise ValueError(
                f"{head} cannot start {where} from the target's block: {name} is {tuple(tensor.shape)} here and "
                f"{tuple(weights[name].shape)} there; choose start: random, or the target's own dimensions"
            )
    layer.load_state_dict({name: weights.get(name, tensor) for name, tensor in own.items()})
