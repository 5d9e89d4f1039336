"""The folder of a training run, which survives a kill.

config.yaml         the resolved options, with which a run resumes; those may differ that
                    change no weights
inputs.json         digests of its data, target and tokenizer, which may lie at other paths
                    when it resumes
changes.jsonl       options that changed when it resumed: the step, the name, the values
                    before and after
log.jsonl           losses, accuracies and measured acceptance, one line each
checkpoints/step-N  all that resuming needs: weights, optimizer, schedule, random state,
                    position in the data
best/, last/        head checkpoints: of the longest acceptance length, and after the last step
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import RNG_STATE_NAME, DistributedType, load
from jsonargparse import get_loader
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from ..console import log
from ..files import (
    BROKEN,
    file_sizes,
    flush_to_disk,
    free_bytes,
    naming,
    one_line,
    read_bytes,
    read_json,
    read_json_lines,
    reading_back,
    refuse_pipes,
    require_free,
    write_whole,
)
from ..heads.checkpoints.files import (
    HEAD,
    OF_BROKEN_PICKLES,
    finish_replacing,
    json_ready,
    refuse_foreign,
)
from ..options import by_new_names, check_options, named_by, shown
from .checkpoint_writer import TrainingState, together, writers_group
from .config import TrainConfig
from .engines import any_process, from_main

FREE_TO_CHANGE = (
    "loop.micro_batch",
    "loop.micro_tokens",
    "loop.recompute",
    "loop.log_every",
    "loop.eval_every",
    "loop.save_every",
    "loop.save_minutes",
    "loop.save_in_background",
    "loop.keep",
    "loop.patience",
    "loop.tracker",
    "loop.save_dtype",
    "loop.timeout",
    "loop.shard_over",
    "loop.profile",
    "target_placement",
    "target_attention",
    "features.mode",
    "features.folder",
    "features.limit",
    "data.bad_rows",
    "data.bad_rows_limit",
    "data.cache",
    "data.num_proc",
    "data.workers",
    "eval",
    "plan",
    "output",
    "init_from",
    "tracking",
)
"""Options, or groups of them, that may differ when a run resumes: they change its weights by no
more than rounding."""
BY_DIGEST = ("data.sources", "target", "target_revision")
"""Options that may differ if what they name has not changed, by the digests in inputs.json."""
NO_CHANGE = (
    "output",
    "plan",
    "tracking",
    "loop.log_every",
    "loop.tracker",
    "loop.profile",
    "data.num_proc",
)
"""Options whose changes are not worth a line."""

WORTH_SAYING = 0.1
"""Seconds of waiting for a checkpoint from which on a line is logged."""
INPUTS = "inputs.json"
CHANGES = "changes.jsonl"
OF_INPUTS = {"data": "data.sources", "weights": "target", "tokenizer": "target"}
"""Digests in inputs.json, each with the option that names its subject."""


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested options or numbers to one level of dotted names, leaving out None.

    {"loop": {"keep": 2}, "loss": [0.5, 0.1]} becomes
    {"loop.keep": 2, "loss.0": 0.5, "loss.1": 0.1}.
    """
    if isinstance(value, dict):
        children: Any = value.items()
    # Figures by depth get a name each. Other lists, such as a tree's paths, are one value.
    elif isinstance(value, list) and any(isinstance(item, float) for item in value):
        children = enumerate(value)
    else:
        plain = value if isinstance(value, (int, float, str, bool)) else str(value)
        return {} if value is None else {name: plain}
    rows: dict[str, Any] = {}
    for key, child in children:
        rows |= flat(child, f"{name}.{key}" if name else str(key))
    return rows


