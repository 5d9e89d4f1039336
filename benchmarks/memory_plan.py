"""The memory plan of each engine beside the peaks that its processes really have, on a CPU.

    python benchmarks/memory_plan.py                   # one process, then two with each engine
    python benchmarks/memory_plan.py --launch fsdp2:2  # one launch

A head of 55 million parameters, in float32, so that it outweighs what Python and torch take. Memory is the resident
set (VmHWM, set back by /proc/self/clear_refs) less what the process had before it loaded the target.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from process_status import memory_mib
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.scripts.command_line import options, run
from headstart.train import loop
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, TrainConfig
from headstart.train.memory_plan import plan_run

ROOT = Path(__file__).resolve().parents[1]
LAUNCHES = ("one", "ddp:2", "zero1:2", "zero2:2", "fsdp2:2")
MIB = 2**20
MOMENTS = ("training", "evaluation", "saving")


def make_inputs(folder: Path) -> None:
    """Write a random target of two blocks, whose head is larger than itself, and rows of tokens."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=2048,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(shape).save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(2048)}, unk_token="w1"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0", unk_token="w1")
    fast.save_pretrained(folder / "target")
    rows = [[2 + (7 * row + place) % 2000 for place in range(64)] for row in range(17)]
    lines = [json.dumps({"input_ids": row, "loss_mask": [place >= 8 for place in range(64)]}) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def config_of(folder: Path, name: str) -> TrainConfig:
    """A run of four steps, with an evaluation and a checkpoint at the end."""
    return TrainConfig(
        target=str(folder / "target"),
        output=str(folder / name),
        head={"type": "eagle3", "depth": 2, "feature_layers": [0, -1], "train_steps": 2},
        target_dtype="float32",
        data=DataConfig(sources=[str(folder / "rows.jsonl")], max_length=64, held_out=0.05, cache=str(folder / "rows")),
        loop=LoopConfig(
            max_steps=4, batch_size=4, precision="float32", log_every=1, eval_every=0, save_every=0, timeout=5.0
        ),
        eval=EvalConfig(prompts=1, new_tokens=4, conversations=1, nodes=4),
    )


def reset_peak() -> None:
    """Let the peak begin at the memory that is in use now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def measure(job: dict[str, Any]) -> None:
    """Train in this process of a launch; write its peaks by moment, in MiB."""
    peaks: dict[str, float] = {}
    before = [0.0]
    load, judge, save = loop.load_inputs, loop.evaluate_and_save, loop.RunFolder.save

    def load_inputs(*given: Any) -> Any:
        reset_peak()
        before[0] = memory_mib("VmRSS")
        return load(*given)

    def evaluate_and_save(*given: Any, **more: Any) -> Any:
        reset_peak()
        found = judge(*given, **more)
        peaks["evaluation"] = memory_mib("VmHWM") - before[0]
        return found

    def saved(*given: Any) -> Any:
        peaks["training"] = memory_mib("VmHWM") - before[0]
        reset_peak()
        found = save(*given)
        peaks["saving"] = memory_mib("VmHWM") - before[0]
        return found

    PartialState.destroy_process_group = lambda *_: None  # the second run is made by the same processes
    loop.train(options(TrainConfig, "train", "", ["--config", job["config"], "--output", f"{job['report']}.first"]))
    AcceleratorState._reset_state()
    GradientState._reset_state()
    loop.load_inputs, loop.evaluate_and_save = load_inputs, evaluate_and_save
    loop.RunFolder.save = saved  # type: ignore[method-assign]
    gc.collect()
    loop.train(options(TrainConfig, "train", "", ["--config", job["config"]]))
    Path(f"{job['report']}.{os.environ.get('RANK', '0')}").write_text(json.dumps(peaks))


def peaks_of(launch: str, folder: Path) -> tuple[dict[str, int], dict[str, float]]:
    """What a launch was planned to take in bytes, and the largest of its processes' peaks in MiB, by moment."""
    name = launch.replace(":", "-")
    engine, _, number = launch.partition(":")
    config = config_of(folder, name)
    plan = plan_run(dataclasses.replace(config, plan=launch), torch.device("cpu"))
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(config)))), encoding="utf-8")
    jobs = folder / "job.json"
    jobs.write_text(json.dumps({"config": str(path), "report": str(folder / f"{name}.report")}))
    command = [sys.executable, "-m", "headstart.scripts.launch", "--config_file", f"configs/accelerate/{engine}.yaml"]
    command += ["--num_processes", number or "1", "--main_process_port", "0", __file__, "--measure", str(jobs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    reports = [json.loads(path.read_text()) for path in folder.glob(f"{name}.report.?")]
    return plan.moments, {moment: max(report[moment] for report in reports) for moment in MOMENTS}


def main(arguments: list[str]) -> None:
    """Measure the launches and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", choices=LAUNCHES, help="only this one")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        measure(json.loads(Path(given.measure).read_text()))
        return
    print("| launch | moment | planned, MiB | measured, MiB | measured / planned |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder))
        for launch in [given.launch] if given.launch else LAUNCHES:
            planned, measured = peaks_of(launch, Path(folder))
            for moment in MOMENTS:
                ratio = measured[moment] * MIB / planned[moment]
                print(f"| {launch} | {moment} | {planned[moment] / MIB:.0f} | {measured[moment]:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    run(main, sys.argv[1:])
