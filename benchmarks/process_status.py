"""Memory of the running process. Imports nothing of headstart, which speculators' environment lacks
(trainers.py)."""

from __future__ import annotations

from pathlib import Path


def memory_mib(name: str) -> float:
    """VmRSS (memory now) or VmHWM (peak) of this process, in MiB (Linux).

    The peak of `getrusage` counts the process that started this one.
    """
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) / 1024
