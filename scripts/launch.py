"""`accelerate launch` that ends in one line, without a traceback.

Usage: `python -m headstart.scripts.launch --config_file F scripts/train.py ...`.

The arguments are those of `accelerate launch`. Ctrl-C and SIGTERM are passed on to the processes,
which stop after their step with a checkpoint, however long that takes; the exit status is then 0.
If a process fails, one line names it; `accelerate launch` prints a traceback of its own in both
cases, and ends processes 30 seconds after a signal.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from headstart.stopping import SIGNALS

HANDLED_BY_TORCH = "SIGHUP,SIGQUIT"
"""Signals at which torch's launcher ends the processes itself."""


def main(arguments: list[str]) -> int:
    """Launch processes with the arguments of `accelerate launch`; return the exit status."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = launch_command_parser().parse_args(arguments)
    options.signals_to_handle = HANDLED_BY_TORCH
    for number in SIGNALS:
        signal.signal(number, pass_on)
    try:
        launch_command(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # Processes that have lost it may be seen to end before it, and torch ends the last ones by
        # SIGTERM. So the one that another signal has killed is the first.
        for failed_rank, failed in error.failures.items():
            if failed.exitcode < 0 and failed.exitcode != -signal.SIGTERM:
                rank = failed_rank
                failure = failed
        # The process itself has said why.
        if failure.exitcode in (1, 2):
            return int(failure.exitcode)
        cause = f"exit status {failure.exitcode}"
        if failure.exitcode < 0:
            cause = f"signal {signal.Signals(-failure.exitcode).name}"
        print(
            f"error: rank {rank} ended with {cause}; the same command resumes from the newest"
            " checkpoint",
            file=sys.stderr,
        )
        return 1
    return 0


def pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal to the launched processes, unless the terminal has sent it to them already."""
    import psutil  # accelerate needs it

    # Ctrl-C reaches the whole process group of the terminal; SIGTERM reaches this process alone.
    for process in psutil.Process().children():
        if number != signal.SIGINT or os.getpgid(process.pid) != os.getpgid(0):
            process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
