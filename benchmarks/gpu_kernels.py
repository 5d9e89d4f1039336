"""Kernels of a round by the part of the round that launched them, for benchmarks/gpu.py.

Ranges on the host do not reach into a CUDA graph: its kernels were recorded long before. But each
kernel carries the correlation id of the launch that it belongs to, a graph's launch too, and
launches lie inside of ranges on the host. The ranges are put around the calls of an engine's runner
while a profiler runs, and nowhere else.
"""

from __future__ import annotations

import collections
import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headstart.inference import SpeculativeLM
from headstart.inference.drafters.round import Round
from headstart.inference.engines.base import Runner
from headstart.inference.rounds.observers import RoundObserver

PREFIX = "round: "
"""Of a range's name in a trace."""
RANGES = {
    "draft": "draft",
    "expand": "draft",
    "tree_forward": "forward",
    "_nodes_forward": "forward",
    "verify_and_compact": "verify",
    "observe": "observe",
}
"""The range of a function that a runner is given, by its name; others are ranges of their own."""
BETWEEN = "between"
"""The range of what was launched outside of the runner."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
SKIPPED, PROFILED = 5, 8
"""Rounds before those that are profiled, and how many these are."""
LONGEST_NAME = 90
"""Characters of a kernel's name that a table shows."""
LARGEST_TRACE = 16e6
"""Bytes of a compressed trace that is kept."""


def range_of(function: Callable[..., Any]) -> str:
    """The range of a function."""
    name = getattr(function, "__name__", type(function).__name__)
    return RANGES.get(name, name)


@contextmanager
def ranges_around(runner: Runner) -> Iterator[None]:
    """In the block each call of a runner is a range of the profiler."""
    plain = type(runner)

    class Ranged(plain):  # type: ignore[misc, valid-type]
        def __call__(
            self, function: Callable[..., Any], fixed: tuple[Any, ...], *inputs: Any
        ) -> Any:
            with record_function(PREFIX + range_of(function)):
                return super().__call__(function, fixed, *inputs)

    runner.__class__ = Ranged
    try:
        yield
    finally:
        runner.__class__ = plain


def profiled_rounds(lm: SpeculativeLM, generate: Callable[[], Any]) -> profile | None:
    """The profile of some rounds in the middle of a generation; None if it has not enough of
    them."""
    activities = [ProfilerActivity.CPU]
    on_cuda = lm.target.device.type == "cuda"
    if on_cuda:
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    numbers = itertools.count(1)

    class Profiling(RoundObserver):
        """Starts and stops the profiler after so many rounds."""

        def round(self, finished: Round) -> None:
            number = next(numbers)
            if number not in (SKIPPED, SKIPPED + PROFILED):
                return
            if on_cuda:
                torch.cuda.synchronize()
            if number == SKIPPED:
                profiler.start()
            else:
                profiler.stop()

    profiling = Profiling()
    lm.observers.append(profiling)
    try:
        with ranges_around(lm.target.engine.runner):
            generate()
    finally:
        lm.observers.remove(profiling)
    rounds_seen = next(numbers) - 1
    if SKIPPED <= rounds_seen < SKIPPED + PROFILED:
        profiler.stop()
    return profiler if rounds_seen >= SKIPPED + PROFILED else None


def trace_of(profiler: profile, path: Path) -> list[dict[str, Any]]:
    """The events of a profile, whose trace is written to a .json.gz file if it is not too large."""
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    if path.stat().st_size > LARGEST_TRACE:
        path.unlink()
    return events


def kernel_table(events: list[dict[str, Any]], rounds: int = PROFILED) -> list[dict[str, Any]]:
    """Rows of a table: for each range its sum and its kernels, those that take longest first; then
    the sum of all.

    Of each: count a round, microseconds of one, milliseconds a round, share of the time in which
    the device is busy, and milliseconds a round in which the device idled before it.
    """
    ranges_by_launch = _ranges_by_launch(events)
    on_device = [
        event for event in events if event.get("cat") in ON_DEVICE and event.get("ph") == "X"
    ]
    on_device.sort(key=lambda event: event["ts"])

    # 1. Microseconds by range and kernel, and how long the device idled before each kernel.
    taken: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    idle: collections.Counter[tuple[str, str]] = collections.Counter()
    busy_until = on_device[0]["ts"] if on_device else 0.0
    for event in on_device:
        name = ranges_by_launch.get(event["args"].get("correlation"), BETWEEN)
        key = (name, event["name"])
        taken[key].append(event["dur"])
        idle[key] += max(event["ts"] - busy_until, 0.0)
        busy_until = max(busy_until, event["ts"] + event["dur"])
    whole = sum(map(sum, taken.values()))

    # 2. Rows.
    def row(range_name: str, kernel: str, keys: list[tuple[str, str]]) -> dict[str, Any]:
        times = [time for key in keys for time in taken[key]]
        return {
            "range": range_name,
            "kernel": kernel[:LONGEST_NAME],
            "count": round(len(times) / rounds, 2),
            "us_each": round(sum(times) / max(len(times), 1), 2),
            "ms_a_round": round(sum(times) / rounds / 1000, 4),
            "share": round(sum(times) / whole, 4) if whole else 0.0,
            "idle_before_ms": round(sum(idle[key] for key in keys) / rounds / 1000, 4),
        }

    rows = []
    for name in dict.fromkeys(name for name, _ in taken):
        keys = [key for key in taken if key[0] == name]
        keys.sort(key=lambda key: sum(taken[key]), reverse=True)
        rows.append(row(name, "all", keys))
        rows += [row(name, key[1], [key]) for key in keys]
    return [*rows, row("all", "all", list(taken))]


def _ranges_by_launch(events: list[dict[str, Any]]) -> dict[int, str]:
    """By correlation id of a launch on the host: the innermost range in which it lies."""
    ranges = [
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(PREFIX))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)
    ]
    ranges.sort()
    found = {}
    for event in events:
        if event.get("cat") not in LAUNCHES or "correlation" not in event.get("args", {}):
            continue
        around = [name for begin, end, name in ranges if begin <= event["ts"] <= end]
        if around:
            found[event["args"]["correlation"]] = around[-1]
    return found
