"""Ctrl-C and SIGTERM as a flag, which work looks at between its steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A stop on request, after everything was saved: the same command resumes from there."""


@dataclass
class StopFlag:
    """Whether work should stop after its present step."""

    wanted: bool = False


_flags: list[StopFlag] = []
"""The flag that the signals set; none outside `stop_on_signals`."""


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Have Ctrl-C and SIGTERM set a flag inside a `with` block; a second signal ends the process.

    Nested blocks share one flag. In a thread other than the main one no signal sets it.
    """
    if _flags:
        yield _flags[0]
        return
    flag = StopFlag()

    def ask(number: int, frame: FrameType | None) -> None:
        if flag.wanted:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        flag.wanted = True
        # of the processes of a launch, the first speaks
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        # Not through the console, which may be in the middle of a line.
        name = signal.Signals(number).name
        os.write(2, f"{name}: stopping after this step; once more to stop at once\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    earlier = {number: signal.signal(number, ask) for number in SIGNALS}
    _flags.append(flag)
    try:
        yield flag
    finally:
        _flags.clear()
        for number, handler in earlier.items():
            signal.signal(number, handler)
