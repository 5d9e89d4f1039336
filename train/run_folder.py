"""The folder of a training run: what it was asked to do, where it stands, what it found.

config.yaml        the resolved options; a run is continued only with the same ones
log.jsonl          losses, accuracies and real acceptance, a line each
checkpoints/step-N everything needed to go on: weights, optimizer, schedule, random state, position in the data
best/, last/       head checkpoints: by acceptance length, and after the last step
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from safetensors import SafetensorError

from ..heads import CheckpointMetadata, DraftHead
from ..heads.checkpoints.files import finish_replacing, json_ready
from ..heads.checkpoints.save_load import save_head
from .config import TrainConfig
from .console import log
from .engines import from_main
from .evaluate import Evaluation, summary
from .files import check_options, whole_lines, write_whole
from .samples import Sample
from .tracking import Tracker, flat

CHECKPOINTS = "checkpoints"
FREE_TO_CHANGE = (
    "loop.log_every",
    "loop.eval_every",
    "loop.save_every",
    "loop.keep",
    "loop.tracker",
    "loop.save_dtype",
    "loop.timeout",
    "features.repair",
    "data.cache",
    "data.num_proc",
    "data.workers",
    "plan",
    "output",
    "tracking",
)
"""Options, or groups of them, that may differ when a run is continued: they do not change its weights."""


@dataclass
class Progress:
    """Where a run stands; saved with every checkpoint."""

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
    falling: int = 0
    """Evaluations in a row in which acceptance was below the best while the held-out loss sank."""
    held_out_loss: float = math.inf
    """At the last evaluation, all depths together."""
    judged: int = 0
    """The step of the last evaluation; one that was cut off is made again when the run goes on."""
    processes: int = 1
    """How many processes wrote the checkpoint."""
    engine: str = "one process"
    """The engine that wrote it."""


def whole_checkpoints(folder: Path) -> list[Path]:
    """Those of a run's folder that were written to their end, oldest first."""
    found = (folder / CHECKPOINTS).glob("step-*[0-9]")
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def earlier_options(folder: Path) -> dict[str, Any]:
    """The options, by dotted names, of the run that a folder holds; none as long as it has no checkpoint."""
    path = folder / "config.yaml"
    if not path.exists() or not whole_checkpoints(folder):
        return {}
    return flat(yaml.safe_load(path.read_text(encoding="utf-8")))


