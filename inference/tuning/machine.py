"""Measurements of this machine, made once and kept in a file in the user's cache folder.

    machine.json    {"AMD EPYC (family 25, model 1), AVX2, 2 threads, torch 2.13.0+cpu, format 2":
                     {"...": ...}, ...}

A machine is a processor with its instruction set, or a GPU, with the threads that torch uses and
torch's version: measurements of one do not hold for another. Without the file, or with one that
cannot be read, all is measured anew; where it cannot be written, or where other processes kept the
processor busy, measurements are kept until the process ends.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...files import cache_folder, read_json, write_whole

FORMAT = 2
"""Version of the file's entries. It is part of a machine's key, so entries of other versions are
not read, and stay in the file."""
MACHINE_FILE = "machine.json"
WAITED = 0.1
"""Most seconds that a measurement on a CPU may wait for a core, or the same share of its duration
if that is more."""

Key = TypeVar("Key")
Value = TypeVar("Value")
in_memory: dict[str, dict[str, Any]] = {}
"""Measurements of this process, by machine and name."""
given_warnings: set[str] = set()
"""Warnings that were given: each comes once a process."""


def hardware(device: torch.device) -> str:
    """A GPU's name, or the processor's with its instruction set and the threads that torch uses."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads = torch.get_num_threads()
    cores = usable_cores()
    limited = f" on {cores} cores" if cores < threads else ""
    return f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads{limited}"


def machine_key(device: torch.device, compiled: bool) -> str:
    """Key under which a head's checkpoint keeps the tree that was fastest on a machine."""
    return hardware(device) + (", compiled" if compiled else "")


@cache
def cpuinfo() -> dict[str, str]:
    """Entries of the first processor in /proc/cpuinfo; empty where there is no such file."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    # Lines such as "model name  : AMD EPYC", processor after processor. Reversed, so that the first
    # processor's entries overwrite those of the others.
    entries = [line.partition(":") for line in lines]
    return {name.strip(): value.strip() for name, _, value in reversed(entries)}


def processor() -> str:
    """Return the processor's name, with family and model where the system tells them.

    Virtual machines hide the rest.
    """
    info = cpuinfo()
    if {"model name", "cpu family", "model"} <= info.keys():
        return f"{info['model name']} (family {info['cpu family']}, model {info['model']})"
    return info.get("model name") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads() -> None:
    """Warn, once, of more threads than cores: they wait for each other, which is many times slower.

    torch starts as many threads as the process has cores. It does not notice when the process is
    limited later (`os.sched_setaffinity`, `taskset -p`), and OMP_NUM_THREADS overrides the limit.
    """
    threads = torch.get_num_threads()
    cores = usable_cores()
    if threads > cores:
        tell_once(
            f"torch uses {threads} threads and this process may run on {cores}"
            f" {'core' if cores == 1 else 'cores'}, which is many times slower than with as many"
            f" threads; call torch.set_num_threads({cores})"
        )


def tell_once(message: str, why: str = "") -> None:
    """Warn, unless this process has given this warning before.

    `why` is appended to the warning and may differ.
    """
    if message not in given_warnings:
        given_warnings.add(message)
        warnings.warn(message + why, stacklevel=3)


def measured_once(
    device: torch.device,
    name: str,
    measure: Callable[[], Any],
    read: Callable[[Any], Value],
    timing: bool = True,
) -> Value:
    """Return a measurement of this machine, made by this process, an earlier one, or now.

    Args:
        device: what is measured.
        name: key of the measurement.
        measure: returns a JSON value, or None if nothing could be measured, which is not kept.
        read: converts the value. For any other value it raises ValueError, TypeError, KeyError or
            AttributeError, and the measurement is made anew.
        timing: whether it is a time, which is not kept on disk if the machine was busy.
    """
    # 1. Known already, to this process or from the file.
    machine = _machine(device)
    for measurements in (in_memory, _on_disk()):
        try:
            return read(measurements[machine][name])
        except (ValueError, TypeError, KeyError, AttributeError):
            continue

    # 2. Measure, and note how long this thread ran of the time that passed.
    wall_began, thread_began = clocks()
    value = measure()
    wall_ended, thread_ended = clocks()
    wall = wall_ended - wall_began
    waited = wall - (thread_ended - thread_began)
    if value is None:
        return read(value)

    # 3. Keep it: for this process in any case; for others unless the machine was busy.
    in_memory.setdefault(machine, {})[name] = value
    if timing and device.type == "cpu" and waited > max(WAITED, WAITED * wall):
        return read(value)
    on_disk = _on_disk()  # read again: another process may have written to it meanwhile
    entries = on_disk.get(machine)
    on_disk[machine] = (entries if isinstance(entries, dict) else {}) | in_memory[machine]
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder / MACHINE_FILE, json.dumps(on_disk, indent=1), mode=0o600)
    except (OSError, RuntimeError) as error:
        tell_once(
            "what was measured of this machine cannot be kept, and is measured again next time",
            f": {error}",
        )
    return read(value)


def kept_measurements(device: torch.device) -> dict[str, Any]:
    """Return all measurements of this machine by name, of this process and of earlier ones."""
    machine = _machine(device)
    on_disk = _on_disk().get(machine)
    return (on_disk if isinstance(on_disk, dict) else {}) | in_memory.get(machine, {})


def _machine(device: torch.device) -> str:
    """The machine's key in the file."""
    return f"{hardware(device)}, torch {torch.__version__}, format {FORMAT}"


def clocks() -> tuple[float, float]:
    """Seconds of the wall clock, and seconds in which this thread has run."""
    return time.perf_counter(), time.thread_time()


def positive(number: Any) -> float:
    """A positive number from JSON.

    Raises:
        ValueError: it is not a positive number.
    """
    if not isinstance(number, float | int) or not 0 < number <= sys.float_info.max:
        raise ValueError(f"{number!r} is not a positive number")
    return float(number)


def _on_disk() -> dict[str, Any]:
    """Content of the file; empty if it is missing or broken."""
    try:
        content = read_json(cache_folder() / MACHINE_FILE)
    # ValueError: a truncated file is not valid JSON, or not valid UTF-8.
    except (OSError, RuntimeError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def turns(sides: Sequence[Key], number: int) -> list[Key]:
    """Order of the sides of a comparison in its round `number`: each round another one begins."""
    # Sides a, b, c: abc in round 0, bca in round 1, cab in round 2, abc in round 3.
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


def seconds_in_turns(
    sides: Mapping[Key, Callable[[], object]],
    repeats: int,
    limit: float = math.inf,
    unmeasured: int = 0,
) -> dict[Key, list[float]]:
    """Return the seconds of `repeats` calls of each side, in turns, after a warm-up call.

    No round of calls starts after `limit` seconds; if the warm-up took all of them, its times are
    returned. Before that each side is called `unmeasured` times, whose times never are.
    """
    for _ in range(unmeasured):
        for call in sides.values():
            call()
    taken: dict[Key, list[float]] = {name: [] for name in sides}
    began = time.perf_counter()
    for number in range(repeats + 1):  # round 0 is the warm-up
        if number > 0 and time.perf_counter() - began > limit:
            break
        for name in turns(list(sides), number):
            start = time.perf_counter()
            sides[name]()
            taken[name].append(time.perf_counter() - start)
    return {name: times[1:] or times for name, times in taken.items()}
