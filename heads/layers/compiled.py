"""Functions of tensors whose operations torch.compile fuses in training, on a GPU.

A loss over logits [8192, 32000] is seventeen operations, each of which reads and writes a gigabyte
in float32. Compiled they are four kernels, and the 16-bit logits are all that is kept for the
backward pass. What is here takes and returns nothing but tensors and constants, so that it is one
graph; matrix products and attention stay outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._triton import has_triton

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def compiles_on(device: torch.device) -> bool:
    """Whether functions are compiled on a device: on CUDA with Triton."""
    return device.type == "cuda" and has_triton()


def fused_on_gpu(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, compiled on the device of its first argument where `compiles_on` says so."""

    @functools.lru_cache(maxsize=1)
    def compiled() -> Callable[Arguments, Result]:
        # Sizes change from batch to batch.
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        first = arguments[0]
        assert isinstance(first, Tensor)
        if compiles_on(first.device):
            return compiled()(*arguments, **options)
        return function(*arguments, **options)

    return call
