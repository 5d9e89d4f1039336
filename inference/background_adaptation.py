"""A head that learns in the background: `headstart adapt` as a process of its own, watched by a thread.

    adaptation = lm.adapt_in_background("adapted", "recorded")
    ...                           # decode as before
    print(adaptation)             # running, taken, not taken, failed, stopped or returned

The process runs at low priority, or on another device, and keeps all that it has done in its output folder: whatever is
killed, the same call goes on from there. It ends with the process that started it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import torch

from ..extras import require_extra
from ..heads.base import DraftHead
from ..heads.checkpoints.save_load import load_head
from .feature_cache import MANIFEST, cache_manifest, check_manifest, kept_layers
from .recording import refuse_if_off
from .target import Target

LOG = "adapt.log"
"""File in the output folder with all that the process prints."""
TAIL = 20
"""Lines of it that the reason of a failure repeats, at most."""
STOP_SECONDS = 30.0
"""Time that `stop` leaves the process to save its state, before it is killed."""
EXIT_SECONDS = 10.0
"""The same when this process ends."""
LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCH_PREFIXES = ("ACCELERATE_", "TORCHELASTIC_", "ROLE_")
"""Environment variables by which a process takes itself for one of a launch, which the new one is not."""

State = Literal["running", "taken", "not taken", "failed", "stopped", "returned"]


class Adaptation:
    """The adaptation of a head that `SpeculativeLM.adapt_in_background` has begun; a context manager that stops it."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        output: Path,
        swap: Callable[[Adaptation, Path], bool | None],
        lock: Any,
        on_change: Callable[[Adaptation], None] | None,
    ) -> None:
        """Start the process.

        Args:
            command: `headstart adapt` with its options.
            environment: of the process.
            output: its output folder.
            swap: takes the new head and returns True, or leaves it, False, as another one than it was compared with
                drafts meanwhile; None in the middle of a generation.
            lock: held by the running generation.
            on_change: called with this object when its state has changed.
        """
        self.output = output
        """Folder with the work so far, and with all results."""
        self.state: State = "running"
        """running; taken: the new head drafts; not taken: it was not better; failed, see `reason`; stopped; returned:
        it was taken, accepted less than the old one, and the old one drafts again."""
        self.reason = ""
        """Why, in words."""
        self._swap = swap
        self._lock = lock
        self._on_change = on_change
        self._ready = False
        """Whether a better head waits to be taken."""
        self._stopping = False
        self._ended = threading.Event()
        """Whether the process has ended, and it is known how."""
        output.mkdir(mode=0o700, parents=True, exist_ok=True)  # it will hold recorded texts
        with (output / LOG).open("ab") as log:
            self._begin = log.tell()
            # In a session of its own: Ctrl-C in a terminal is meant for this process, which stops that one as it ends.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._follow, name="headstart adaptation", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Adaptation({str(self.output)!r}, {self.state}{f': {self.reason}' if self.reason else ''})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether it has yet to end, or its head to be taken."""
        return self.state == "running"

    @property
    def report(self) -> Path | None:
        """The page with the acceptance of both heads; None before they were judged."""
        path = self.output / "report.md"
        return path if path.exists() else None

    @property
    def head(self) -> Path | None:
        """Checkpoint of the new head; None if there is none that is better."""
        path = self.output / "best"
        return path if path.exists() else None

    def wait(self, timeout: float | None = None) -> State:
        """Wait until it has ended, for `timeout` seconds at most, and take the new head if it is better.

        Inside a generation, by a callback, the head is taken at the beginning of the next one.
        """
        if self._ended.wait(timeout):
            self.take()
        return self.state

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """End the process after its present step; it is killed if that takes longer than `timeout` seconds.

        Either way the same call of `adapt_in_background` goes on from what was saved.
        """
        if self._process.poll() is None:
            self._stopping = True
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._ended.wait()

    def take(self) -> None:
        """Have the new head draft, if one waits for that; called between two generations."""
        if not self._ready:
            return
        with self._lock:
            if not self._ready:  # another thread has taken it meanwhile
                return
            try:
                taken = self._swap(self, self.output / "best")
            except Exception as error:  # a head that cannot be taken must not end the program that decodes
                self._ready = False
                self._become("failed", f"the new head cannot be taken: {error}")
                return
            if taken is None:
                return
            self._ready = False
            if taken:
                self._become("taken", f"{self.output / 'best'} accepts more, see {self.output / 'report.md'}")
            else:
                self._become(
                    "not taken", "another head was swapped in meanwhile; lm.swap_head takes this one nevertheless"
                )

    def returned(self, reason: str) -> None:
        """Note that the old head drafts again."""
        self._become("returned", reason)

    def _follow(self) -> None:
        """Wait for the process, in a thread of its own, and see to what follows from its end."""
        status = self._process.wait()
        atexit.unregister(self._at_exit)
        try:
            if self._stopping:
                self._become("stopped", "the same call goes on")
            elif status == 0 and self.head is not None:
                self._ready = True
            elif status == 0 and self.report is not None:
                self._become("not taken", self.report.read_text(encoding="utf-8").rstrip().splitlines()[-1])
            elif status in (0, -signal.SIGTERM):
                self._become("stopped", "by a signal; the same call goes on")
            else:
                self._become("failed", self._failure(status))
        finally:
            self._ended.set()
        self.take()

    def _failure(self, status: int) -> str:
        """The end of what the process printed, or the signal that killed it."""
        with (self.output / LOG).open("rb") as log:
            log.seek(self._begin)
            lines = log.read().decode(errors="replace").splitlines()[-TAIL:]
        if status < 0:
            lines.append(f"killed by {signal.Signals(-status).name}; the same call goes on")
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        return "\n".join(lines[errors[-1] :] if errors else lines)

    def _become(self, state: State, reason: str) -> None:
        self.state = state
        self.reason = reason
        if self._on_change is not None:
            self._on_change(self)

    def _at_exit(self) -> None:
        self.stop(EXIT_SECONDS)


