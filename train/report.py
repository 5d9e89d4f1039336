"""What a run says of itself while it goes: on screen, in log.jsonl, and to a tracker."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import resource
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode

from ..heads import DraftHead, HeadOutput
from ..inference import Target
from .console import console, duration
from .data import Example, collate
from .features import online_features

if TYPE_CHECKING:
    from .run import Progress, Run

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


class Tracker:
    """accelerate's tracker; one that cannot be reached is given up, and training goes on."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.reached = True

    def start(self, options: dict[str, Any], run_id: str) -> None:
        """Begin, or go on with, the run of this id."""
        init = {"wandb": {"id": run_id, "resume": "allow"}, "trackio": {"name": run_id, "resume": "allow"}}
        with self._forgiven():
            self.accelerator.init_trackers("headstart", config=flat(options), init_kwargs=init)

    def log(self, row: dict[str, Any], step: int) -> None:
        """Send numbers."""
        if self.reached:
            with self._forgiven():
                self.accelerator.log(flat(row), step=step)

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # trackers raise errors of their own, by network, disk or account
            self.reached = False
            self.accelerator.print(f"the tracker cannot be reached and is left out, training goes on: {error}")


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
        self.note = ""
        self._outputs: list[HeadOutput] = []
        self._step_started = time.perf_counter()
        self._waited = 0.0
        self._since = dataclasses.replace(progress)
        self._flops_per_token = flops_per_token

    def start_step(self) -> None:
        """Only steps are timed: evaluations and checkpoints do not slow the reported rate down."""
        self._step_started = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what a step waits for: its features."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def end_step(self, outputs: list[HeadOutput], norm: float, lr: float) -> None:
        """Take a step's outputs; write a line if it is time."""
        progress = self.progress
        progress.seconds += time.perf_counter() - self._step_started
        self._outputs.extend(outputs)
        if not due(progress.step, self.every):
            return
        losses_K, counts_K, hits_K = self._totals()
        seconds, steps = progress.seconds - self._since.seconds, progress.step - self._since.step
        accuracy_K = hits_K / counts_K
        rate = (progress.answer_tokens - self._since.answer_tokens) / seconds
        row = {
            "step": progress.step,
            "loss": (losses_K / counts_K).tolist(),
            "accuracy": accuracy_K.tolist(),
            "estimated_acceptance_length": 1 + float(accuracy_K.cumprod(0).sum()),
            "gradient_norm": norm,
            "lr": lr,
            "answer_tokens_per_second": rate,
            "costs": self._costs(rate, seconds),
        }
        self._outputs, self._since, self._waited = [], dataclasses.replace(progress), 0.0
        self.note = f"loss {row['loss'][0]:.3f}"
        self.run.tracker.log(row, progress.step)
        if self.run.accelerator.is_main_process:
            self.run.log(row)
            console.print(
                f"step {progress.step}/{self.steps}  loss {_figures(row['loss'])}  "
                f"accuracy {_figures(row['accuracy'])}  "
                f"{row['answer_tokens_per_second']:.0f} answer tokens/s  "
                f"{duration(seconds / steps * (self.steps - progress.step))} left"
            )

    def _costs(self, rate: float, seconds: float) -> dict[str, float | None]:
        """Of each device: its rate, its arithmetic, its memory, and the share of time that features were waited for."""
        devices = self.run.accelerator.num_processes
        tflops = rate / devices * self._flops_per_token / 1e12
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = None
        if torch.cuda.is_available():
            memory = torch.cuda.max_memory_allocated()
            peak = peak_tflops(torch.cuda.get_device_name())
        return {
            "answer_tokens_per_second_per_device": rate / devices,
            "teraflops_per_device": tflops,
            "model_flop_utilisation": None if peak is None else tflops / peak,
            "peak_memory_gib": memory / 2**30,
            "share_waiting_for_features": self._waited / seconds,
        }

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


def count_flops(target: Target, head: DraftHead, examples: list[Example], cached: bool, adapted: bool) -> float:
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


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested options or numbers as one level of dotted names; those that are not set are left out."""
    if isinstance(value, dict):
        children: Any = value.items()
    elif isinstance(value, list) and any(isinstance(item, float) for item in value):
        children = enumerate(value)
    else:
        plain = value if isinstance(value, (int, float, str, bool)) else str(value)
        return {} if value is None else {name: plain}
    rows: dict[str, Any] = {}
    for key, child in children:
        rows |= flat(child, f"{name}.{key}" if name else str(key))
    return rows


def _figures(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
