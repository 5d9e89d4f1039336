"""What a run reports while it trains: losses, rates, time by part and costs, on screen, in log.jsonl, to a tracker."""

from __future__ import annotations

import dataclasses
import re
import resource
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..heads import DraftHead, HeadOutput
from ..inference import Target
from .console import duration, log
from .data.batches import collate
from .data.chat_template import Example
from .features.online import online_features

if TYPE_CHECKING:
    from .run_folder import Progress, Run

PEAK_TFLOPS = {
    r"NVIDIA A100( \d+GB PCIe|-(SXM4|PCIE)-\d+GB)": 312,
    r"NVIDIA A10": 125,
    r"NVIDIA L4": 121,
    r"NVIDIA L40S": 362,
    r"NVIDIA H100 PCIe": 756,
    r"NVIDIA H100 NVL": 835,
    r"NVIDIA H100 \d+GB HBM3": 989,
    r"NVIDIA GH200 \d+GB?( HBM3e)?": 989,
    r"NVIDIA H200": 989,
    r"NVIDIA H200 NVL": 835,
    r"NVIDIA B200": 2250,
    r"NVIDIA GB200": 2500,
    r"NVIDIA B300( SXM6 AC)?": 2250,
    r"NVIDIA GB300": 2500,
    r"NVIDIA GeForce RTX 4090": 165,
    r"NVIDIA GeForce RTX 5090": 209,
    r"AMD Instinct MI300X( OAM)?": 1307,
    r"AMD Instinct MI300A": 980,
}
"""Peak dense bfloat16 arithmetic in TFLOP/s, without sparsity, by a pattern of the device's whole name as torch gives
it. One chip's name comes with several peaks (H100 SXM, PCIe, NVL), and a part of a name would also match what is
slower (RTX 4090 Laptop GPU, RTX 4090 D, a MIG slice of an A100), so a device that is not listed has no peak."""


PARTS = ("data", "target", "head", "optimizer")
"""Of a step: waiting for its batch and for other processes; the target's states, computed or read from a cache; the
head's forward and backward with the exchange of gradients; clipping and the optimizer. With an adapter the target's
forward is a part of the head's."""


