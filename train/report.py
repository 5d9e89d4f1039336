"""Metrics of a run, on screen, in log.jsonl and to a tracker; report.md at its end."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from ..console import duration, log, number
from ..files import read_json_lines, reading_back
from ..heads.base import HeadOutput
from ..heads.checkpoints.files import json_ready
from ..inference.trees.stats import acceptance_figures
from ..plots import plotted
from .evaluate import Evaluation
from .run_folder import Progress, RunFolder, read_options
from .tracking import Tracker

PARTS = ("data", "target", "head", "optimizer")
"""Parts of a step: waiting for its batch and for other processes; the target's states, computed or
read from a cache; the head's forward and backward with the exchange of gradients; clipping and the
optimizer. With an adapter the target's forward belongs to the head's."""


@dataclass
class StepClock:
    """Times the parts of steps, by the device's own clock where its work is asynchronous.

    The host's clock would measure how long launching the work takes. Time in which the device waits
    for the host counts for the part in which it waits.
    """

    device: torch.device
    # Parts of the step that runs: name and beginning.
    _begun: list[tuple[str, Any]] = field(default_factory=list)
    # Parts of steps that have ended since the last `totals`: name, beginning and end.
    _done: list[tuple[str, Any, Any]] = field(default_factory=list)

    def part(self, name: str) -> None:
        """Begin a part of the step; "data" begins a step, and discards one that was interrupted."""
        if name == PARTS[0]:
            self._begun = []
        self._begun.append((name, self._moment()))

    def end(self) -> None:
        """End the step."""
        # Each part ends where the next one begins, the last one now.
        names, moments = zip(*self._begun, strict=True)
        self._done += zip(names, moments, [*moments[1:], self._moment()], strict=True)
        self._begun = []

    def totals(self) -> dict[str, float]:
        """Return seconds by part over all steps that ended since the last call."""
        on_cpu = self.device.type == "cpu"
        if self._done and not on_cpu:
            # sync: for the end of the newest step, once for several steps
            self._done[-1][2].synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for name, begin, end in self._done:
            # Events measure in milliseconds.
            seconds[name] += end - begin if on_cpu else begin.elapsed_time(end) / 1000
        self._done = []
        return seconds

    def _moment(self) -> Any:
        """The time now, or an event that the device passes once it has done what was launched."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