class Run:
    """One run's folder; only the main process writes, except for `save`."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self.folder = folder
        self.accelerator = accelerator
        self.tracker = Tracker(accelerator)
        self.epochs_per_step = 0.0
        self.best, self.last = folder / "best", folder / "last"
        self.checkpoints = folder / CHECKPOINTS

    def claim(self, config: TrainConfig) -> None:
        """Write down the options, or check that they are those of the run that is already there.

        Raises:
            ValueError: naming the first option that differs, with both values.
        """
        path = self.folder / "config.yaml"
        asked = dataclasses.asdict(config)
        if before := earlier_options(self.folder):
            advice = "continue it with its own options, or choose another output folder"
            check_options(f"{self.folder} holds a run with", before, flat(json_ready(asked)), advice, FREE_TO_CHANGE)
        elif self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, yaml.safe_dump(json_ready(asked), sort_keys=False))
        self.accelerator.wait_for_everyone()

    @property
    def id(self) -> str:
        """By which a tracker knows the run again when it goes on: the folder."""
        place = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()
        return f"{self.folder.name}-{place[:8]}"

    def resume(self, engine: str) -> Progress:
        """Load the newest whole checkpoint, if there is one, and name those that are half-written.

        Raises:
            ValueError: it was written by an engine, or a number of processes, that this run cannot take over.
        """
        processes = self.accelerator.num_processes
        progress = Progress(processes=processes, engine=engine)
        whole = from_main(self.accelerator, whole_checkpoints(self.folder))
        for partial in sorted(self.checkpoints.glob("*.partial")):
            log.info(f"{partial} is half-written and passed over")
        if whole:
            found = Progress(**json.loads((whole[-1] / "progress.json").read_text(encoding="utf-8")))
            same = (found.engine, found.processes) == (engine, processes)
            movable = {found.engine, engine} <= {"one process", "DDP"} or found.engine == engine == "FSDP2"
            if not same and not movable:
                raise ValueError(
                    f"{whole[-1]} was written by {found.engine} on {found.processes} processes, which {engine} on "
                    f"{processes} cannot go on from; launch it as before, or begin a new run with init_from {self.best}"
                )
            if not same:
                log.info(
                    f"{whole[-1]} was written by {found.engine} on {found.processes} processes: the data goes on at "
                    f"the same place, but sums in another order and draws of other processes make the weights of "
                    f"{engine} on {processes} differ in their last digits"
                )
            self.accelerator.load_state(str(whole[-1]))
            progress = dataclasses.replace(found, processes=processes, engine=engine)
        if self.accelerator.is_main_process and (self.folder / "log.jsonl").exists():
            lines = [line.decode() for line in whole_lines(self.folder / "log.jsonl")]
            kept = [line + "\n" for line in lines if json.loads(line)["step"] <= progress.step]
            write_whole(self.folder / "log.jsonl", "".join(kept))
        if self.accelerator.is_main_process:
            finish_replacing(self.best)
        return progress

    @property
    def newest(self) -> Path | None:
        """The checkpoint that a run would go on from."""
        return next(reversed(whole_checkpoints(self.folder)), None)

    @property
    def newest_step(self) -> int:
        """The step of that checkpoint; 0 if there is none."""
        return 0 if self.newest is None else int(self.newest.name.removeprefix("step-"))

    def checkpoint(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.checkpoints / f"step-{step:08d}"

    def save(self, progress: Progress, keep: int) -> None:
        """Write a checkpoint whole or not at all, then remove those older than the newest `keep`."""
        final = self.checkpoint(progress.step)
        if from_main(self.accelerator, final.exists()):
            return
        partial = final.with_name(final.name + ".partial")
        if self.accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            self.accelerator.save_state(str(partial))
        except (
            OSError,
            RuntimeError,
            SafetensorError,
        ) as error:  # torch and safetensors have their own for a full disk
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(f"{final} cannot be written: {error}") from error
        self.accelerator.wait_for_everyone()  # every process writes a part
        if self.accelerator.is_main_process:
            (partial / "progress.json").write_text(json.dumps(dataclasses.asdict(progress)), encoding="utf-8")
            partial.rename(final)
            for old in whole_checkpoints(self.folder)[:-keep]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def judged(
        self,
        progress: Progress,
        head: DraftHead,
        found: Evaluation,
        metadata: CheckpointMetadata,
        adapter: Any,
        last: bool,
        samples: list[Sample],
    ) -> dict[str, Any]:
        """Log an evaluation; save the head, and its adapter if there is one, if it is the best so far, or the last.

        Returns:
            The line that was logged.
        """
        rows = {name: summary(stats) for name, stats in found.trees.items()}
        # The others might look when the main process has saved it already.
        better = from_main(self.accelerator, found.acceptance_length > progress.best_length or not self.best.exists())
        if better:
            progress.best_step, progress.best_length = progress.step, found.acceptance_length
        row: dict[str, Any] = json_ready(
            {"step": progress.step, "eval": rows, "held_out_loss": found.loss_K, "tree": found.tree}
        )
        if not self.accelerator.is_main_process:
            return row
        axes = {"epoch": self.epochs_per_step * progress.step, "answer_tokens": progress.answer_tokens}
        self.tracker.log({**axes, "eval": curves(found, progress)}, progress.step)
        rates = {tree: figures["acceptance_rate_by_depth"] for tree, figures in row["eval"].items()}
        self.tracker.show(rates, samples, progress.step)
        self.log(row)
        log.info(
            f"step {progress.step}  acceptance length: "
            + ", ".join(f"{name} {stats.acceptance_length:.3f}" for name, stats in found.trees.items())
            + f" on {len(found.trees['chain'].rows)} held-out prompts; best so far {progress.best_length:.3f}"
        )
        if better:
            save_head(head, self.best, metadata, adapter)
        if last:
            save_head(head, self.last, metadata, adapter)
        return row

    def log(self, row: dict[str, Any]) -> None:
        """Append a line to log.jsonl."""
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(json_ready(row)) + "\n")


def curves(found: Evaluation, progress: Progress) -> dict[str, Any]:
    """An evaluation as a tracker's numbers: held-out loss and accuracy by depth, and acceptance of each tree."""
    trees = {}
    for tree, stats in found.trees.items():
        figures = summary(stats)
        low, high = figures.pop("interval")
        trees[tree] = {**figures, "acceptance_length_low": low, "acceptance_length_high": high}
    accuracy_K = [row[0] for row in found.accuracy_KI]
    return {"loss": found.loss_K, "accuracy": accuracy_K, "best_acceptance_length": progress.best_length, **trees}
