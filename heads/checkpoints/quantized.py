"""Heads with int8 weights: torchao's weight-only tensors, one scale per row of a weight.

A file holds NAME.qdata and NAME.scale in place of NAME. Servers do not read such a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..base import SERVERS, DraftHead

UNREAD = "its weights are int8, in torchao's form"


def torchao() -> Any:
    """Import `torchao.quantization`, which is optional and prints when it is imported."""
    try:
        import torchao.quantization as library
    except ImportError as error:
        raise ValueError("int8 heads need torchao: pip install 'headstart[int8]'") from error
    return library


def unread_by(head: DraftHead) -> dict[str, str]:
    """The servers that do not read a head as it is, and why."""
    quantized = any(hasattr(weight.data, "qdata") for weight in head.parameters())
    return dict.fromkeys(SERVERS, UNREAD) if quantized else head.unread_by


def plain_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict with int8 weights split into the plain tensors that a file can hold."""
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        value: Any = tensor.data if isinstance(tensor, nn.Parameter) else tensor
        int8 = hasattr(value, "qdata")
        plain |= {f"{name}.qdata": value.qdata, f"{name}.scale": value.scale} if int8 else {name: tensor}
    return plain


def int8_tensor(saved: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    """Take the two parts of an int8 weight out of `saved` and join them to a tensor of `shape`."""
    if f"{name}.scale" not in saved:
        raise ValueError(f"tensor {name!r} has int8 values and no scale")
    data, scale = saved.pop(f"{name}.qdata"), saved.pop(f"{name}.scale")
    if data.dtype != torch.int8 or data.shape != shape:
        raise ValueError(f"tensor {name!r} is {data.dtype} of shape {tuple(data.shape)}, not int8 of its own")
    joined: Tensor = torchao().Int8Tensor(data, scale, [1, data.shape[1]], scale.dtype)
    return joined
