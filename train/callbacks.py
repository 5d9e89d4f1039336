"""Callbacks: code of the caller's own that a training run calls between its steps.

class Stop(Callback):
    def on_evaluation(self, progress, row):
        if progress.best_length > 3.0:
            raise Stopped("good enough")

train(config, callbacks=[Stop()])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .console import Stopped, StopRequest, log
from .run_folder import Progress


class Callback:
    """What a run calls, on its main process only; a subclass overrides the methods that it needs.

    An exception ends the run as Ctrl-C does, with a checkpoint from which the same options continue it, and is raised
    again from `train` once that is written. `Stopped` is the exception for a callback that wants no more steps. Losses
    and weights do not depend on callbacks, unless they draw from torch's global generator.
    """

    def on_step(self, progress: Progress, row: dict[str, Any] | None) -> None:
        """Called after each optimizer step.

        Args:
            progress: where the run stands; a copy.
            row: the line of log.jsonl if this step wrote one (`loop.log_every`), else None.
        """

    def on_evaluation(self, progress: Progress, row: dict[str, Any]) -> None:
        """Called after each evaluation, when the best head has been saved.

        Args:
            progress: where the run stands; a copy.
            row: the line of log.jsonl: `eval`, `held_out_loss`, `tree`.
        """

    def on_save(self, progress: Progress, checkpoint: Path) -> None:
        """Called after a checkpoint to resume from has been written.

        Args:
            progress: where the run stands; a copy.
            checkpoint: its folder.
        """

    def on_end(self, progress: Progress, folder: Path) -> None:
        """Called when all steps are done and best/, last/ and report.md are written; not after a run that was stopped.

        Args:
            progress: where the run stands; a copy.
            folder: of the run.
        """


class Callbacks:
    """Those of one process, with the first exception that one of them raised."""

    def __init__(self, callbacks: Sequence[Callback], main_process: bool) -> None:
        self._callbacks = list(callbacks) if main_process else []
        self.error: BaseException | None = None

    def call(self, name: str, progress: Progress, given: Any, stop: StopRequest | None = None) -> None:
        """Call a method of all of them; after an exception no callback is called any more.

        Args:
            name: of the method.
            progress: where the run stands.
            given: the method's other argument.
            stop: is told, after an exception, that no more steps are wanted: the processes then stop together.
        """
        for callback in self._callbacks:
            if self.error is not None:
                return
            try:
                getattr(callback, name)(dataclasses.replace(progress), given)
            except (Exception, Stopped) as error:
                self.error = error
                log.warning(f"{type(callback).__name__}.{name} ends the run: {error!r}")
                if stop is not None:
                    stop.wanted = True

    def check(self) -> None:
        """Raise what a callback raised, if one did."""
        if self.error is not None:
            raise self.error
