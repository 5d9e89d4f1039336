"""Heads with int8 weights: torchao's weight-only tensors, one scale a row, in a checkpoint of ours.

A file holds NAME.qdata and NAME.scale where another holds NAME. Servers do not read such a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..base import DraftHead

PARTS = ("qdata", "scale")
UNREAD = "its weights are int8, in torchao's form"


def torchao() -> Any:
    """The library, which speaks when it is imported and is not needed by others.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import torchao.quantization as library
    except ImportError as error:
        raise ValueError("int8 heads need torchao: pip install 'headstart[int8]'") from error
    return library


def quantize(head: DraftHead) -> None:
    """Replace the weights of all linear layers, in place."""
    library = torchao()
    library.quantize_(head, library.Int8WeightOnlyConfig())


def is_quantized(head: nn.Module) -> bool:
    """Whether any of its weights is int8."""
    return any(_parts(tensor) is not None for tensor in head.parameters())


def unread_by(head: DraftHead) -> dict[str, str]:
    """The servers that do not read a head as it is, and why."""
    return dict.fromkeys(("vllm", "sglang"), UNREAD) if is_quantized(head) else head.unread_by()


def plain_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a file can hold."""
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parts = _parts(tensor)
        plain |= {name: tensor} if parts is None else {f"{name}.{part}": value for part, value in parts.items()}
    return plain


def quantized_tensors(saved: dict[str, Tensor], head: DraftHead) -> dict[str, Tensor]:
    """Take the parts of int8 weights out of `saved`, and return the weights; those of `head` say the shapes."""
    found: dict[str, Tensor] = {}
    shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
    for name in [key.removesuffix(".qdata") for key in saved if key.endswith(".qdata")]:
        if f"{name}.scale" not in saved:
            raise ValueError(f"tensor {name!r} has int8 values and no scale")
        data, scale = (saved.pop(f"{name}.{part}") for part in PARTS)
        if data.dtype != torch.int8 or data.shape != shapes.get(name):
            raise ValueError(f"tensor {name!r} is {data.dtype} of shape {tuple(data.shape)}, not int8 of its own")
        found[name] = torchao().Int8Tensor(data, scale, [1, data.shape[1]], scale.dtype)
    return found


def assign(head: DraftHead, weights: dict[str, Tensor]) -> None:
    """Give a head its int8 weights."""
    for name, tensor in weights.items():
        module, _, last = name.rpartition(".")
        setattr(head.get_submodule(module), last, nn.Parameter(tensor, requires_grad=False))


def _parts(tensor: Tensor) -> dict[str, Tensor] | None:
    value = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    return {part: getattr(value, part) for part in PARTS} if hasattr(value, "qdata") else None