class StepClock:
    """Times the parts of steps by the device's own clock where its work is asynchronous.

    There the host only launches work, and its clock would tell how long launching takes. What a device waits for the
    host counts as time of the part in which it waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: list[tuple[str, Any]] = []
        self._done: list[tuple[str, Any, Any]] = []

    def part(self, name: str) -> None:
        """Say which part begins now."""
        self._begun.append((name, self._moment()))

    def end(self) -> None:
        """Say that a step ended now."""
        names, moments = zip(*self._begun, strict=True)
        self._done += zip(names, moments, [*moments[1:], self._moment()], strict=True)
        self._begun = []

    def drop(self) -> None:
        """Forget a step that did not end."""
        self._begun = []

    def totals(self) -> dict[str, float]:
        """Seconds by part, over all steps that ended since this was last asked."""
        if self._done and self._device.type != "cpu":
            self._done[-1][2].synchronize()  # sync: for the end of the newest step, once for several steps
        seconds = dict.fromkeys(PARTS, 0.0)
        for name, begin, end in self._done:
            seconds[name] += end - begin if self._device.type == "cpu" else begin.elapsed_time(end) / 1000
        self._done = []
        return seconds

    def _moment(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


class Report:
    """Losses, rates and what they cost, every `every` steps."""

    def __init__(self, run: Run, every: int, steps: int, progress: Progress, flops_per_token: float) -> None:
        """Begin.

        Args:
            run: whose folder and tracker the lines go to.
            every: steps between two lines.
            steps: of the whole run.
            progress: where it stands.
            flops_per_token: arithmetic of a step, for each answer token.
        """
        self.run, self.every, self.steps, self.progress = run, every, steps, progress
        self._clock = StepClock(run.accelerator.device)
        self.note = ""
        self._outputs: list[HeadOutput] = []
        self._step_started = time.perf_counter()
        self._since = dataclasses.replace(progress)
        self._flops_per_token = flops_per_token

    def start_step(self) -> None:
        """Only steps are timed: evaluations and checkpoints do not slow the reported rate down."""
        self._step_started = time.perf_counter()
        self._clock.drop()
        self._clock.part("data")

    def part(self, name: str) -> None:
        """Say which of `PARTS` of a step begins now."""
        self._clock.part(name)

    def end_step(self, outputs: list[HeadOutput], norm: float, lr: float) -> dict[str, Any] | None:
        """Take a step's outputs; return the line that was logged, if it was time for one."""
        progress = self.progress
        progress.seconds += time.perf_counter() - self._step_started
        self._clock.end()
        self._outputs.extend(outputs)
        if not due(progress.step, self.every):
            return None
        losses_K, counts_K, hits_K = self._totals()
        seconds, steps = progress.seconds - self._since.seconds, progress.step - self._since.step
        accuracy_K = hits_K / counts_K
        rate = (progress.answer_tokens - self._since.answer_tokens) / seconds
        parts = self._clock.totals()
        row: dict[str, Any] = {
            "step": progress.step,
            "epoch": self.run.epochs_per_step * progress.step,
            "answer_tokens": progress.answer_tokens,
            "loss": (losses_K / counts_K).tolist(),
            "accuracy": accuracy_K.tolist(),
            "estimated_acceptance_length": 1 + float(accuracy_K.cumprod(0).sum()),
            "gradient_norm": norm,
            "lr": lr,
            "answer_tokens_per_second": rate,
            "step_seconds": {part: parts[part] / steps for part in PARTS},
            "costs": self._costs(rate, parts),
        }
        self._outputs, self._since = [], dataclasses.replace(progress)
        self.note = f"loss {row['loss'][0]:.3f}"
        axes = {"epoch": row["epoch"], "answer_tokens": row["answer_tokens"]}
        curves = {name: value for name, value in row.items() if name not in ("step", *axes)}
        self.run.tracker.log({**axes, "train": curves}, progress.step)
        if self.run.accelerator.is_main_process:
            self.run.log(row)
            log.info(
                f"step {progress.step}/{self.steps}  loss {_figures(row['loss'])}  "
                f"accuracy {_figures(row['accuracy'])}  "
                f"{row['answer_tokens_per_second']:.0f} answer tokens/s  "
                f"{duration(seconds / steps * (self.steps - progress.step))} left"
            )
        return row

    def _costs(self, rate: float, parts: dict[str, float]) -> dict[str, float | list[float] | None]:
        """Costs per device: rate, arithmetic, memory, and the shares of time in which the head waits."""
        devices = self.run.accelerator.num_processes
        tflops = rate / devices * self._flops_per_token / 1e12
        peak = peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        seconds = sum(parts.values())
        memory = torch.tensor([self._peak_memory()], device=self.run.accelerator.device)
        return {
            "answer_tokens_per_second_per_device": rate / devices,
            "teraflops_per_device": tflops,
            "model_flop_utilisation": None if peak is None else tflops / peak,
            "peak_memory_gib": self._peak_memory(),
            "peak_memory_gib_by_process": self.run.accelerator.gather(memory).tolist(),
            "share_waiting_for_features": parts["target"] / seconds,
            "share_waiting_for_data": parts["data"] / seconds,
        }

    def _peak_memory(self) -> float:
        """GiB that this process held at most: of its GPU, else of the host."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30

    def _totals(self) -> torch.Tensor:
        """Loss, count and hits per depth, summed over the reported steps and over processes."""
        depths = max(len(output.counts_K) for output in self._outputs)
        totals = torch.zeros(3, depths, dtype=torch.float64, device=self.run.accelerator.device)
        for output in self._outputs:
            totals[:, : len(output.counts_K)] += torch.stack(
                [output.losses_K.double(), output.counts_K.double(), output.hits_KI[:, 0].double()]
            )
        totals = self.run.accelerator.reduce(totals, "sum").cpu()
        totals[1].clamp_(min=1)
        return totals


def count_flops(target: Target, head: DraftHead, examples: Sequence[Example], cached: bool, adapted: bool) -> float:
    """Arithmetic of a training step, for each answer token, counted on some sequences.

    A backward takes twice the arithmetic of its forward; a frozen target has none, and with a cache no forward either.
    Counted apart from training: what counts changes how operations are carried out, and so their last digits.
    """
    batch = collate(examples)
    with torch.random.fork_rng(), torch.no_grad():
        with FlopCounterMode(display=False) as of_target:
            features = online_features(target, head, batch, next(head.parameters()).dtype)
        with FlopCounterMode(display=False) as of_head:
            head(features)
    target_flops = 0 if cached else of_target.get_total_flops() * (3 if adapted else 1)
    return (target_flops + 3 * of_head.get_total_flops()) / max(int(batch.loss_mask_BT.sum()), 1)


def peak_tflops(name: str) -> float | None:
    """Peak dense bfloat16 arithmetic of a device by its name, in TFLOP/s; None if it is not known."""
    return next((peak for pattern, peak in PEAK_TFLOPS.items() if re.fullmatch(pattern, name)), None)


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens now."""
    return every > 0 and step % every == 0


def _figures(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