@dataclass
class Progress:
    """State of a run; saved with every checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    answer_tokens: int = 0
    """Answer tokens trained on, over all processes."""
    seconds: float = 0.0
    """Time spent in steps, over all starts of the run."""
    best_step: int = 0
    """The step that gave the best head so far."""
    best_length: float = 0.0
    """Its acceptance length."""
    longest_length: float = 0.0
    """The longest acceptance length that was measured."""
    longest_prompts: list[list[int]] = field(default_factory=list)
    """Tokens and rounds of each prompt in that evaluation."""
    falling: int = 0
    """Evaluations in a row in which acceptance was below the best while the held-out loss fell."""
    held_out_loss: float = math.inf
    """At the last evaluation, summed over depths."""
    judged: int = 0
    """The step of the last evaluation; one that was interrupted is repeated when the run
    resumes."""
    processes: int = 1
    """Number of processes that wrote the checkpoint."""
    engine: str = "one process"
    """The engine that wrote it."""

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Read the progress of a checkpoint.

        Raises:
            ValueError: values of other types.
            TypeError: other values than these.
        """
        progress = cls(**read_json(path))
        for name, value in dataclasses.asdict(cls()).items():
            read = getattr(progress, name)
            number = isinstance(value, float) and type(read) in (int, float)
            # A loss is infinite at first, and may be NaN where training failed.
            broken = number and not math.isfinite(read) and name != "held_out_loss"
            if broken or (type(read) is not type(value) and not number):
                raise ValueError(f"{path.name} has {name} {read!r}")
        for pair in progress.longest_prompts:
            if not isinstance(pair, list) or [type(number) for number in pair] != [int, int]:
                raise ValueError(f"{path.name} has longest_prompts {pair!r}")
        return progress


def whole_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run's folder that were written completely, oldest first.

    Other trainers use the same names. Only a folder with a run's progress.json counts, since what
    counts may be removed.
    """
    ours = []
    for path in (folder / "checkpoints").glob("step-*"):
        # step-00000100.partial is still being written, or was when the run was killed.
        if re.fullmatch(r"step-\d+", path.name) and (path / "progress.json").is_file():
            ours.append(path)
    return sorted(ours, key=lambda path: int(path.name.removeprefix("step-")))


def read_options(path: Path) -> dict[str, Any]:
    """Read the options in a run's config.yaml as the command line does: 1e-3 is a number.

    Raises:
        ValueError: a file of something else.
    """
    try:
        text = read_bytes(path)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("its YAML references may be circular or expand without limit")
        options = get_loader("yaml")(text.decode())
        groups = [options["head"], options["loop"], options["optim"]]
        is_config = isinstance(options["target"], str) and "type" in options["head"]
        if not is_config or not all(isinstance(group, dict) for group in groups):
            raise ValueError("target, head, loop and optim are not those of a run")
    except (yaml.YAMLError, *BROKEN) as error:
        raise ValueError(
            f"{path} is not the config of a run ({one_line(error)}): choose another output folder"
        ) from error
    checked: dict[str, Any] = options
    return checked


def earlier_options(folder: Path) -> dict[str, Any]:
    """Read the options, by dotted names, of a folder's run; empty while it has no checkpoint.

    Raises:
        ValueError: a file of something else, or of a run that used an option that is gone.
    """
    path = folder / "config.yaml"
    if not path.exists() or not whole_checkpoints(folder):
        return {}
    options = flat(read_options(path))
    try:
        return by_new_names(options, warn=False)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; choose another output folder") from error


def as_begun(config: TrainConfig) -> TrainConfig:
    """Return the options; for a run that resumes, with the dtypes that it began with.

    A run without held_out_limit in its options has no limit.
    """
    before = earlier_options(Path(config.output))
    if not before:
        return config
    data = config.data
    loop = config.loop
    dtype = config.dtype
    # Otherwise the default would hold out other conversations than the run began with.
    if "data.held_out_limit" not in before:
        data = dataclasses.replace(data, held_out_limit=None)
    with reading_back(Path(config.output) / "config.yaml", "choose another output folder"):
        # "auto" and "fastest" depend on the machine, which may be another one.
        if loop.precision == "auto":
            loop = dataclasses.replace(loop, precision=before.get("loop.precision", "auto"))
        if dtype in ("fastest", "auto"):
            dtype = before.get("dtype", dtype)
        return dataclasses.replace(config, dtype=dtype, data=data, loop=loop)


class Unreadable(ValueError):
    """A checkpoint that is broken."""


@contextmanager
def reading_checkpoint(folder: Path) -> Iterator[None]:
    """Report what is broken in a checkpoint in one line.

    Raises:
        Unreadable: whatever a reader of its files raises.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (
        OSError,
        EOFError,
        RuntimeError,
        SafetensorError,
        CheckpointException,
        pickle.UnpicklingError,
        *OF_BROKEN_PICKLES,
    ) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise Unreadable(f"{folder} cannot be read ({reason})") from error


