"""Traces of a few steps by torch's profiler: `--loop.profile 10 12` traces steps 10 to 12."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ..console import log

ROWS = 12
"""Operations in the table that is logged."""


class StepProfiler:
    """Profiles the steps of a window after one warm-up step, and writes a trace per process."""

    def __init__(
        self, window: tuple[int, int] | None, folder: Path, process: int, next_step: int
    ) -> None:
        """Prepare for a window of the first and the last step; None profiles nothing.

        A window that begins before `next_step`, the run's next one, is skipped. Traces go to
        `folder`, one for each process.
        """
        # Steps count from 1: a window at 0 is never reached.
        self.first, self.last = window if window and next_step <= window[0] else (0, 0)
        self.path = folder / f"steps-{self.first}-to-{self.last}.process-{process}.json.gz"
        self.process = process
        self._profile: Any = None
        # The step before the window, if this start makes it.
        self._warm_up = int(next_step < self.first)

    def begin(self, step: int) -> None:
        """Called before each step."""
        if self._profile is not None:
            self._profile.step()
        if self.first == 0 or step != self.first - self._warm_up:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        steps = self.last - self.first + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first step of a run has none before it to warm up
            window = schedule(wait=0, warmup=self._warm_up, active=steps, repeat=1)
        self._profile = profile(
            activities=activities, schedule=window, on_trace_ready=self._write, acc_events=True
        )
        self._profile.start()

    def end(self, step: int) -> None:
        """Called after each step."""
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Write what was profiled so far, if the run ends inside the window."""
        if self._profile is not None:
            self._profile.stop()
        self._profile = None

    def _write(self, profiled: profile) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(self.path))
        if self.process == 0:
            where = "cuda" if torch.cuda.is_available() else "cpu"
            table = profiled.key_averages().table(
                sort_by=f"self_{where}_time_total", row_limit=ROWS
            )
            log.info(
                f"steps {self.first} to {self.last}, traced to {self.path} (open it with"
                f" ui.perfetto.dev):\n{table}"
            )
