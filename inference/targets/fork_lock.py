"""A lock that says so where a fork has left nothing that could be used.

A forked process has one thread. What another one held is never released, and the threads with which
torch computes are gone: with GNU's OpenMP the next operation waits for them without end.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from weakref import WeakSet

import torch

MAPS = Path("/proc/self/maps")
"""The libraries of this process, where the system lists them."""
ADVICE = (
    "load the model in the new process, or start that by 'spawn'"
    " (multiprocessing.get_context('spawn'))"
)


class ForkLock:
    """A reentrant lock; to take it in a forked process is refused if that could wait for good."""

    def __init__(self, what: str) -> None:
        """Lock `what`, as errors name it."""
        self.what = what
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._held_at_fork = False
        _LOCKS.add(self)

    def __enter__(self) -> None:
        """Take the lock.

        Raises:
            ValueError: this process was forked, and a generation of the other one would be waited
                for, or torch's threads.
        """
        if os.getpid() != self._process:
            self._check_fork()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def after_fork(self) -> None:
        """Find out, in a forked process, whether a thread that is not there holds the lock."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._held_at_fork = True

    def _check_fork(self) -> None:
        if self._held_at_fork:
            raise ValueError(
                f"this process was forked while {self.what} generated in another thread, which"
                f" does not exist here: {ADVICE}"
            )
        threads = torch.get_num_threads()
        if threads > 1 and MAPS.is_file() and "libgomp" in MAPS.read_text(errors="replace"):
            raise ValueError(
                f"this process was forked from the one that loaded {self.what}, and torch's"
                f" {threads} threads do not survive a fork: {ADVICE}, or call"
                " torch.set_num_threads(1) here first"
            )


_LOCKS: WeakSet[ForkLock] = WeakSet()


def _after_fork() -> None:
    for lock in list(_LOCKS):
        lock.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