def start_adaptation(
    target: Target,
    head: DraftHead,
    recorded: Path,
    output: Path,
    options: Mapping[str, Any],
    device: str | None,
    threads: int,
    niceness: int,
    swap: Callable[[Adaptation, Path], bool | None],
    on_change: Callable[[Adaptation], None] | None,
) -> Adaptation:
    """Start `headstart adapt` for a decoder's target and head; the other arguments are those of `adapt_in_background`.

    Raises:
        ValueError: see `SpeculativeLM.adapt_in_background`.
    """
    require_extra("accelerate", "adapt_in_background")
    refuse_if_off(f"adapting a head to {str(recorded)!r}")
    if threads < 1 or not 0 <= niceness <= 19:
        raise ValueError(f"threads must be at least 1, and niceness from 0 to 19, not {threads} and {niceness}")
    for name in ("target", "head"):
        if name in options:
            raise ValueError(f"the {name} is the decoder's own: leave out {name}={options[name]!r}")
    if target.name == type(target.model).__name__:
        raise ValueError(
            f"the target is a loaded {target.name} whose folder is not known, and the process that adapts the head "
            "must load it too; load it from a folder or Hub id: SpeculativeLM.from_pretrained(FOLDER, head=...)"
        )
    if target.adapter is not None:
        raise ValueError(
            f"the adapter {target.adapter!r} is merged into the target, and the process that adapts the head would "
            f"load {target.name!r} without it; save the merged model and load that"
        )
    check_recorded(target, head, recorded)
    command = [sys.executable, "-m", "headstart.low_priority", str(niceness), str(os.getpid()), "headstart.scripts"]
    command += ["adapt", "--target", target.name, "--head", str(checkpoint_of(head, output / "head"))]
    command += ["--recorded", str(recorded), "--output", str(output)]
    for name, value in options.items():
        command += [f"--{name}", str(value) if isinstance(value, str | Path) else json.dumps(value)]
    return Adaptation(command, child_environment(device, threads), output, swap, target.lock, on_change)


def check_recorded(target: Target, head: DraftHead, recorded: Path) -> None:
    """Refuse a folder whose answers are not those of a target as it is now, or lack layers that a head reads.

    Raises:
        ValueError: what differs.
    """
    path = recorded / MANIFEST
    if not path.exists():
        raise ValueError(f"no recorded answers in {str(recorded)!r}; `lm.record` writes them")
    before = json.loads(path.read_text(encoding="utf-8"))
    provenance = {**target.current_provenance(), "tokenizer": before.get("tokenizer")}
    layers = kept_layers(head.feature_layers)
    manifest = cache_manifest(provenance, layers, target.info.hidden_size, str(before.get("format")))
    check_manifest(recorded, before, manifest, "adapt to a recording of this target, as it is now, with this head")


def checkpoint_of(head: DraftHead, place: Path) -> Path:
    """The folder of a head's checkpoint: the one that it was loaded from, or `place`, where it is saved.

    Raises:
        ValueError: another head is saved there.
    """
    if head.folder is not None:
        return head.folder
    if not place.exists():
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        head.save_pretrained(place)
        return place
    saved, _ = load_head(place)
    weights = head.state_dict()
    others = saved.state_dict()
    same = type(saved) is type(head) and saved.config == head.config and weights.keys() == others.keys()
    if not same or any(not torch.equal(weights[name].cpu(), others[name]) for name in weights):
        raise ValueError(f"{place.parent} was begun with another head; choose another output")
    return place


def child_environment(device: str | None, threads: int) -> dict[str, str]:
    """The environment of a process that computes on a device, in so many threads.

    Raises:
        ValueError: a device that this process does not see.
    """
    environment = {}
    for name, value in os.environ.items():
        if name not in LAUNCH and not name.startswith(LAUNCH_PREFIXES):
            environment[name] = value
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["MKL_NUM_THREADS"] = str(threads)
    if device is None:
        return environment
    given = torch.device(device)
    if given.type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment
    count = torch.cuda.device_count()
    number = given.index or 0
    if given.type != "cuda" or number >= count:
        known = ", ".join(["cpu", *(f"cuda:{each}" for each in range(count))])
        raise ValueError(f"unknown device {device!r} for adapt_in_background; choose from {known}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    return environment
