"""Training runs that one launch makes one after the other, and what each process saw of them.

    accelerate launch ... tests/train/launched.py JOBS.json

Each job is {"config": FILE.yaml, "report": FILE}; process R writes what it saw to FILE.R.json. A
job may also hold

    "precision"         what loop.precision auto becomes; "measured" for what each process finds
    "batch_tokens"      of the batches that are computed before training
    "other_numbers"     ["R"]: these processes find other acceptance than the rest
    "other_drafts"      ["R"]: these processes draft other tokens in evaluations than the rest
    "failing_callback"  step after which a callback of the main process raises KeyError
    "slow_writer"       seconds that each process waits before it writes its part of a checkpoint
    "broken_writer"     ["R"]: these processes find a full disk when they write a checkpoint
    "stopped_in_answers" {"R": N}: SIGTERM reaches these processes alone, in their N-th answers of
                         evaluations
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from headstart.scripts.command_line import options, run
from headstart.stopping import Stopped
from headstart.train import engines, evaluate, loop, report
from headstart.train.checkpoint_writer import TrainingState
from headstart.train.config import TrainConfig
from headstart.train.features import online as features

RANK = os.environ["RANK"]


class Seen:
    """What this process saw of a run."""

    def __init__(self) -> None:
        self.dtypes: set[str] = set()
        """Of what linear layers gave while something was trained."""
        self.prompts = 0
        """Answered in evaluations."""
        self.batches = 0
        """Of states that were computed before training."""
        self.found: list[list[float]] = []
        """Held-out losses of evaluations, as this process found them."""
        self.reductions = 0
        """Of gradients, by FSDP2."""
        self.gathers = 0
        """Of weights, by FSDP2."""
        self.progress: Any = None
        self.written_at: list[int] = []
        """Steps that had been made when this process wrote its part of a checkpoint."""
        self.ended = "finished"


class Failing(loop.Callback):
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, progress: Any, row: Any) -> None:
        if progress.step == self.step:
            raise KeyError("a mistake")


def as_on_a_gpu() -> None:
    """`torch.is_autocast_enabled()` is about GPUs: here it tells of the CPU, so that libraries
    behave as on one."""
    asked = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device="cpu": asked(device)


def watch(seen: Seen, job: dict[str, Any], patched: list[Any]) -> None:
    """Have the run tell what it does, and do to it what the job asks for."""

    def patch(owner: Any, name: str, value: Any) -> None:
        patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def linear(module: nn.Module, _: Any, output: Any) -> None:
        if (
            isinstance(module, nn.Linear)
            and module.weight.requires_grad
            and torch.is_grad_enabled()
        ):
            seen.dtypes.add(str(output.dtype))

    patched.append(nn.modules.module.register_module_forward_hook(linear))
    answer, judge, end_step, find = (
        evaluate.greedy_answers,
        loop.evaluate,
        loop.MetricsLogger.end_step,
        features.budgeted,
    )
    calls = [0]

    def greedy_answers(target: Any, head: Any, tree: Any, prompts: Any, tokens: int) -> Any:
        seen.prompts += len(prompts)
        if RANK in job.get("other_drafts", []):
            for weight in head.parameters():
                weight.data.zero_()

        calls[0] += 1
        if calls[0] == job.get("stopped_in_answers", {}).get(RANK):
            signal.raise_signal(signal.SIGTERM)
        return answer(target, head, tree, prompts, tokens)

    def judged(*given: Any) -> Any:
        found = judge(*given)
        if found is None:
            return None
        if RANK in job.get("other_numbers", []):
            found.trees["chain"].rows.clear()
            worse = [1 + loss for loss in found.loss_K]
            found = dataclasses.replace(found, loss_K=worse, trees={"chain": found.trees["chain"]})
        seen.found.append(found.loss_K)
        return found

    def ended(self: Any, *given: Any) -> None:
        end_step(self, *given)
        seen.progress = self.progress

    def budgeted(*given: Any) -> Any:
        batches = list(find(*given))
        seen.batches = len(batches)
        return batches

    write, write_files = TrainingState.write, TrainingState.write_files

    def written(self: Any, *given: Any) -> None:
        time.sleep(job.get("slow_writer", 0))
        seen.written_at.append(seen.progress.step)
        write(self, *given)

    def files_written(self: Any, *given: Any) -> None:
        if RANK in job.get("broken_writer", []):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_files(self, *given)

    reduce = _fsdp_param_group.foreach_reduce

    def reduced(*given: Any, **named: Any) -> Any:
        seen.reductions += 1
        return reduce(*given, **named)

    gather = _fsdp_param_group.foreach_all_gather

    def gathered(*given: Any, **named: Any) -> Any:
        seen.gathers += 1
        return gather(*given, **named)

    patch(_fsdp_param_group, "foreach_reduce", reduced)
    patch(_fsdp_param_group, "foreach_all_gather", gathered)
    patch(TrainingState, "write", written)
    patch(TrainingState, "write_files", files_written)
    patch(evaluate, "greedy_answers", greedy_answers)
    patch(loop, "evaluate", judged)
    patch(loop.MetricsLogger, "end_step", ended)
    patch(features, "budgeted", budgeted)
    patch(features, "BATCH_TOKENS", job.get("batch_tokens", features.BATCH_TOKENS))
    precision = job.get("precision")
    if precision != "measured":
        patch(
            engines,
            "formats",
            lambda config, _: (config.dtype, precision or config.loop.precision),
        )


def main(arguments: list[str]) -> None:
    """Make the runs of a file of jobs."""
    as_on_a_gpu()
    # the next run is made by the same processes
    PartialState.destroy_process_group = lambda *_: None
    report.plotted = lambda *_: SimpleNamespace(savefig=lambda path, **_: None)  # takes a second
    for job in json.loads(Path(arguments[0]).read_text()):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        seen, patched = Seen(), []
        watch(seen, job, patched)
        callbacks = [Failing(job["failing_callback"])] if "failing_callback" in job else []
        try:
            loop.train(options(TrainConfig, "train", "", ["--config", job["config"]]), callbacks)
        except (Stopped, OSError, KeyError) as stopped:
            seen.ended = str(stopped)
        for place in patched:
            place.remove() if not isinstance(place, tuple) else setattr(*place)
        progress = dataclasses.asdict(seen.progress) if seen.progress else {}
        found = {**vars(seen), "dtypes": sorted(seen.dtypes), "progress": progress}
        Path(f"{job['report']}.{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run(main, sys.argv[1:])  # which ends processes so that gloo's threads cannot abort them
