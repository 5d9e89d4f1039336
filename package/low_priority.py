"""Run a module in a process of low priority that does not outlive the process that started it.

    python -m headstart.low_priority NICENESS PARENT MODULE ARGUMENTS...

NICENESS is added to the parent's, as by nice(1). With 19, Linux runs the process only where no other wants the
processor. Once the process PARENT has ended, however it did, this one gets a SIGTERM as from its user, and is killed if
it has not ended some time later.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from contextlib import suppress

IDLE_NICENESS = 19
"""The lowest priority."""
LOOK_SECONDS = 0.5
"""Time between two looks for the parent."""
GRACE_SECONDS = 30.0
"""Time that the work has to save its state after the parent has ended."""


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process, and of all threads that it will have."""
    os.nice(niceness)
    if niceness >= IDLE_NICENESS and hasattr(os, "SCHED_IDLE"):
        with suppress(PermissionError):  # a sandbox may forbid it; the niceness holds in any case
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def end_with(parent: int) -> None:
    """Wait until a parent process has ended, and end this process then."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Run the module that the command line names."""
    niceness, parent, module, *given = arguments
    lower_priority(int(niceness))
    threading.Thread(target=end_with, args=(int(parent),), name="headstart parent", daemon=True).start()
    sys.argv[1:] = given
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