class RunFolder:
    """One run's files. Only the main process writes, except in `save`."""

    def __init__(self, folder: Path, accelerator: Accelerator, timeout: float = 30.0) -> None:
        """Take a folder for the processes of an accelerator.

        They wait `timeout` minutes for each other's files.
        """
        self.folder = folder
        self.accelerator = accelerator
        self.timeout = timeout
        # One thread: checkpoints are written one after another.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # The writers' process group, made at the first checkpoint.
        self._group: Any = None
        # The checkpoint that the thread is writing.
        self._in_flight: Future[None] | None = None
        # Complete checkpoints that `written` has not yielded yet; the thread appends to it.
        self._written: deque[tuple[Progress, Path]] = deque()
        self.best = folder / "best"
        self.last = folder / "last"
        self.checkpoints = folder / "checkpoints"

    def claim(self, config: TrainConfig) -> None:
        """Save the options, or check that they are those of the run that is already there.

        Raises:
            ValueError: other options, or files that the run would replace and that are not a run's.
        """
        refuse_pipes(self.folder)
        for folder in (self.best, self.last):
            refuse_foreign(folder, HEAD)
        if (self.folder / "config.yaml").exists():  # it is replaced
            read_options(self.folder / "config.yaml")
        options = json_ready(dataclasses.asdict(config))
        before = earlier_options(self.folder)
        if before:
            # Without digests the options themselves must be the same.
            by_digest = BY_DIGEST if (self.folder / INPUTS).exists() else ()
            advice = "resume it with its own options, or choose another output folder"
            if self.last.exists():
                advice = (
                    f"it is finished: to train its head further, give init_from {str(self.last)!r}"
                    " and another output folder"
                )
            free = (*FREE_TO_CHANGE, *config.free_to_change, *by_digest)
            check_options(f"{self.folder} holds a run with", before, flat(options), advice, free)
        elif self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "config.yaml", yaml.safe_dump(options, sort_keys=False))
        self.accelerator.wait_for_everyone()

    def check_inputs_unchanged(self, config: TrainConfig, inputs: Mapping[str, str]) -> None:
        """Check the digests of data, target and tokenizer, and record options that have changed.

        Raises:
            ValueError: the digests are not those that the run began with.
        """
        path = self.folder / INPUTS
        before = earlier_options(self.folder)
        if before and path.exists():
            digests = read_json(path)
            if not isinstance(digests, dict):
                raise ValueError(f"{path} does not hold the digests of a run; remove it")
            for name, option in OF_INPUTS.items():
                if digests.get(name) != inputs.get(name):
                    raise ValueError(
                        f"{self.folder} holds a run whose {name} had the digest"
                        f" {shown(digests.get(name))};"
                        f" with {option} {attrgetter(option)(config)!r} it is {inputs.get(name)}:"
                        " give what the run began with, or choose another output folder"
                    )
        self.accelerator.wait_for_everyone()  # all have read what is now written
        if self.accelerator.is_main_process:
            write_whole(path, json.dumps(dict(inputs), indent=1))
            if before:
                self._keep_changes(before, config)
        self.accelerator.wait_for_everyone()

    def _keep_changes(self, before: dict[str, Any], config: TrainConfig) -> None:
        """Write options that differ from those of a run that resumes, and log them."""
        options = json_ready(dataclasses.asdict(config))
        now = flat(options)
        # Steps are made again from the newest checkpoint on, with the new options.
        step = int(whole_checkpoints(self.folder)[-1].name.removeprefix("step-"))
        changes = []
        for name in sorted(before.keys() | now.keys()):
            old = before.get(name)
            new = now.get(name)
            if old != new and not named_by(NO_CHANGE, name):
                changes.append({"step": step, "name": name, "before": old, "now": new})
                log.info(f"from step {step} on with {name} {new!r}; before it was {old!r}")
        path = self.folder / CHANGES
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(change) + "\n" for change in changes)
        write_whole(self.folder / "config.yaml", yaml.safe_dump(options, sort_keys=False))

    def changes(self) -> list[dict[str, Any]]:
        """Options that have changed since the run began, with the steps from which on they hold."""
        path = self.folder / CHANGES
        if not path.exists():
            return []
        return read_json_lines(path)

    def resume(self, engine: str) -> Progress:
        """Load the newest complete checkpoint, if there is one; return the run's progress.

        Raises:
            ValueError: this engine cannot resume from the checkpoint.
        """
        processes = self.accelerator.num_processes
        progress = Progress(processes=processes, engine=engine)
        # 1. The main process's list: others may see the folder a moment later.
        whole = from_main(self.accelerator, whole_checkpoints(self.folder))
        for half in sorted(self.checkpoints.glob("*.partial")):
            log.info(f"{half} is half-written and skipped")
        # 2. Load the newest one that can be read.
        for checkpoint in reversed(whole):
            loaded = self._load(checkpoint, engine, last=checkpoint == whole[0])
            if loaded is not None:
                progress = loaded
                break

        # 3. Remove what was logged after the checkpoint: these steps are made again. A kill may
        # also have come between the two renames that replace best/.
        if self.accelerator.is_main_process:
            rows = self.folder / "log.jsonl"
            if rows.exists():
                # A killed process leaves at most one half-written line, the last.
                lines = read_bytes(rows).splitlines(keepends=True)
                whole_lines = [line for line in lines if line.endswith(b"\n")]
                still_true = []
                for number, line in enumerate(whole_lines, start=1):
                    with reading_back(f"{rows}, line {number}", "remove it"):
                        if json.loads(line)["step"] <= progress.step:
                            still_true.append(line.decode())
                write_whole(rows, "".join(still_true))
            finish_replacing(self.best)
        return progress

    def _load(self, checkpoint: Path, engine: str, last: bool) -> Progress | None:
        """Load a checkpoint, and return its progress; None if it is broken.

        A broken one is renamed, so that its step can be saved again; the `last` one raises.
        """
        processes = self.accelerator.num_processes
        broken: Unreadable | None = None
        try:
            # 1. Can this engine read it? Engines that keep the head whole read each other's, on any
            # number of processes. FSDP2 redistributes its shards. DeepSpeed does neither.
            with reading_checkpoint(checkpoint):
                saved = Progress.read(checkpoint / "progress.json")
            written = f"{checkpoint} was written by {saved.engine} on {saved.processes} processes"
            both_whole = {saved.engine, engine} <= {"one process", "DDP"}
            movable = both_whole or saved.engine == engine == "FSDP2"
            if (saved.engine, saved.processes) != (engine, processes):
                if not movable:
                    raise ValueError(
                        f"{written}, which {engine} on {processes} cannot resume from; launch it as"
                        f" before, or begin a new run with init_from {self.best}"
                    )
                log.info(
                    f"{written}: the data continues at the same place, but sums in another order"
                    f" and random draws of other processes make the weights of {engine} on"
                    f" {processes} differ in their last digits"
                )

            # 2. Load everything that was prepared or registered, random states included.
            with reading_checkpoint(checkpoint):
                refuse_pipes(checkpoint)
                process = self.accelerator.process_index
                if process < saved.processes:
                    # For its error: accelerate goes on without random states that it cannot read.
                    load(checkpoint / f"{RNG_STATE_NAME}_{process}.pkl")
                self.accelerator.load_state(str(checkpoint))
        except Unreadable as error:
            broken = error

        # 3. What one process cannot read no process resumes from.
        if not any_process(self.accelerator, broken is not None):
            return dataclasses.replace(saved, processes=processes, engine=engine)
        reason = str(broken or f"{checkpoint} cannot be read by another process")
        if last:
            raise ValueError(
                f"{reason}, and there is no earlier checkpoint: remove it, and the run begins again"
            ) from broken
        log.warning(f"{reason}: the run resumes from the checkpoint before it")
        if self.accelerator.is_main_process:
            aside = checkpoint.with_name(f"{checkpoint.name}.broken")
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.rename(aside)
        return None

    def check_space(self, size: int, keep: int) -> None:
        """Refuse a disk without room for a checkpoint of about `size` bytes.

        Warn if `keep` checkpoints and one more do not fit.

        Raises:
            OSError: less is free than a checkpoint takes.
        """
        if not self.accelerator.is_main_process:
            return
        require_free(self.folder, size, "a checkpoint to resume from")
        # One more than `keep`: an old checkpoint is removed only once the new one is complete.
        present = sum(file_sizes(path) for path in whole_checkpoints(self.folder))
        free = free_bytes(self.folder)
        if (keep + 1) * size - present > free:
            log.warning(
                f"{keep + 1} checkpoints of about {size / 2**30:.2f} GiB (loop.keep, and the one"
                f" that is written) do not fit into the {free / 2**30:.2f} GiB that are free at"
                f" {self.folder}; lower loop.keep"
            )

    def newest(self) -> Path | None:
        """Return the checkpoint from which a run would resume."""
        return next(reversed(whole_checkpoints(self.folder)), None)

    def save(self, progress: Progress, keep: int, background: bool = False) -> None:
        """Write a checkpoint completely or not at all, and remove all but the newest `keep`.

        It first waits for the previous one. With `background` a thread writes a copy of the state,
        and steps may go on; `wait` raises its errors. DeepSpeed writes its own files, before this
        returns.

        Raises:
            OSError: this checkpoint, or the previous one, cannot be written.
        """
        # 1. Is there anything to write? A run that has just resumed is at its checkpoint's step.
        self.wait()
        final = self.checkpoints / f"step-{progress.step:08d}"
        saved = dataclasses.replace(progress)  # a copy: later steps change `progress`
        if from_main(self.accelerator, final in whole_checkpoints(self.folder)):
            self._written.append((saved, final))
            return
        if from_main(self.accelerator, final.exists()):
            raise ValueError(
                f"{final} is there and was not written by this run: choose another output folder"
            )

        # 2. Write into step-N.partial, which `resume` skips, and rename it once it is complete.
        if self._group is None:
            self._group = writers_group(self.timeout)
        half = final.with_name(final.name + ".partial")

        def begin() -> None:
            if not self.accelerator.is_main_process:
                return
            shutil.rmtree(half, ignore_errors=True)  # of an earlier start that was killed
            # The last checkpoint's size is the best estimate of this one's.
            newest = self.newest()
            if newest is not None:
                require_free(self.folder, file_sizes(newest), f"the checkpoint {final}")
            half.mkdir(parents=True)

        together(begin, self._group)

        # 3. Collect the state now, and write it now or in the background.
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            self._write(partial(self.accelerator.save_state, str(half)), saved, half, final, keep)
            return
        state = TrainingState.of(self.accelerator)
        if not background:
            self._write(partial(state.write, half, self._group), saved, half, final, keep)
            return
        # The copy is complete before this returns, so that the next step does not change it.
        write = partial(state.copied().write, half, self._group)
        self._in_flight = self._writer.submit(self._write, write, saved, half, final, keep)

    def _write(
        self, write: Callable[[], None], progress: Progress, half: Path, final: Path, keep: int
    ) -> None:
        """Write a checkpoint to the folder `half`, and rename that to `final`.

        It is renamed once all processes have written their parts.
        """

        def flush() -> None:
            if self.accelerator.is_local_main_process:
                flush_to_disk(half)

        def complete() -> None:
            if not self.accelerator.is_main_process:
                return
            write_whole(half / "progress.json", json.dumps(dataclasses.asdict(progress)))
            # Killed before this line, the run resumes from the previous checkpoint; after it, from
            # this one.
            half.rename(final)
            for old in whole_checkpoints(self.folder)[:-keep]:
                shutil.rmtree(old)

        try:
            # Three meetings: nobody renames before all have written, to the disk of every machine,
            # and nobody goes on before the main process has renamed.
            for work in (write, flush, complete):
                together(work, self._group)
        except OSError as error:
            if self.accelerator.is_main_process:
                shutil.rmtree(half, ignore_errors=True)
            raise OSError(f"{final} cannot be written: {error}") from error
        self._written.append((progress, final))

    def wait(self) -> None:
        """Wait for the checkpoint that a thread writes, if there is one.

        Raises:
            OSError: it cannot be written.
        """
        if self._in_flight is None:
            return
        in_flight = self._in_flight
        self._in_flight = None  # before the result, which may raise: an error is raised once
        started = time.monotonic()
        try:
            in_flight.result()
        finally:
            waited = time.monotonic() - started
            if waited >= WORTH_SAYING:
                log.info(f"waited {waited:.1f} s for the checkpoint before to be written")

    def failed(self) -> bool:
        """Whether the checkpoint in flight has failed; the next `save` or `wait` then raises.

        A run asks after each step, so that it does not train for long without a checkpoint.
        """
        return (
            self._in_flight is not None
            and self._in_flight.done()
            and self._in_flight.exception() is not None
        )

    def written(self) -> Iterator[tuple[Progress, Path]]:
        """Yield progress and folder of each checkpoint completed since the last call.

        The progress is the run's state that the checkpoint holds.
        """
        while self._written:
            yield self._written.popleft()

    def close(self) -> None:
        """Let the checkpoint in flight become complete, even if the run ends with an error.

        An error of the checkpoint itself is only logged as a warning.
        """
        try:
            self.wait()
        except (OSError, RuntimeError) as error:
            log.warning(str(error))

    def log(self, row: dict[str, Any]) -> None:
        """Append a line to log.jsonl."""
        path = self.folder / "log.jsonl"
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(json_ready(row)) + "\n")
