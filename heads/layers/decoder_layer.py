"""Decoder layer of the draft heads: a Llama block that reads keys and values through a KV view.

A head runs the same layers while training and while decoding; what differs is the KV view: a step
of `TrainingTimeTest` over whole sequences, or `KVEntries` of a `DraftCache`.

Letters in tensor names: B batch, T time, H query heads, G key-value heads, E head size, D hidden
size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ...options import shown
from ..base import TargetInfo


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Convert 16-bit tensors to float32; float64 stays."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


FLAGS = ("qk_norm", "attention_bias")
"""Fields of `LayerShape` that are not dimensions of the target."""


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
    attention_bias: bool = False
    """Bias of queries, keys and values, as in Qwen2."""

    @classmethod
    def of(cls, target: TargetInfo, own: Any = None) -> LayerShape:
        """Return the target's dimensions, except those that `own`, a head's config, sets.

        Flags come from `own` alone.
        """
        # 1. Each dimension: the head's if it sets one, else the target's.
        chosen: dict[str, Any] = {}
        for name in [key.name for key in fields(cls) if key.name not in FLAGS]:
            value = getattr(own, name, None)
            chosen[name] = getattr(target, name) if value is None else value

        # 2. Refuse what no layer can have.
        heads = chosen["num_attention_heads"]
        groups = chosen["num_key_value_heads"]
        if heads % groups:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
            )
        if chosen["hidden_act"] not in ACT2FN:
            raise ValueError(
                f"unknown hidden_act {shown(chosen['hidden_act'])}; choose from"
                f" {', '.join(sorted(ACT2FN))}"
            )

        # 3. The flags, which a `TargetInfo` does not have.
        for name in FLAGS:
            chosen[name] = getattr(own, name, False)
        return cls(**chosen)


class KVView(Protocol):
    """Keys and values that a forward attends to, however they are stored."""

    drafts_N: Tensor | None
    """While training: the draft positions among the flattened [B * T]; None for all."""

    def attend(
        self, layer: int, query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor
    ) -> Tensor:
        """Store a layer's new keys and values and return its attention output, [B, H, T, E].

        The first step of training returns [1, H, N, E] in the last layer, for the draft positions
        only.
        """


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input, as fused kernels need.

    Under autocast its weight has another dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Rotary(nn.Module):
    """Rotary position embedding, with nothing to train or save.

    It is the target's, with its scaling, or the head's own.
    """

    def __init__(
        self, target: TargetInfo, head_dim: int, own: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        # One head as wide as the model: the embedding asks for nothing but the head size.
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=target.max_positions,
            rope_parameters=dict(own or target.rope_parameters),
        )
        # In a list, so that it is not a submodule: its frequencies must stay float32 and out of
        # checkpoints.
        self._embedding = [LlamaRotaryEmbedding(config)]

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, E]."""
        embedding = self._embedding[0]
        if embedding.inv_freq.device != positions_BT.device:
            embedding.to(positions_BT.device)
        # transformers takes a tensor of which it reads dtype and device only.
        cos, sin = embedding(torch.empty(0, dtype=dtype, device=positions_BT.device), positions_BT)
        return cos, sin


class Attention(nn.Module):
    """Grouped-query attention with Llama's parameter names."""

    def __init__(self, shape: LayerShape, input_size: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_size = shape.num_attention_heads * shape.head_dim
        key_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=shape.attention_bias)
        self.k_proj = nn.Linear(input_size, key_size, bias=shape.attention_bias)
        self.v_proj = nn.Linear(input_size, key_size, bias=shape.attention_bias)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(
        self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], kv: KVView, layer: int
    ) -> Tensor:
        """Attention output [B, T, D], at the positions that `kv` returns."""
        # [B, T, H * E] to [B, H, T, E]; keys and values have G heads
        heads = (-1, self.head_dim)
        query = self.q_norm(self.q_proj(x_BTD).unflatten(-1, heads).transpose(1, 2))
        key = self.k_norm(self.k_proj(x_BTD).unflatten(-1, heads).transpose(1, 2))
        value = self.v_proj(x_BTD).unflatten(-1, heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        # The KV view stores the new keys and values and knows what they attend to.
        return self.o_proj(kv.attend(layer, query, key, value).transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with Llama's parameter names."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.act = ACT2FN[shape.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama block, without its input norm where the input is not a residual stream (EAGLE-1)."""

    def __init__(self, shape: LayerShape, input_norm: bool = True) -> None:
        super().__init__()
        norm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.input_layernorm = norm if input_norm else nn.Identity()
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = GatedMLP(shape)

    def forward(
        self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], kv: KVView, layer: int
    ) -> Tensor:
        """The residual stream after the block, at the positions that `kv` returns."""
        out_BTD = self.self_attn(self.input_layernorm(x_BTD), rotary, kv, layer)
        # In training the last layer returns the draft positions only, [1, N, D]. Take the residual
        # stream at the same positions.
        if out_BTD.shape != x_BTD.shape:
            x_BTD = x_BTD.flatten(0, 1)[kv.drafts_N][None]
        x_BTD = x_BTD + out_BTD
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


def llama_config(
    shape: LayerShape, num_layers: int, target: TargetInfo, own_rope: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the config.json keys by which servers read a head of Llama blocks.

    Rotary parameters are in both spellings.
    """
    rope = own_rope or target.rope_parameters
    biases = {"attention_bias": True} if shape.attention_bias else {}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "model_type": "llama",
        **{name: value for name, value in vars(shape).items() if name not in FLAGS},
        "num_hidden_layers": num_layers,
        **biases,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": target.max_positions,
        # transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
    }


def sliding_keys(kinds: list[str], window: int) -> dict[str, Any]:
    """Return the keys by which transformers describes layers with a sliding window.

    vLLM and speculators read these keys.
    """
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}
