"""What a person sees of long work, and how they stop it."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 140)


def progress_bar() -> Progress:
    """A line with count, elapsed and remaining time; nothing where the output is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class Stopped(Exception):
    """Raised after everything was saved: the same command goes on from there."""


class StopRequest:
    """Ctrl-C and SIGTERM as a wish: the loop asks `wanted` after each step, saves, and ends. A second one kills."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.wanted = False
        self._earlier: list[object] = []

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._earlier = [signal.signal(number, self._ask) for number in self.SIGNALS]
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in zip(self.SIGNALS, self._earlier, strict=False):
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.wanted = True
        console.print(f"{signal.Signals(number).name}: stopping after this step; once more to stop at once")
