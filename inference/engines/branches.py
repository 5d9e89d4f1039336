"""Calls that do not need each other's results, as parallel branches of a CUDA graph.

The product of a small matrix and one vector ends before it has used the memory's full bandwidth.
The projections to keys and values of an 8B model run at half of it by themselves, and at nearly all
of it side by side with the projection to queries:

    main    fork --- q_proj ---------- join ---
               |                        |
    side 0     +---- k_proj ------------+
    side 1     +---- v_proj ------------+
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def side_by_side(device: torch.device, *calls: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    """Return the results of calls, as branches of the CUDA graph that is being recorded.

    Outside a recording they run in order.

    Memory that a branch frees is only reused by the same branch of a later fork. That fork comes
    after the join of this one, so nothing is overwritten early.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return tuple(call() for call in calls)
    # 1. Fork: side streams wait for all that the main stream has recorded so far.
    main = torch.cuda.current_stream(device)
    fork = main.record_event()
    results: list[Tensor] = []
    ends: list[torch.cuda.Event] = []
    for call, stream in zip(calls[1:], _side_streams(device, len(calls) - 1), strict=True):
        stream.wait_event(fork)
        with torch.cuda.stream(stream):
            results.append(call())
            ends.append(stream.record_event())

    # 2. The first call stays on the main stream.
    first = calls[0]()

    # 3. Join: the main stream waits for the side streams.
    for end in ends:
        main.wait_event(end)
    return first, *results


@functools.cache
def _side_streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    """Streams on which branches are recorded; shared by all recordings, as their workspaces are."""
    return tuple(torch.cuda.Stream(device) for _ in range(count))
