"""Model info: dimensions, modules by their usual names, and a fingerprint of the weights."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from ...heads import TargetInfo


def target_info(config: Any, name: str, vocab_size: int) -> TargetInfo:
    """A model's dimensions from its transformers config; where it has no word for one, what Llama would take."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope:  # one for each kind of attention
        rope = rope["full_attention"]
    full = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    eps = next((getattr(config, word) for word in ("rms_norm_eps", "layer_norm_eps") if hasattr(config, word)), 1e-5)
    act = next((getattr(config, word) for word in ("hidden_act", "hidden_activation") if hasattr(config, word)), "silu")
    return TargetInfo(
        name=name,
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        num_layers=config.num_hidden_layers,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_act=act,
        rms_norm_eps=eps,
        max_positions=getattr(config, "max_position_embeddings", 2**31 - 1),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **full},
    )


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of a few values of every weight, rounded to bfloat16: the same in all dtypes, another after training."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        for part in _unpacked(weight):
            first = part.detach().flatten()[:64].to(torch.bfloat16).float().cpu()
            digest.update(name.encode() + first.numpy().tobytes())
    return digest.hexdigest()[:16]


def _unpacked(weight: Tensor) -> list[Tensor]:
    """The tensors of a weight that weight-only quantization (torchao) packs into one that knows few operations."""
    if not is_traceable_wrapper_subclass(weight):
        return [weight]
    try:
        return [weight.dequantize()]
    except NotImplementedError:  # packed for one kernel alone: the parts that it is packed in
        return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


def norm_and_blocks(model: PreTrainedModel) -> tuple[torch.nn.Module, Sequence[torch.nn.Module]]:
    """The final norm and the decoder blocks, by the names that transformers gives them."""
    body = model.base_model
    body = getattr(body, "language_model", body)
    norms = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
    norm = next((getattr(body, name) for name in norms if hasattr(body, name)), torch.nn.Identity())
    blocks = next((getattr(body, name) for name in ("layers", "h", "blocks") if hasattr(body, name)), ())
    return norm, cast(Sequence[torch.nn.Module], blocks)


def logit_scale_and_cap(config: Any) -> tuple[float, float | None]:
    """Scale and soft cap of a model's logits, from transformers' three config keys: see `TargetModules`."""
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return float(scale), getattr(config, "final_logit_softcapping", None)


def active_adapters(model: PreTrainedModel) -> Hashable:
    """By layer which of peft's adapters are active, and which are merged into its weights."""
    if "peft" not in sys.modules:  # whoever has adapters has imported it, which takes a second
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return tuple((tuple(each.active_adapters), each.disable_adapters, tuple(each.merged_adapters)) for each in layers)
