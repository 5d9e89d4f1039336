"""Adaptations of a head that are killed at a change of a file, one after the other, each in a
process of its own.

    python tests/addons/record/killed.py JOB.json

The job holds `config`, the options of `headstart adapt`, and `every`. A change of a file or folder
below its output, such as a rename, is one of some hundred points at which SIGKILL can come; every
so many-th is tried, and the last but one. After each the same command runs again, to its end.
`report` is the file for what was found: of a run that nobody killed, and of each that was, `files`,
the digests of its results by name, and `point`, what was about to be changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from headstart.addons.record.adapt import adapt
from headstart.addons.record.config import AdaptConfig
from headstart.console import show_on_console

CHANGES = ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "open")
"""Audit events of changes; `open` only where it is for writing."""
RESULTS = (
    "report.md",
    "best/model.safetensors",
    "recorded/training.jsonl",
    "recorded/judged.jsonl",
)


def count_changes(output: Path, kill_at: int, log: Path) -> None:
    """Write each change below the output folder to a log, and kill this process before one of
    them."""
    made = [0]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not any(
            str(path).startswith(str(output)) for path in arguments[:2]
        ):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        made[0] += 1
        os.write(descriptor, f"{event} {arguments[0]}\n".encode())
        if made[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run(config: AdaptConfig, kill_at: int, log: Path) -> int:
    """Adapt in a process of its own; return how it ended, and leave its changes in `log`."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            count_changes(Path(config.output), kill_at, log)
            adapt(config)
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitpid(child, 0)[1]


def results(output: Path) -> dict[str, str]:
    """Digests of the results, and the names of what half-written files are left."""
    found = {name: hashlib.sha256((output / name).read_bytes()).hexdigest() for name in RESULTS}
    for path in output.rglob("*.partial"):
        found[str(path)] = "left behind"
    return found


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    config = AdaptConfig(**job["config"])
    output = Path(config.output)
    log = Path(job["report"]).with_suffix(".log")
    show_on_console()
    assert os.waitstatus_to_exitcode(run(config, -1, log)) == 0
    found = [{"point": "", "files": results(output)}]
    changes = len(log.read_text().splitlines())
    for point in [*range(1, changes - 1, job["every"]), changes - 1]:
        shutil.rmtree(output)
        assert os.waitstatus_to_exitcode(run(config, point, log)) == -signal.SIGKILL
        changed = log.read_text().splitlines()[-1]
        ended = os.waitstatus_to_exitcode(run(config, -1, log))
        found.append(
            {
                "point": f"{point} of {changes}: {changed}",
                "files": results(output) if ended == 0 else {},
            }
        )
        Path(job["report"]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
