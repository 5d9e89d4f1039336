"""Detects changed weights or code, however they were written, for less than the cost of a token.

torch counts writes to a parameter in place (`_version`), but not those through `.data`, by which
reinforcement learning, moving averages and merged adapters often write. So three things are
compared:

    addresses    a parameter was replaced
    counts       it was written in place
    samples      it was written through `.data`; 16 elements of each tensor on a CPU

A write through `.data` to a few rows of an embedding may change none of them, and is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLED = 16
"""Elements of each tensor that are compared."""
AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by an element's bytes. As integers, NaN equals itself."""
NUMBERS = (float, int, bool)
WITHOUT_EFFECT = ("training", "gradient_checkpointing", "max_seq_len_cached")
"""Numbers of modules that change no text: the last one is written by rotary embeddings. Nor do
names that begin with _, where torch and transformers note what they have done."""


class WeightWatch:
    """Tells one state of a module's parameters and buffers from another."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._samples: list[list[Tensor]] = []
        """Views of the tensors' sampled elements, by their size in bytes."""

    def version(self, module: nn.Module) -> Hashable:
        """Return a value that changes with the weights.

        Weights on an accelerator are not read, since that would wait for it.
        """
        tensors: list[Tensor] = []
        _collect(module, tensors)
        addresses: list[int] = []
        writes = 0
        for tensor in tensors:
            addresses.append(tensor.data_ptr())
            if not tensor.is_inference():  # inference tensors have no count
                writes += tensor._version
        # The views of samples are made once, as long as the tensors stay where they are.
        if addresses != self._addresses:
            self._addresses = addresses
            self._samples = _samples(tensors)
        numbers = [
            torch.cat(samples).view(torch.uint8).numpy().tobytes() for samples in self._samples
        ]
        return (*addresses, writes, *numbers)


def _collect(module: nn.Module, tensors: list[Tensor]) -> None:
    """Append all plain tensors of a module; `module.parameters()` takes five times as long.

    Buffers that are not saved in checkpoints are left out: forwards of longrope embeddings write
    their frequencies there.
    """
    for named in (module._parameters, module._buffers):
        for name, tensor in named.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                tensors += _plain(tensor)
    for child in module._modules.values():
        if child is not None:
            _collect(child, tensors)


def _plain(tensor: Tensor) -> list[Tensor]:
    """Return the tensor, or the parts of a quantized one; an empty list if it owns no memory."""
    if type(tensor) in (Tensor, nn.Parameter):
        return [tensor]
    parts: list[Tensor] = []
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            parts += _plain(getattr(tensor, name))
    return parts


def _samples(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Views of `SAMPLED` elements of each tensor on the CPU, spread over its rows and columns."""
    by_size: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or 0 in tensor.shape:
            continue
        # 1. Elements from the first to the last in memory: 12 for a contiguous [3, 4].
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        # 2. Three dimensions are weights of experts, of which each should be sampled.
        wanted = max(SAMPLED, 2 * len(tensor)) if tensor.ndim == 3 else SAMPLED
        count = min(wanted, extent)
        # 3. Equal steps, coprime to the width. In [64, 64], with 4096 elements, steps of 256 would
        # put all samples into column 0; steps of 255 put them into 16 columns.
        step = extent // count
        width = tensor.shape[-1] if tensor.ndim else 1
        while step > 1 and math.gcd(step, width) > 1:
            step -= 1
        size = tensor.element_size()
        view = tensor.detach().as_strided((count,), (step,), tensor.storage_offset())
        by_size.setdefault(size, []).append(view.view(AS_INTEGERS[size]))
    return list(by_size.values())


def code_of(module: nn.Module) -> Hashable:
    """Return the code that a call of a module runs.

    It comprises the classes of its parts with their forwards, the numbers that they compute with
    (`scaling`, `eps`, `top_k`), the configs that they read (`sliding_window`, `num_hidden_layers`),
    their hooks, hooks on all modules, and forwards in the place of theirs. torch numbers hooks and
    never gives a number twice.
    """
    code: list[Hashable] = [*_GLOBAL_HOOKS[0], *_GLOBAL_HOOKS[1]]
    configs: dict[int, Any] = {}
    _collect_code(module, code, configs)
    for config in configs.values():
        # As text: a list that is changed in its place would equal itself.
        code.append(repr([v for v in vars(config).items() if not hasattr(v[1], "to_dict")]))
    return tuple(code)


def has_hooks(module: nn.Module) -> bool:
    """Whether the user has put hooks on a module or its parts, or replaced their forwards."""
    if _GLOBAL_HOOKS[0] or _GLOBAL_HOOKS[1]:
        return True
    return any(True for part in module.modules() for _ in _hooks(part))


_GLOBAL_HOOKS = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)
"""Hooks on every module of the process, by number."""


def _collect_code(module: nn.Module, code: list[Hashable], configs: dict[int, Any]) -> None:
    code.append(id(type(module)))
    code.append(id(type(module).forward))
    for name, value in vars(module).items():
        if type(value) in NUMBERS and name not in WITHOUT_EFFECT and name[0] != "_":
            code.append(value)
        elif name == "config":
            configs[id(value)] = value
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        code += _hooks(module)
    for child in module._modules.values():
        if child is not None:
            _collect_code(child, code, configs)


def _hooks(module: nn.Module) -> Iterator[Hashable]:
    """Yield the hooks of a module, except those by which transformers returns hidden states."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for number, hook in hooks.items():
            if getattr(hook, "__module__", None) != "transformers.utils.output_capturing":
                yield number
    # A forward set on the object takes the place of its class's.
    if "forward" in module.__dict__:
        yield id(module.__dict__["forward"])
