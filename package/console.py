"""Progress of long work on screen and in logs."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
)

from .files import printable

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 140)

log = logging.getLogger("headstart.console")
"""The package's logger. Commands show its messages on the console; any other program handles them
as all its logging, and sees only warnings if it configures none."""
LINE_SECONDS = 10.0
"""Seconds between two lines about work in progress, where the output is not a terminal."""
Item = TypeVar("Item")


def table_cell(text: object) -> str:
    """A text of others in one line of Markdown, which ends no cell and begins no HTML."""
    line = " ".join(printable(str(text)).split())
    return line.replace("|", "\\|").replace("<", "&lt;")


def of_first_process(record: logging.LogRecord) -> bool:
    """Whether a message is shown: those of a launch's first process, and all warnings."""
    return record.levelno >= logging.WARNING or os.environ.get("RANK", "0") == "0"


log.addFilter(of_first_process)


class ConsoleHandler(logging.Handler):
    """Prints messages on the console, above progress bars; warnings are marked."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            before = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            console.print(before + printable(self.format(record)), markup=False, emoji=False)
        except Exception:  # a failure to print does not end the work
            self.handleError(record)


def show_on_console() -> None:
    """Show messages and progress on the console, as commands do; a notebook may call it."""
    package = logging.getLogger("headstart")
    if not shown_on_console():
        handler = ConsoleHandler()
        handler.addFilter(of_first_process)
        package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False  # else a program's own handlers would print them a second time


def shown_on_console() -> bool:
    """Whether `show_on_console` was called."""
    return any(
        isinstance(handler, ConsoleHandler) for handler in logging.getLogger("headstart").handlers
    )


def number(value: float | None, digits: int = 2) -> str:
    """Format a figure of a table; None, not measured, and NaN, never tried, become a dash."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


class ProgressBar:
    """Work of known size: a bar in a terminal, elsewhere a log line at most every `LINE_SECONDS`.

    A bar is drawn only after `show_on_console`. Nested work adds a bar below its parent's.
    """

    _bars: ClassVar[Progress | None] = None
    """The display that nested bars share."""
    _last_line: ClassVar[float] = 0.0
    """Time of the last line in the log."""

    def __init__(self, what: str, total: float, done: float = 0) -> None:
        """Describe the work: its unit, its total, and the number done by an earlier start."""
        self.what = what
        self.total = total
        self.done = done
        self.note = ""
        # only the first process of a launch shows progress
        self.shown = os.environ.get("RANK", "0") == "0"
        self._first = done
        self._began = time.monotonic()
        self._task: TaskID | None = None
        self._is_outermost = False

    def update(self, done: float | None = None, note: str | None = None) -> None:
        """Set the number done and the note after the remaining time; None keeps either."""
        if done is not None:
            self.done = done
        if note is not None:
            self.note = note
        if not self.shown:
            return
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=self.done, total=self.total, line=self.line())
        elif time.monotonic() - ProgressBar._last_line >= LINE_SECONDS:
            ProgressBar._last_line = time.monotonic()
            log.info(f"{self.what}: {self.line()}")

    def line(self) -> str:
        """Format count, rate, remaining time and note."""
        seconds = time.monotonic() - self._began
        made = self.done - self._first
        parts = [f"{int(self.done):,}/{int(self.total):,}"]
        if made > 0 and seconds > 0:
            rate = made / seconds
            parts.append(f"{rate:,.1f}/s" if rate >= 1 else f"{60 * rate:.1f}/min")
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        if self.note:
            parts.append(self.note)
        return "  ".join(parts)

    def __enter__(self) -> ProgressBar:
        self._began = time.monotonic()
        if not self.shown:
            return self
        if self._bars is None and console.is_terminal and shown_on_console():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[line]}", markup=False),
            )
            ProgressBar._bars = Progress(*columns, console=console)
            ProgressBar._bars.start()
            self._is_outermost = True
        if self._bars is not None:
            self._task = self._bars.add_task(
                self.what, total=self.total, completed=int(self.done), line=self.line()
            )
        else:
            ProgressBar._last_line = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is None or self._task is None:
            return
        if self._is_outermost:
            self._bars.stop()
            ProgressBar._bars = None
        else:
            self._bars.remove_task(self._task)


def counted(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield items one after the other, with a `ProgressBar` of those that were processed."""
    with ProgressBar(what, len(items)) as bar:
        for number, item in enumerate(items, start=1):
            yield item
            bar.update(number)


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
