"""Progress of long work on screen and in logs, and how it is stopped."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import ClassVar, TypeVar

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 140)

log = logging.getLogger("headstart.train")
"""What the package reports. Commands show it on the console; any other program handles it as it does all its logging,
and sees warnings only if it configures none."""


def _first_process(record: logging.LogRecord) -> bool:
    """Filter: the first process of a launch reports; warnings come from all of them."""
    return record.levelno >= logging.WARNING or os.environ.get("RANK", "0") == "0"


log.addFilter(_first_process)


class ConsoleHandler(logging.Handler):
    """Prints messages on the console, above progress bars; warnings are marked."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        try:
            before = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            console.print(before + self.format(record), markup=False, emoji=False)
        except Exception:  # logging never ends the work that it is about
            self.handleError(record)


def show_on_console() -> None:
    """Show messages and progress on the console; what commands do, and a notebook may."""
    package = logging.getLogger("headstart")
    if not shown_on_console():
        package.addHandler(ConsoleHandler())
    package.setLevel(logging.INFO)
    package.propagate = False  # else a program's own handlers would print them a second time


def shown_on_console() -> bool:
    """Whether `show_on_console` was called."""
    return any(isinstance(handler, ConsoleHandler) for handler in logging.getLogger("headstart").handlers)


LINE_SECONDS = 10.0
"""Seconds between two lines about work in progress, where the output is no terminal."""


Item = TypeVar("Item")


def number(value: float | None, digits: int = 2) -> str:
    """A figure of a table, where what was not measured is None."""
    return "-" if value is None else f"{value:.{digits}f}"


class ProgressBar:
    """Work of known size: a bar in a terminal; elsewhere a line in the log every `LINE_SECONDS`, from a thread.

    A bar is drawn only by commands and after `show_on_console`. Work inside other work adds a bar below it, and the
    lines are about the innermost.
    """

    _open: ClassVar[list[ProgressBar]] = []
    _bars: ClassVar[Bars]
    _drawn: ClassVar[bool] = False
    _ended: ClassVar[threading.Event]
    _lines: ClassVar[threading.Thread]

    def __init__(self, what: str, total: float, done: float = 0) -> None:
        """Nothing is shown before the `with` block is entered.

        Args:
            what: is counted.
            total: how much there is.
            done: how much of it was done before.
        """
        self.what, self.total, self.done, self.note = what, total, done, ""
        self.shown = os.environ.get("RANK", "0") == "0"  # of the processes of a launch, the first one speaks
        self._first, self._began = done, time.monotonic()

    def update(self, done: float | None = None, note: str | None = None) -> None:
        """Take what is done by now, of `total`, and what else is to be said."""
        self.done = self.done if done is None else done
        self.note = self.note if note is None else note
        if self.shown and self._drawn:
            self._bars.update(self._task, completed=self.done, total=self.total, note=self.line())

    def line(self) -> str:
        """Count, rate, remaining time, note."""
        seconds, made = time.monotonic() - self._began, self.done - self._first
        parts = [f"{int(self.done):,}/{int(self.total):,}"]
        if made > 0:
            rate = made / seconds
            parts.append(f"{rate:,.1f}/s" if rate >= 1 else f"{60 * rate:.1f}/min")
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        else:
            parts.append(f"{duration(seconds)} so far")
        return "  ".join([*parts, self.note] if self.note else parts)

    def __enter__(self) -> ProgressBar:
        self._began = time.monotonic()
        if not self.shown:
            return self
        if not self._open:
            ProgressBar._bars = Bars(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), console=console
            )
            ProgressBar._ended = threading.Event()
            ProgressBar._lines = threading.Thread(target=_tell, args=(self._ended,), daemon=True)
            ProgressBar._drawn = console.is_terminal and shown_on_console()
            self._bars.start() if self._drawn else self._lines.start()
        self._task = self._bars.add_task(self.what, total=self.total, completed=int(self.done), note="")
        self._open.append(self)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.shown:
            return
        self._open.remove(self)
        if self._open:
            self._bars.remove_task(self._task)
            return
        self._ended.set()
        self._bars.stop() if self._drawn else self._lines.join()


def counted(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items one after the other, with a `ProgressBar` of what was done with them."""
    with ProgressBar(what, len(items)) as bar:
        for number, item in enumerate(items, start=1):
            yield item
            bar.update(number)


def _tell(ended: threading.Event) -> None:
    while not ended.wait(LINE_SECONDS):
        for work in ProgressBar._open[-1:]:
            log.info(f"{work.what}: {work.line()}")


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class Stopped(BaseException):
    """Raised after everything was saved: the same command resumes from there.

    As KeyboardInterrupt, it is no `Exception`, which libraries catch as a failure of their own.
    """


class StopRequest:
    """Ctrl-C and SIGTERM as a wish: work asks `wanted` where it can end, or is ended `at_once`. A second one kills.

    Inside another one's `with` block, it keeps a wish until its own block has ended: what must not be cut off is safe.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    _current: ClassVar[StopRequest | None] = None

    def __init__(self) -> None:
        self.wanted = False
        self._cuts = False
        self._outer: StopRequest | None = None
        self._earlier: list[object] = []

    def __enter__(self) -> StopRequest:
        self._outer, StopRequest._current = StopRequest._current, self
        if self._outer is not None:
            self.wanted = self._outer.wanted
        elif threading.current_thread() is threading.main_thread():
            self._earlier = [signal.signal(number, _ask) for number in self.SIGNALS]
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        StopRequest._current = self._outer
        if self._outer is not None:
            self._outer.wanted |= self.wanted
            if error is None:
                self._outer.check()
            return
        for number, handler in zip(self.SIGNALS, self._earlier, strict=False):
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def at_once(self, cuts: bool = True) -> Iterator[None]:
        """Work that may be thrown away: a wish raises `Stopped` in the middle of it, unless `cuts` is False."""
        before, self._cuts = self._cuts, cuts
        try:
            self.check()
            yield
        finally:
            self._cuts = before

    def check(self) -> None:
        """End what is done `at_once`, if that is wanted.

        Raises:
            Stopped: it is.
        """
        if self.wanted and self._cuts:
            raise Stopped("stopped; the same command resumes from there")


def _ask(number: int, frame: FrameType | None) -> None:
    request = StopRequest._current
    assert request is not None
    if request.wanted:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    request.wanted = True
    request.check()
    # Not by the console, which may be in the middle of a line.
    os.write(2, f"{signal.Signals(number).name}: stopping after this step; once more to stop at once\n".encode())
