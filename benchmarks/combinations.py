"""Training on two processes in combinations of options: none hangs or crashes, and all have the
losses of one process.

    python benchmarks/combinations.py                # all pairs of values, each in at least one run
    python benchmarks/combinations.py --runs 4       # the first four of them
    python benchmarks/combinations.py --plant hang   # with a fault: the run that hangs,
                                                     # and where each rank waits

Ends with a table in Markdown; the exit status is 1 if a run failed. Every run has a time limit of
its own, after which each of its processes says where it stands.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from launches import ROOT, forget_launch, launch, write_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.scripts.command_line import options, run
from headstart.train import loop
from headstart.train.config import (
    DataConfig,
    EvalConfig,
    FeaturesConfig,
    LoopConfig,
    OptimConfig,
    TrainConfig,
)
from headstart.train.features import online

AXES: dict[str, Sequence[Any]] = {
    "engine": ("ddp", "zero1", "zero2", "fsdp2"),
    "placement": ("shard", "whole"),
    "features": ("auto", "cached", "online"),
    "start": ("last", "random"),
    "rows": (9, 11, 12),
    "micro batch": (None, 2),
}
"""Values that are combined. An engine is a launch file of configs/accelerate. Rows are sequences to
train on, in steps of eight: the last step of an epoch leaves processes without a row."""
HUNG = ("shard", "auto", "last", 9, None)
"""Values of the other axes with which every engine once waited for ever: only some ranks needed the
target."""
PROCESSES = 2
SECONDS = 60.0
"""Time limit of a run, from its first line to its last."""
GRACE = 3.0
"""Seconds from then to the end of its processes."""
SAME = 1e-4
"""Largest relative difference of two losses."""
PARTS = re.compile(
    rf'File "{re.escape(str(ROOT))}/((?:train|heads|inference|scripts)/\S+)", line (\d+) in (\S+)'
)
"""A line of a stack that is our own."""

ERRORS = r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception): .+|error: .+|\s+what\(\): .+)$"
"""Last line of a traceback, the line that a command ends with, or an exception of C++."""


@dataclass(frozen=True)
class Result:
    """How a run of a combination ended: how long it took, and what went wrong."""

    combination: dict[str, Any]
    seconds: float
    problem: str
    """Why it failed; empty if it did not."""


def pairwise(axes: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations in which any two values of two axes meet at least once; each covers as many new
    pairs as any can.

    First those that have hung before, one for each engine.
    """
    names = list(axes)
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]
    missing = set(itertools.chain.from_iterable(map(pairs_of, every)))
    chosen = [dict(zip(names, (engine, *HUNG), strict=True)) for engine in axes["engine"]]
    for combination in chosen:
        missing -= pairs_of(combination)
    while missing:
        best = max(every, key=lambda combination: len(pairs_of(combination) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen


def pairs_of(combination: dict[str, Any]) -> set[tuple[Any, ...]]:
    """All pairs of its values, with the names of their axes."""
    return set(itertools.combinations(combination.items(), 2))


# Inputs of the runs.


def make_inputs(folder: Path) -> Path:
    """Write a small random target with a tokenizer, and a file of conversations for each number of
    rows."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(shape)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 4  # or its next token would hardly depend on what it reads
    target = folder / "target"
    model.save_pretrained(target)
    words = {f"w{number}": number for number in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w0", pad_token="w0", unk_token="w1"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(target)
    for rows in AXES["rows"]:
        lines = []
        for row in range(rows + 1):  # one is held out
            tokens = [2 + (7 * row + 3 * place) % 61 for place in range(8 + row % 4)]
            mask = [place >= 4 for place in range(len(tokens))]
            lines.append(json.dumps({"input_ids": tokens, "loss_mask": mask}) + "\n")
        (folder / f"{rows}.jsonl").write_text("".join(lines), encoding="utf-8")
    return target


def config_of(folder: Path, combination: dict[str, Any], name: str) -> TrainConfig:
    """The run of a combination: two epochs, in float32, states stored without rounding."""
    return TrainConfig(
        target=str(folder / "target"),
        output=str(folder / name),
        head={
            "type": "eagle3",
            "depth": 2,
            "feature_layers": [0, -1],
            "start": combination["start"],
        },
        dtype="float32",
        target_placement=combination["placement"],
        data=DataConfig(
            sources=[str(folder / f"{combination['rows']}.jsonl")],
            max_length=64,
            held_out=0.01,
            cache=str(folder / "tokens"),
        ),
        features=FeaturesConfig(mode=combination["features"], format="float32"),
        optim=OptimConfig(lr=3e-3),
        loop=LoopConfig(
            epochs=2,
            batch_size=8,
            micro_batch=combination["micro batch"],
            precision="float32",
            log_every=1,
            eval_every=0,
            save_every=0,
            timeout=5.0,
        ),
        eval=EvalConfig(prompts=1, max_new_tokens=4, conversations=1, nodes=4),
    )


# The processes of a launch, each of which makes the runs of a file one after the other.


def as_it_hung() -> None:
    """A process whose batch was read ahead does not ask whether another one needs the target."""
    original = online.CachedFeatures.__call__

    def features(self: Any, batch: Any, dtype: torch.dtype = torch.float32) -> Any:
        if batch.states_BTLD is None:
            return original(self, batch, dtype)
        together = self._together
        self._together = None
        try:
            return original(self, batch, dtype)
        finally:
            self._together = together

    online.CachedFeatures.__call__ = features  # type: ignore[method-assign]


def make_runs(jobs: list[dict[str, Any]]) -> None:
    """Make the runs in this process of a launch; write what became of each."""
    rank = os.environ.get("RANK", "0")
    for job in jobs:
        forget_launch()
        report = Path(f"{job['report']}.{rank}")
        with report.with_suffix(f".{rank}.stacks").open("w") as stacks:
            faulthandler.dump_traceback_later(job["seconds"], file=stacks)
            # later: all ranks first say where they stand
            end = threading.Timer(job["seconds"] + GRACE, os._exit, [1])
            end.daemon = True
            end.start()
            if job["plant"]:
                as_it_hung()
            started = time.monotonic()
            config = options(TrainConfig, "train", "", ["--config", job["config"]])
            loop.train(config)
            faulthandler.cancel_dump_traceback_later()
            end.cancel()
        report.write_text(str(time.monotonic() - started))


# The program that launches them.


def where_it_stands(stacks: Path) -> str:
    """Our own innermost line in the stack that a process left after its time was up; empty if it
    left none."""
    text = stacks.read_text() if stacks.exists() else ""
    main_thread = text.rpartition("Thread 0x")[2]  # faulthandler shows the main thread last
    found = PARTS.search(main_thread)
    if found is None:
        return "outside of this project" if text else ""
    return f"{found[1]}:{found[2]} in {found[3]}"


def problem_of(job: dict[str, Any], processes: int, said: str) -> str:
    """Why a run failed: where each rank waits, or the error that one raised."""
    places = [where_it_stands(Path(f"{job['report']}.{rank}.stacks")) for rank in range(processes)]
    if any(places):
        return "; ".join(
            f"rank {rank} stands at {place or 'an unknown place'}"
            for rank, place in enumerate(places)
        )
    found = [
        error for error in re.findall(ERRORS, said, re.MULTILINE) if "ChildFailed" not in error
    ]
    causes = [
        error for error in found if "onnection" not in error
    ]  # others lose their connection to the one that failed
    return " ".join((causes or found or [said[-400:]])[0].split())[:300]


def losses(folder: Path) -> list[list[float]]:
    """Losses and the gradient norm of each step."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [[*row["loss"], row["gradient_norm"]] for row in rows if "loss" in row]


def differ(ours: list[list[float]], theirs: list[list[float]]) -> str:
    """The first step whose losses differ; empty if none does."""
    if len(ours) != len(theirs):
        return f"{len(ours)} steps, not {len(theirs)}"
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        for value, expected in zip(own, other, strict=True):
            if not math.isclose(value, expected, rel_tol=SAME):
                return f"step {step}: {value} and not {expected}, as with one process"
    return ""


def try_all(
    folder: Path, chosen: list[dict[str, Any]], plant: str | None, seconds: float
) -> list[Result]:
    """Make the runs, one launch for each engine, or more where one fails; compare them with those
    of one process."""
    make_inputs(folder)
    alone: dict[tuple[Any, ...], list[list[float]]] = {}
    for combination in chosen:
        key = (combination["start"], combination["rows"])
        if key not in alone:
            plain = {**combination, "placement": "whole", "features": "online", "micro batch": None}
            alone[key] = losses(loop.train(config_of(folder, plain, f"alone-{len(alone)}")))
    results: list[Result] = []
    for engine in AXES["engine"]:
        own = [
            (i, combination)
            for i, combination in enumerate(chosen)
            if combination["engine"] == engine
        ]
        waiting = []
        for number, combination in own:
            config = config_of(folder, combination, str(number))
            path = write_config(config, folder / f"{number}.yaml")
            job = {
                "config": path,
                "report": str(folder / f"{number}.report"),
                "plant": plant,
                "seconds": seconds,
            }
            waiting.append((number, combination, job))
        while waiting:
            started = time.monotonic()
            jobs = folder / "jobs.json"
            jobs.write_text(json.dumps([job for _, _, job in waiting]))
            done = launch(
                "accelerate.commands.launch", engine, PROCESSES, __file__, "--make", str(jobs)
            )
            took = time.monotonic() - started
            while waiting:
                number, combination, job = waiting.pop(0)
                reports = [Path(f"{job['report']}.{rank}") for rank in range(PROCESSES)]
                if not all(report.exists() for report in reports):
                    results.append(
                        Result(combination, took, problem_of(job, PROCESSES, done.stdout))
                    )
                    break  # the runs after it were not made
                apart = differ(
                    losses(folder / str(number)), alone[combination["start"], combination["rows"]]
                )
                results.append(
                    Result(combination, max(float(report.read_text()) for report in reports), apart)
                )
    return results


def table(results: list[Result]) -> str:
    """The table in Markdown."""
    lines = [f"| {' | '.join(AXES)} | seconds | losses |", f"|{'---|' * (len(AXES) + 2)}"]
    for result in results:
        values = ["all" if value is None else str(value) for value in result.combination.values()]
        lines.append(
            f"| {' | '.join(values)} | {result.seconds:.1f} | {result.problem or 'equal'} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Make the runs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, help="how many of the combinations; all by default")
    parser.add_argument("--engine", choices=AXES["engine"], help="only those of this engine")
    parser.add_argument("--plant", choices=["hang"], help="a fault to find")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of a run")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.make:
        make_runs(json.loads(Path(given.make).read_text()))
        return
    chosen = pairwise(AXES)
    if given.engine:
        chosen = [combination for combination in chosen if combination["engine"] == given.engine]
    with tempfile.TemporaryDirectory() as folder:
        results = try_all(Path(folder), chosen[: given.runs], given.plant, given.seconds)
    print(table(results))
    if any(result.problem for result in results):
        sys.exit(1)


if __name__ == "__main__":
    run(main, sys.argv[1:])  # which ends processes so that gloo's threads cannot abort them
