"""The memory plan of each engine beside the peaks that its processes really have, on a CPU.

    python benchmarks/memory_plan.py                   # one process, then two with each engine
    python benchmarks/memory_plan.py --launch fsdp2:2  # one launch
    python benchmarks/memory_plan.py --launch 8b       # a head for a target of 8 billion
                                                       # parameters, without the target
    python benchmarks/memory_plan.py --launch one --length 8192 --head medusa

A head of 55 million parameters, in float32, so that it outweighs what Python and torch take. Memory
is the resident set (VmHWM, set back by /proc/self/clear_refs) less what the process had before it
loaded the target.

The last trains configs/llama-3.1-8b-eagle3.yaml on short rows, on files of random states
(features.mode stored), and takes 9 GiB of memory and 4 of the disk. Embedding, final norm and LM
head have the shapes of Llama-3.1-8B and random numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from launches import ROOT, forget_launch, launch, write_config
from process_status import memory_mib
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.inference.feature_cache import key_of
from headstart.scripts.command_line import options, run
from headstart.train import loop
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, TrainConfig
from headstart.train.data.split import split_held_out
from headstart.train.engines import resolved, start
from headstart.train.features.online import open_cache
from headstart.train.memory_plan import plan_run

LAUNCHES = ("one", "ddp:2", "zero1:2", "zero2:2", "fsdp2:2")
STORED = "8b"
"""The launch of one process whose target is not loaded."""
MIB = 2**20
SHORT = 64
"""Tokens of a row; longer rows are read one at a time."""
ROWS = 17
"""Rows of the data; HELD_OUT of them are evaluated on."""
HELD_OUT = 5 / ROWS
MOMENTS = ("training", "evaluation", "saving")
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"type": "eagle3", "depth": 2, "feature_layers": [0, -1], "train_steps": 2},
    "dflash": {"type": "dflash", "num_layers": 2, "feature_layers": [0], "block_size": 8},
    "medusa": {"type": "medusa", "num_heads": 4, "num_layers": 4},
}


def make_inputs(folder: Path, length: int) -> None:
    """Write a random target of two blocks, whose head is larger than itself, and rows of `length`
    tokens. With longer rows it is narrower: what their tokens keep outweighs Python and torch."""
    torch.manual_seed(0)
    width = 1536
    if length > SHORT:
        width = 512 if length <= 2048 else 256
    shape = LlamaConfig(
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 128,
        num_key_value_heads=min(4, width // 128),
        max_position_embeddings=max(256, 2 * length),
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(shape).save_pretrained(folder / "target")
    # An evaluation has both long prompts to answer and many drafts to judge, in the last row.
    _, held_out = split_held_out(range(ROWS), HELD_OUT, LoopConfig().seed)
    for size in {SHORT, length}:
        rows = [[2 + (7 * row + place) % 2000 for place in range(size)] for row in range(ROWS)]
        make_rows(folder / f"rows-{size}.jsonl", folder / "target", rows, held_out[:-1])


def make_rows(path: Path, target: Path, rows: list[list[int]], long_prompts: list[int]) -> None:
    """Write a tokenizer beside a target, which nothing is tokenized with, and rows of tokens.

    Prompts have 8 tokens, and those of the rows `long_prompts` all but some 40 of the last.
    """
    words = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(2048)}, unk_token="w1")
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w0", pad_token="w0", unk_token="w1"
    )
    fast.save_pretrained(target)
    lines = []
    for number, row in enumerate(rows):
        prompt = len(row) - 32 - number if number in long_prompts else 8
        loss_mask = [place >= prompt for place in range(len(row))]
        lines.append(json.dumps({"input_ids": row, "loss_mask": loss_mask}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_outer_modules(folder: Path) -> None:
    """Write what a head needs of a target with the shapes of Llama-3.1-8B: embedding, final norm
    and LM head."""
    shape = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=0,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    target = folder / "target-8b"
    shape.save_pretrained(target)
    # A draft vocabulary has no more tokens than the answers: these are all different.
    rows = [[2 + 56 * row + place for place in range(64)] for row in range(600)]
    make_rows(folder / "rows-8b.jsonl", target, rows, [])
    torch.manual_seed(0)
    # 64 times over: all of it would take a minute
    some_VD = 0.02 * torch.randn(2004, 4096).bfloat16()
    whole_VD = some_VD.repeat(64, 1)
    tensors = {
        "model.embed_tokens.weight": whole_VD,
        "model.norm.weight": torch.ones(4096).bfloat16(),
        "lm_head.weight": whole_VD.clone(),
    }
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def make_states(config: TrainConfig) -> None:
    """Write random states of all sequences of a run, as `headstart features` would."""
    accelerator, _ = start(config)
    config = resolved(config, accelerator)
    inputs = loop.load_inputs(config, accelerator, outer=True)
    cache = open_cache(
        accelerator, inputs.head, inputs.provenance, config.features, Path(config.output)
    )
    generator = torch.Generator().manual_seed(0)
    for example in [*inputs.training[:], *inputs.held_out]:
        states_TLD = torch.randn(len(example.tokens), len(cache.layers), 4096, generator=generator)
        cache.add(key_of(torch.tensor(example.tokens)), states_TLD)
    cache.flush()
    AcceleratorState._reset_state()


def config_of_8b(folder: Path) -> TrainConfig:
    """Two steps of the shipped config for Llama-3.1-8B, on states in files."""
    changes = {
        "target": folder / "target-8b",
        "output": folder / STORED,
        "data.sources": f"[{folder / 'rows-8b.jsonl'}]",
        "data.max_length": 64,
        "data.held_out": 0.01,
        "data.cache": folder / "tokens-8b",
        "features.mode": "stored",
        "features.folder": folder / "states",
        "loop.max_steps": 2,
        "loop.batch_size": 2,
        "loop.micro_batch": "null",
        "loop.eval_every": 0,
        "loop.save_minutes": "null",
        "eval.prompts": 1,
        "eval.max_new_tokens": 4,
        "eval.conversations": 1,
        "eval.nodes": 4,
    }
    given = ["--config", str(ROOT / "configs" / "llama-3.1-8b-eagle3.yaml")]
    for name, value in changes.items():
        given += [f"--{name}", str(value)]
    return options(TrainConfig, "train", "", given)


def config_of(folder: Path, name: str, head: str, length: int) -> TrainConfig:
    """A run with an evaluation and a checkpoint at the end: four steps of four rows, or two of two
    long ones."""
    short = length == SHORT
    return TrainConfig(
        target=str(folder / "target"),
        output=str(folder / name),
        head=HEADS[head],
        dtype="float32",
        data=DataConfig(
            sources=[str(folder / f"rows-{length}.jsonl")],
            max_length=length,
            held_out=HELD_OUT,
            cache=str(folder / "tokens"),
        ),
        loop=LoopConfig(
            max_steps=4 if short else 2,
            batch_size=4 if short else 2,
            micro_batch=None if short else 1,
            precision="float32",
            log_every=1,
            eval_every=0,
            save_every=0,
            timeout=5.0,
        ),
        eval=EvalConfig(prompts=4, max_new_tokens=4, conversations=5, nodes=4),
    )


def reset_peak() -> None:
    """Let the peak begin at the memory that is in use now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def measure(job: dict[str, Any]) -> None:
    """Train in this process of a launch; write its peaks by moment, in MiB."""
    peaks: dict[str, float] = {}
    before = [0.0]
    load, save = loop.load_inputs, loop.RunFolder.save
    judge = loop.Trainer.evaluate_and_save

    def load_inputs(*given: Any, **named: Any) -> Any:
        reset_peak()
        before[0] = memory_mib("VmRSS")
        inputs = load(*given, **named)
        modules: Any = inputs.target.modules
        for weight in (modules.embed.weight, modules.lm_head.weight):
            weight.sum()  # what lies in a mapped file counts once it is read, as a longer run would
        return inputs

    def evaluate_and_save(*given: Any, **more: Any) -> Any:
        reset_peak()
        found = judge(*given, **more)
        peaks["evaluation"] = memory_mib("VmHWM") - before[0]
        return found

    def saved(*given: Any, **more: Any) -> Any:
        peaks["training"] = memory_mib("VmHWM") - before[0]
        reset_peak()
        found = save(*given, **more)
        peaks["saving"] = memory_mib("VmHWM") - before[0]
        return found

    forget_launch()
    loop.train(
        options(
            TrainConfig,
            "train",
            "",
            ["--config", job["first"], "--output", f"{job['report']}.first"],
        )
    )
    forget_launch()
    loop.load_inputs = load_inputs
    loop.Trainer.evaluate_and_save = evaluate_and_save  # type: ignore[method-assign]
    loop.RunFolder.save = saved  # type: ignore[method-assign]
    gc.collect()
    loop.train(options(TrainConfig, "train", "", ["--config", job["config"]]))
    Path(f"{job['report']}.{os.environ.get('RANK', '0')}").write_text(json.dumps(peaks))