class MetricsLogger:
    """Sends the metrics of steps and evaluations to the screen, to log.jsonl and to the tracker."""

    def __init__(
        self,
        run: RunFolder,
        tracker: Tracker,
        every: int,
        steps: int,
        epochs_per_step: float,
        progress: Progress,
    ) -> None:
        """Begin where a run stands.

        Args:
            every: steps between two lines.
            epochs_per_step: part of an epoch in a step.
            progress: the run's state, whose `seconds` are counted here.
        """
        self.run = run
        self.tracker = tracker
        self.every = every
        self.steps = steps
        self.progress = progress
        self.clock = StepClock(run.accelerator.device)
        self.note = ""  # what the progress bar shows
        # Seconds of this start's steps, and those of them in which the head waited for a batch.
        self.stepped = 0.0
        self.waited = 0.0
        self._epochs_per_step = epochs_per_step
        self._outputs: list[HeadOutput] = []  # since the last line
        self._step_started = time.perf_counter()
        self._since = dataclasses.replace(progress)  # the run's state at the last line

    def start_step(self) -> None:
        """Begin to time a step; evaluations and checkpoints are not part of the reported rate."""
        self._step_started = time.perf_counter()
        self.clock.part("data")

    def end_step(self, outputs: list[HeadOutput], norm: float, lr: float) -> dict[str, Any] | None:
        """Add a step's outputs; return the line that was logged, if this step is the `every`-th."""
        # 1. Every step: count its time, and keep its outputs on the device, without a sync.
        progress = self.progress
        progress.seconds += time.perf_counter() - self._step_started
        self.clock.end()
        self._outputs.extend(outputs)
        if not due(progress.step, self.every):
            return None

        # 2. Each `every`-th step: means over the steps since the last line.
        losses_K, counts_K, hits_K = self._totals()
        seconds = progress.seconds - self._since.seconds
        steps = progress.step - self._since.step
        accuracy_K = hits_K / counts_K
        rate = (progress.answer_tokens - self._since.answer_tokens) / seconds
        parts = self.clock.totals()
        self.waited += parts["data"]
        self.stepped += sum(parts.values())
        axes = {
            "epoch": self._epochs_per_step * progress.step,
            "answer_tokens": progress.answer_tokens,
        }
        row: dict[str, Any] = {
            "step": progress.step,
            **axes,
            "loss": (losses_K / counts_K).tolist(),
            "accuracy": accuracy_K.tolist(),
            # A greedy chain reaches depth d if all drafts up to d are right. Accuracies 0.8, 0.5
            # give 1 + 0.8 + 0.8 * 0.5 = 2.2 tokens a round, the bonus token counted.
            "estimated_acceptance_length": 1 + float(accuracy_K.cumprod(0).sum()),
            "gradient_norm": norm,
            "lr": lr,
            "answer_tokens_per_second": rate,
            "step_seconds": {part: parts[part] / steps for part in PARTS},
            "costs": self._costs(rate, parts),
        }
        self._outputs = []
        self._since = dataclasses.replace(progress)

        # 3. Tell the progress bar, the tracker, log.jsonl and the screen.
        self.note = f"loss {row['loss'][0]:.3f}"
        curves = {name: value for name, value in row.items() if name not in ("step", *axes)}
        self.tracker.log({**axes, "train": curves}, progress.step)
        if self.run.accelerator.is_main_process:
            self.run.log(row)
            log.info(
                f"step {progress.step}/{self.steps}  loss {' '.join(map(number, row['loss']))}  "
                f"accuracy {' '.join(map(number, row['accuracy']))}  "
                f"{row['answer_tokens_per_second']:.0f} answer tokens/s  "
                f"{duration(seconds / steps * (self.steps - progress.step))} left"
            )
        return row

    def log_evaluation(self, evaluation: Evaluation) -> dict[str, Any]:
        """Log an evaluation on the main process; return its line of log.jsonl on every process."""
        step = self.progress.step
        rows = {name: acceptance_figures(stats) for name, stats in evaluation.trees.items()}
        row: dict[str, Any] = json_ready(
            {
                "step": step,
                "eval": rows,
                "prompts": len(evaluation.trees["chain"].rows),
                "held_out_loss": evaluation.loss_K,
                "tree": evaluation.tree,
            }
        )
        if not self.run.accelerator.is_main_process:
            return row
        curves: dict[str, Any] = {
            "loss": evaluation.loss_K,
            "accuracy": [accuracy_I[0] for accuracy_I in evaluation.accuracy_KI],
            "best_acceptance_length": self.progress.best_length,
        }
        for tree, figures in rows.items():
            # `row` has a copy of its own, made by `json_ready`, which keeps the interval.
            low, high = figures.pop("interval")
            curves[tree] = {**figures, "acceptance_length_low": low, "acceptance_length_high": high}
        axes = {"epoch": self._epochs_per_step * step, "answer_tokens": self.progress.answer_tokens}
        self.tracker.log({**axes, "eval": curves}, step)
        self.run.log(row)
        lengths = ", ".join(
            f"{name} {stats.acceptance_length:.3f}" for name, stats in evaluation.trees.items()
        )
        log.info(
            f"step {step}  acceptance length: {lengths} on {row['prompts']} held-out"
            f" prompt{'s' * (row['prompts'] != 1)}; best/ is that of step"
            f" {self.progress.best_step}"
        )
        return row

    def _costs(self, rate: float, parts: dict[str, float]) -> dict[str, float | list[float]]:
        """Compute costs per device: rate, memory, and shares of waiting time.

        Waiting time is that in which the head waits for features or data.
        """
        seconds = sum(parts.values())
        peak_memory = peak_memory_gib()
        memory = torch.tensor([peak_memory], device=self.run.accelerator.device)
        return {
            "answer_tokens_per_second_per_device": rate / self.run.accelerator.num_processes,
            "peak_memory_gib": peak_memory,
            "peak_memory_gib_by_process": self.run.accelerator.gather(memory).tolist(),
            "share_waiting_for_features": parts["target"] / seconds,
            "share_waiting_for_data": parts["data"] / seconds,
        }

    def _totals(self) -> torch.Tensor:
        """Sum loss, count and hits per depth, [3, K], over the reported steps and processes."""
        # Batches of short conversations have fewer depths.
        depths = max(len(output.counts_K) for output in self._outputs)
        totals = torch.zeros(3, depths, dtype=torch.float64, device=self.run.accelerator.device)
        for output in self._outputs:
            totals[:, : len(output.counts_K)] += torch.stack(
                [output.losses_K.double(), output.counts_K.double(), output.hits_KI[:, 0].double()]
            )
        totals = self.run.accelerator.reduce(totals, "sum").cpu()
        totals[1].clamp_(min=1)  # what was counted nowhere has the mean 0
        return totals


