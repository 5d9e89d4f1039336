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
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._triton import has_triton

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fused_on_gpu(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, compiled where its first argument is a tensor on CUDA.

    It runs as it is on other devices, without Triton, and where a mode counts operations.
    """

    @functools.lru_cache(maxsize=1)
    def compiled() -> Callable[Arguments, Result]:
        # Sizes change from batch to batch.
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        first = arguments[0]
        assert isinstance(first, Tensor)
        counted = _get_current_dispatch_mode() is not None
        if first.is_cuda and not counted and has_triton():
            return compiled()(*arguments, **options)
        return function(*arguments, **options)

    return call