def peaks_of(
    launched: str, folder: Path, head: str, length: int
) -> tuple[dict[str, int], dict[str, float]]:
    """Planned bytes of a launch, and the largest of its processes' peaks in MiB, by moment."""
    name = launched.replace(":", "-")
    small = config_of(folder, name, head, SHORT)
    config = config_of(folder, name, head, length)
    if launched == STORED:
        make_outer_modules(folder)
        config = config_of_8b(folder)
        make_states(config)
    engine, _, number = ("one" if launched == STORED else launched).partition(":")
    processes = int(number or 1)
    plan = plan_run(
        dataclasses.replace(config, plan="one" if processes == 1 else launched), torch.device("cpu")
    )
    jobs = folder / "job.json"
    job = {
        "config": write_config(config, folder / f"{name}.yaml"),
        "first": write_config(small, folder / f"{name}-first.yaml"),
        "report": str(folder / f"{name}.report"),
    }
    jobs.write_text(json.dumps(job))
    arguments = ("headstart.scripts.launch", engine, processes, __file__, "--measure", str(jobs))
    done = launch(*arguments, MALLOC_MMAP_THRESHOLD_="65536")
    assert done.returncode == 0, done.stdout
    reports = [json.loads(path.read_text()) for path in folder.glob(f"{name}.report.?")]
    return plan.moments, {moment: max(report[moment] for report in reports) for moment in MOMENTS}


def main(arguments: list[str]) -> None:
    """Measure the launches and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launch", choices=(*LAUNCHES, STORED), help="only this one")
    parser.add_argument("--head", choices=tuple(HEADS), default="eagle3")
    parser.add_argument("--length", type=int, default=SHORT, help="tokens of a row")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        measure(json.loads(Path(given.measure).read_text()))
        return
    print(
        "| launch | moment | planned, MiB | measured, MiB | measured / planned"
        " |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), given.length)
        for launched in [given.launch] if given.launch else LAUNCHES:
            planned, measured = peaks_of(launched, Path(folder), given.head, given.length)
            for moment in MOMENTS:
                ratio = measured[moment] * MIB / planned[moment]
                print(
                    f"| {launched} | {moment} | {planned[moment] / MIB:.0f} |"
                    f" {measured[moment]:.0f} | {ratio:.2f} |"
                )


if __name__ == "__main__":
    run(main, sys.argv[1:])
