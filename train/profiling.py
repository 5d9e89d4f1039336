"""Traces of a few steps by torch's profiler: `--loop.profile 10 12` traces steps 10 to 12."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import profile, schedule

from ..console import log

ROWS = 12
"""Operations in the table that is logged."""


def step_profiler(
    window: tuple[int, int] | None, folder: Path, process: int, next_step: int
) -> profile | None:
    """A profiler of the steps of a window, whose `step` is called before each step.

    `window` holds the first and the last step; None, or one that begins before `next_step`, the
    run's next one, profiles nothing. A trace for each process goes to `folder`, once the window or
    the run ends.
    """
    if window is None or window[0] < next_step:
        return None
    first, last = window
    path = folder / f"steps-{first}-to-{last}.process-{process}.json.gz"

    def write(profiled: profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(path))
        if process == 0:
            where = "cuda" if torch.cuda.is_available() else "cpu"
            table = profiled.key_averages().table(
                sort_by=f"self_{where}_time_total", row_limit=ROWS
            )
            log.info(
                f"steps {first} to {last}, traced to {path} (open it with"
                f" ui.perfetto.dev):\n{table}"
            )

    # `step` has been called first - next_step + 1 times when the first step begins.
    steps = schedule(wait=first - next_step, warmup=1, active=last - first + 1, repeat=1)
    return profile(schedule=steps, on_trace_ready=write, acc_events=True)
