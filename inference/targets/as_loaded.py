"""A user's model as it decodes: in eval mode and its weights' dtype, even while it is trained.

Between two steps of a training, a model is in train mode: dropout would change what it writes,
gradient checkpointing would keep it from filling a KV cache, and under autocast the cache would
have another number format than the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def as_loaded(model: nn.Module) -> Iterator[None]:
    """Run a model's forwards in eval mode without autocast, and restore its modes afterwards."""
    device = next(model.parameters()).device.type
    # Module by module: a user may have left some in eval mode, such as frozen norms.
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        if autocast_dtype(device) is None:
            yield
        else:
            with torch.autocast(device, enabled=False):
                yield
    finally:
        for module in training:
            module.training = True


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of the caller's autocast on a type of device; None if autocast is off."""
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


def warn_of_autocast(model: nn.Module) -> None:
    """Warn if the caller's autocast would have changed the dtype in which a model decodes."""
    weight = next(model.parameters())
    dtype = autocast_dtype(weight.device.type)
    if dtype not in (None, weight.dtype):
        warnings.warn(
            f"autocast to {dtype} is off while headstart decodes, in the weights' own"
            f" {weight.dtype}; to decode in {dtype}, load the model in it",
            stacklevel=3,
        )
