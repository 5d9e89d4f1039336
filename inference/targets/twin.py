"""A copy of a model that shares its weights with it, some of its modules replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn


def twin_of(module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Copy a module and all modules in it; parameters, buffers and other attributes are shared.

    `replacement` returns what takes the place of a module and of all that is in it, or None to copy
    it.
    """
    instead = replacement(module)
    if instead is not None:
        return instead
    # Not `copy.copy`, which parametrized modules refuse.
    twin = type(module).__new__(type(module))
    vars(twin).update(vars(module))
    # A shallow copy shares parameters and buffers, but also dicts of hooks. transformers hooks a
    # model when its hidden states are first requested, so model and twin need their own dicts.
    hooks = {
        name: copy.copy(value) for name, value in vars(module).items() if name.endswith("_hooks")
    }
    vars(twin).update(hooks)
    # Rotary embeddings exchange their frequencies as texts grow, by lengths that they keep: the
    # copy has both for itself.
    vars(twin)["_buffers"] = copy.copy(module._buffers)
    children = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else twin_of(child, replacement)
    vars(twin)["_modules"] = children  # a new dict: the original keeps its own modules
    return twin