def peak_memory_gib() -> float:
    """Return this process's peak memory in GiB: of its GPU, else of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    status = Path("/proc/self/status")
    # On Linux getrusage also counts the process that started this one, before it ran its own code.
    if status.exists():
        kib = status.read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0]
        return int(kib) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def due(step: int, every: int) -> bool:
    """Whether a step is a multiple of `every`, where 0 means never."""
    return every > 0 and step % every == 0


def write_report(folder: Path) -> Path:
    """Write report.md with its curves; return its path.

    It needs only log.jsonl and config.yaml in the run's folder.

    Raises:
        ValueError: one of them holds something else.
    """
    config = read_options(folder / "config.yaml")
    log_file = folder / "log.jsonl"
    rows = read_json_lines(log_file)
    with reading_back(log_file, "remove the lines that were changed"):
        # 1. Lines of steps and lines of evaluations.
        steps = [row for row in rows if "loss" in row]
        evaluations = [row for row in rows if "eval" in row]

        # 2. Plot them.
        plots = folder / "plots"
        plots.mkdir(exist_ok=True)
        lengths = {
            tree: [(row["step"], row["eval"][tree]["acceptance_length"]) for row in evaluations]
            for tree in evaluations[-1]["eval"]
        }
        estimated = [(row["step"], row["estimated_acceptance_length"]) for row in steps]
        rates = [(row["step"], row["answer_tokens_per_second"]) for row in steps]
        curves: dict[str, tuple[str, dict[str, list[tuple[int, float]]]]] = {
            "loss": ("loss (nats a token)", by_depth(steps, "loss")),
            "accuracy": ("accuracy", by_depth(steps, "accuracy")),
            "acceptance": (
                "acceptance length (tokens a round)",
                {**lengths, "estimated, chain": estimated},
            ),
            "rate": ("answer tokens a second", {"": rates}),
        }
        for name, (title, shown) in curves.items():
            plotted("step", title, shown).savefig(plots / f"{name}.png", dpi=110)

        # 3. The page.
        page = _page(config, steps, evaluations)
    path = folder / "report.md"
    path.write_text(page, encoding="utf-8")
    return path


def by_depth(rows: list[dict[str, Any]], name: str) -> dict[str, list[tuple[int, float]]]:
    """Return a curve of points (step, value) for each depth."""
    depths = max((len(row[name]) for row in rows), default=0)
    return {
        f"depth {k}": [(row["step"], row[name][k]) for row in rows if len(row[name]) > k]
        for k in range(depths)
    }


def _page(
    config: dict[str, Any], steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> str:
    """Return the text of report.md."""
    # A table with a row for each evaluation and a column for each tree.
    trees = list(evaluations[-1]["eval"])
    table = [
        "| step | held-out loss by depth | prompts | " + " | ".join(trees) + " |",
        "|---|---|---|" + "---|" * len(trees),
    ]
    for row in evaluations:
        losses = " ".join(map(number, row["held_out_loss"]))
        lengths = []
        for figures in row["eval"].values():
            low, high = map(number, figures["interval"])
            lengths.append(f"{number(figures['acceptance_length'], 3)} ({low} to {high})")
        # Runs before version 0.3 have not written it down.
        prompts = row.get("prompts", "-")
        table.append(f"| {row['step']} | {losses} | {prompts} | " + " | ".join(lengths) + " |")
    blocks = [
        f"# {config['head']['type']} for {config['target']}",
        "## Real acceptance length on held-out prompts",
        "\n".join(table),
        "In brackets the 95 % interval: over prompts, or over the rounds of a single one.",
        "![acceptance length](plots/acceptance.png)",
        "## Training",
        "![loss](plots/loss.png)",
        "![accuracy](plots/accuracy.png)",
        "![rate](plots/rate.png)",
    ]
    if steps:
        costs = ["| at the last step | |", "|---|---|"]
        for name, value in steps[-1]["costs"].items():
            if isinstance(value, float):
                costs.append(f"| {name.replace('_', ' ')} | {value:.4g} |")
        blocks.append("\n".join(costs))
    options = yaml.safe_dump(config, sort_keys=False).rstrip()
    blocks += ["## Options", f"```yaml\n{options}\n```"]
    return "\n\n".join(blocks) + "\n"
