"""Constant tensors, kept on each device, and copies between host and device.

The constants follow from a few numbers, and are made once for each device.

Launching a kernel for so little takes an accelerator longer than the work itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

KEPT = 256
"""Results of one function that are kept."""
PINNED = {"cuda"}
"""Types of devices that copy from pinned memory without a wait."""
Given = ParamSpec("Given")
Result = TypeVar("Result")
_recording = threading.local()


@contextmanager
def recording() -> Iterator[list[Any]]:
    """Collect the constants in use while operations are recorded to be replayed.

    The recording must keep them alive. Nothing is kept that is made in the block: it would hold no
    values before the first replay.
    """
    used: list[Any] = []
    _recording.used = used
    try:
        yield used
    finally:
        _recording.used = None


def constants(make: Callable[Given, Result]) -> Callable[Given, Result]:
    """Keep what a function returns for each of its arguments.

    Results from inside and from outside inference mode are kept apart. Tensors that were made in
    the one do not fully work in the other.
    """
    results: dict[Hashable, Result] = {}

    @functools.wraps(make)
    def constant(*arguments: Given.args, **named: Given.kwargs) -> Result:
        key = (arguments, tuple(named.items()), torch.is_inference_mode_enabled())
        result = results.get(key)
        used = getattr(_recording, "used", None)
        if result is None:
            result = make(*arguments, **named)
            # What is made while recording has no values before the first replay.
            if used is None:
                if len(results) >= KEPT:
                    results.clear()
                results[key] = result
        # A recorded graph reads this memory, even after `results` was cleared.
        if used is not None:
            used.append(result)
        return result

    return constant


def counting(size: int, device: torch.device, first: int = 0, column: bool = False) -> Tensor:
    """`torch.arange(first, first + size)`, as a row [size] or a column [size, 1]."""
    return _counting(size, device, first)[column]


@constants
def _counting(size: int, device: torch.device, first: int) -> tuple[Tensor, Tensor]:
    """The numbers as a row [size] and as a column [size, 1]."""
    numbers = torch.arange(first, first + size, device=device)
    return numbers, numbers[:, None]


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return `values` as a tensor on `device`, without waiting for that device's work.

    They are a tensor on the host, or numbers in nested lists. A copy from pageable memory waits on
    CUDA, whether or not it is said to be non-blocking.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    # torch keeps the pinned copy alive until the transfer has ended.
    if tensor.device.type == "cpu" and device.type in PINNED:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Download:
    """A copy of a tensor to the host that begins at once and waits for no later work."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self.tensor = tensor.to("cpu", non_blocking=True)  # into pinned memory
            self.event = torch.cuda.current_stream(tensor.device).record_event()

    def tolist(self) -> Any:
        """The numbers, when they have arrived."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor.tolist()  # sync: the one that this class is for
