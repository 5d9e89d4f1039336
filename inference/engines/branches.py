"""Calls that do not need each other's results, as parallel branches of a CUDA graph.

A product of a small matrix with one vector ends before it has filled the memory's bandwidth: the
projections to keys and values of an 8B model run at half of it, side by side with the queries' at
nearly all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def side_by_side(device: torch.device, *calls: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    """Return the results of calls, which become branches of a CUDA graph while it is recorded.

    Outside a recording they run in order.

    What a branch allocates is only reused by the same branch of a later fork, which begins after
    everything that the main branch had recorded by then.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return tuple(call() for call in calls)
    main = torch.cuda.current_stream(device)
    fork = main.record_event()
    results: list[Tensor] = []
    ends: list[torch.cuda.Event] = []
    for call, stream in zip(calls[1:], _side_streams(device, len(calls) - 1), strict=True):
        stream.wait_event(fork)
        with torch.cuda.stream(stream):
            results.append(call())
            ends.append(stream.record_event())
    first = calls[0]()
    for end in ends:
        main.wait_event(end)
    return first, *results


@functools.cache
def _side_streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    """Streams on which branches are recorded; shared by all recordings, as their workspaces are."""
    return tuple(torch.cuda.Stream(device) for _ in range(count))
