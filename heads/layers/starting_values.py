"""Starting values of a head's layers, taken from the target's blocks and norms.

A block is compared with our layer on a short text. One that computes something else is refused, not
approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ..base import TargetInfo
from .decoder_layer import DecoderLayer, LayerShape, RMSNorm, Rotary, at_least_fp32
from .training_time_test import TrainingTimeTest


@torch.no_grad()
def norm_gain(norm: nn.Module, size: int) -> Tensor | None:
    """Return the gain g of an RMSNorm g x / rms(x); None for any other norm.

    It does not matter how a model stores the gain: Gemma's weight is g - 1.
    """
    weights = {name: _whole(weight) for name, weight in norm.named_parameters()}
    if len(weights) != 1:
        return None
    (weight,) = weights.values()

    # 1. Of a constant x, an RMSNorm leaves g. It is so large that eps is nothing beside its square.
    constant_D = torch.full((size,), 1024.0, dtype=torch.float32)
    gain_D = functional_call(norm, weights, (constant_D.to(weight)[None],))[0]

    # 2. Check g on another x, with a mean that a LayerNorm would take out.
    x_D = torch.linspace(-1024, 2048, size, dtype=torch.float32)
    normed_D = functional_call(norm, weights, (x_D.to(weight)[None],))[0]
    expected_D = at_least_fp32(gain_D) * (x_D / x_D.square().mean().sqrt()).to(gain_D.device)
    if torch.allclose(at_least_fp32(normed_D), expected_D, rtol=2e-2, atol=1e-3):
        return gain_D
    return None


def required_gain(norm: nn.Module, size: int, where: str) -> Tensor:
    """The gain of a target's norm, with a ValueError for one that is no RMSNorm."""
    gain_D = norm_gain(norm, size)
    if gain_D is None:
        raise ValueError(f"{where} is not an RMSNorm; choose start: random")
    return gain_D


@torch.no_grad()
def target_layer_weights(
    blocks: Sequence[nn.Module], layer: int, target: TargetInfo, head: str
) -> dict[str, Tensor]:
    """Return the weights for a `DecoderLayer` from the target's block `layer`; -1 is the last.

    A ValueError refuses a block that is not a Llama block.
    """
    if not -len(blocks) <= layer < len(blocks):
        raise ValueError(
            f"{head} cannot start from block {layer}: the target has {len(blocks)}; choose from 0"
        )
    # 1. The same tensors as a Llama layer.
    block = blocks[layer]
    where = f"{head} cannot start from block {layer} of {target.name!r}, a {type(block).__name__}"
    weights = block_tensors(block)
    ours = DecoderLayer(
        replace(LayerShape.of(target), qk_norm="self_attn.q_norm.weight" in weights)
    )
    for name in sorted(ours.state_dict().keys() ^ weights.keys()):
        what = "has, unlike a Llama layer," if name in weights else "lacks"
        raise ValueError(f"{where}, which {what} {name!r}; choose start: random")

    # 2. Norms by their gain, however the block stores it.
    for name, module in ours.named_modules():
        if isinstance(module, RMSNorm):
            size = len(weights[f"{name}.weight"])
            weights[f"{name}.weight"] = required_gain(
                block.get_submodule(name), size, f"{where}, whose {name}"
            )

    # 3. The same output: a block may have these tensors and still scale or add differently.
    ours = ours.to(weights["mlp.up_proj.weight"])
    start_layer(ours, weights, f"block {layer}", head)
    if not _alike(ours, block, target):
        raise ValueError(
            f"{where}, which computes something else than a Llama layer; choose start: random"
        )
    return weights


def block_tensors(block: nn.Module) -> dict[str, Tensor]:
    """Weights of a module of the target by name, gathered if they are sharded."""
    return {name: _whole(tensor.detach()) for name, tensor in block.state_dict().items()}


def _whole(tensor: Tensor) -> Tensor:
    """A weight, gathered if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _alike(ours: DecoderLayer, block: nn.Module, target: TargetInfo) -> bool:
    """Whether a layer and a target's block have the same output on a short random text."""
    # 1. Random states, as long as the block's attention allows.
    weight = ours.mlp.up_proj.weight
    attention_config = getattr(block.self_attn, "config", None)
    flex = getattr(attention_config, "_attn_implementation", "") == "flex_attention"
    time = 1 if flex else 4  # flex_attention takes no additive mask
    x_1TD = torch.randn(
        1, time, target.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float32
    ).to(weight)
    positions_1T = torch.arange(time, device=weight.device)[None]
    rotary = Rotary(target, target.head_dim)(positions_1T, weight.dtype)
    # An additive causal mask, [T, T].
    hidden_TT = torch.ones(time, time, dtype=torch.bool, device=weight.device).triu(1)
    mask_TT = torch.zeros_like(hidden_TT, dtype=weight.dtype).masked_fill(
        hidden_TT, torch.finfo(weight.dtype).min
    )

    # 2. The block's output. One that wants other arguments is not a Llama block.
    try:
        output = block(
            x_1TD,
            position_embeddings=rotary,
            attention_mask=None if flex else mask_TT[None, None],
            position_ids=positions_1T,
        )
    except (TypeError, RuntimeError, ValueError):
        return False

    # 3. Compare what both add to the residual stream: the stream itself would hide a difference.
    moved_1TD = (output[0] if isinstance(output, tuple) else output) - x_1TD
    our_moved_1TD = ours(x_1TD, rotary, TrainingTimeTest(1).at(0), 0) - x_1TD
    distance = (our_moved_1TD - moved_1TD).norm() / moved_1TD.norm()
    tolerance = 1e-3 if weight.dtype in (torch.float32, torch.float64) else 5e-2
    return bool(distance < tolerance)


def start_as_identity(fc: nn.Linear) -> None:
    """Start a map [D, k D] as the identity on its last D inputs, and zero on the others."""
    width = fc.out_features
    fc.weight.zero_()
    fc.weight[:, -width:].copy_(torch.eye(width, dtype=torch.float32))


def start_layer(layer: nn.Module, weights: dict[str, Tensor], where: str, head: str) -> None:
    """Load the weights of a target's block that a layer has; leave its other weights unchanged."""
    tensors = layer.state_dict()
    if "self_attn.q_norm.weight" in weights.keys() - tensors.keys():
        raise ValueError(
            f"{head} cannot start {where} from the target's block, which has norms of queries and"
            " keys; choose start: random, or where there is such an option qk_norm: true"
        )
    for name, tensor in tensors.items():
        if name in weights and weights[name].shape != tensor.shape:
            raise ValueError(
                f"{head} cannot start {where} from the target's block: {name} is"
                f" {tuple(tensor.shape)} here and {tuple(weights[name].shape)} there; choose start:"
                " random, or the target's own dimensions"
            )
    layer.load_state_dict({name: weights.get(name, tensor) for name, tensor in tensors.items()})
