"""Measure rounds and a training step on a GPU, in under ten minutes, without a network.

    python scripts/measuring/bench_gpu.py --output benchmarks/gpu

Models of the shapes of Llama-3.1-8B, Qwen3-8B and Llama-3.3-70B with random weights, as many as fit, and EAGLE-3 heads
for them: the cost of a round by batch, context and tree, against transformers' own steps, and a training step of the
first of them. Their acceptance is synthetic.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.scripts.command_line import options, run
from headstart.train.config import CommandOptions
from headstart.train.console import log

TRAINING_STEPS = 5
"""Training steps that are timed."""
HEADROOM = 0.85
"""Share of the device's memory that weights and caches may take."""


@dataclass(frozen=True)
class GpuBenchConfig(CommandOptions):
    """Costs of rounds and of a training step on this device, for large models with random weights."""

    required = ("output",)

    output: str = ""
    """Folder for rounds.json and rounds.md, which hold the training step, too."""
    shapes: list[str] = field(default_factory=lambda: ["llama-3.1-8b", "qwen3-8b", "llama-3.3-70b"])
    """Models; those that do not fit are left out."""
    batches: list[int] = field(default_factory=lambda: [1, 4, 16])
    """Batch sizes."""
    contexts: list[int] = field(default_factory=lambda: [512, 4096, 32768])
    """Tokens of each row before the round."""
    nodes: list[int] = field(default_factory=lambda: [1, 4, 16, 32, 60])
    """Sizes of trees, the root counted; 1 is a plain step."""
    repeats: int = 20
    """Rounds of each, whose median counts."""
    training: list[int] = field(default_factory=lambda: [4, 2048])
    """Rows of a training step, and tokens of each, for the first shape that fits; an empty list leaves it out."""
    minutes: float = 9.0
    """After which the rest is left out."""


def main(arguments: list[str] | None = None) -> None:
    """Parse and measure."""
    bench_gpu(options(GpuBenchConfig, "bench-gpu", __doc__, arguments))


def bench_gpu(config: GpuBenchConfig) -> dict[str, Any]:
    """Measure, print, write JSON and a table; what is measured already stays if a later shape fails."""
    import torch
    from transformers import AutoModelForCausalLM

    from headstart.inference.kv_cache import free_memory
    from headstart.inference.loop import Verification
    from headstart.scripts.measuring import gpu_rounds
    from headstart.scripts.measuring.bandwidth import memory_bandwidth
    from headstart.scripts.measuring.gpu_training import head_options, told_training, training_of
    from headstart.train.run_folder import provenance

    unknown = sorted(set(config.shapes) - set(gpu_rounds.SHAPES))
    if unknown:
        raise ValueError(f"unknown shape {unknown[0]!r}; choose from {', '.join(gpu_rounds.SHAPES)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = memory_bandwidth(device)
    log.info(f"{provenance()['hardware']}: reads {bandwidth / 1e9:.0f} GB/s")
    report: dict[str, Any] = {
        "synthetic": "acceptance of random weights is drawn, not measured",
        "bandwidth": bandwidth,
        **provenance(),
        "training": {},
        "shapes": {},
    }
    if len(config.training) not in (0, 2) or min([1, *config.training]) < 1:
        raise ValueError(f"training needs a number of rows and of tokens, or nothing, not {config.training}")
    deadline = time.monotonic() + 60 * config.minutes
    for name in config.shapes:
        report["shapes"][name] = rows = []
        shape = gpu_rounds.SHAPES[name]()
        free = HEADROOM * free_memory(device)
        with torch.device("meta"):
            weights = 2 * sum(weight.numel() for weight in AutoModelForCausalLM.from_config(shape).parameters())
        if weights > free:
            log.info(f"{name}: {weights / 1e9:.0f} GB of weights, {free / 1e9:.0f} GB to use: left out")
            continue
        target, head = gpu_rounds.random_pair(shape, device)
        if config.training and not report["training"]:
            rows_of, length = config.training
            report["training"][name] = training_of(target, head_options(target), rows_of, length, TRAINING_STEPS)
            log.info(told_training(name, report["training"][name]))
            write_report(report, config)
        decide = Verification(gpu_rounds.synthetic)
        target.compile()
        decide.compile(device)
        for batch in config.batches:
            for context in config.contexts:
                if weights + target.cache_bytes(batch, context + max(config.nodes)) > free:
                    log.info(f"{name}, batch {batch}, context {context}: does not fit, left out")
                    continue
                for nodes in config.nodes:
                    if time.monotonic() > deadline:
                        log.info(f"{config.minutes:g} minutes are over: the rest is left out")
                        return write_report(report, config)
                    rows.append(
                        gpu_rounds.rounds_of(target, head, decide, batch, context, nodes, bandwidth, config.repeats)
                    )
                    log.info(described(name, rows[-1]))
                    write_report(report, config)
            rows += gpu_rounds.stock(target, batch, config.repeats, name)
        del target, head
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return write_report(report, config)


def described(name: str, row: dict[str, Any]) -> str:
    """One line for the screen."""
    parts = ", ".join(f"{part} {value:.2f}" for part, value in row["milliseconds"].items())
    return (
        f"{name}, batch {row['batch']}, context {row['context']}, {row['nodes']} nodes: {row['round']:.2f} ms "
        f"({parts}), {row['bandwidth_share']:.0%} of the bandwidth, "
        f"{row['synthetic_tokens_per_second']:.0f} tokens/s (synthetic)"
    )


def write_report(report: dict[str, Any], config: GpuBenchConfig) -> dict[str, Any]:
    """Write the report as JSON and as Markdown."""
    from headstart.heads.checkpoints.files import json_ready
    from headstart.scripts.measuring.gpu_rounds import RATE
    from headstart.scripts.measuring.gpu_training import told_training

    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    whole = report | {"options": dataclasses.asdict(config)}
    (folder / "rounds.json").write_text(json.dumps(json_ready(whole), indent=1) + "\n", encoding="utf-8")
    lines = [
        f"Hardware: {report['hardware']}. Acceptance is synthetic (random weights): a rate of {RATE} at each depth."
    ]
    lines += [f"\n{told_training(name, row)}" for name, row in report["training"].items()]
    for name, rows in report["shapes"].items():
        lines += ["", f"### {name}", "", "| batch | context | nodes | round, ms | draft | target | rest | bandwidth | "]
        lines[-1] += "synthetic tokens/s |"
        lines.append("|---|---|---|---|---|---|---|---|---|")
        for row in rows:
            if "transformers" in row:
                lines.append(f"| {row['batch']} | {row['context']} | {row['transformers']} | {row['step']:.2f} |||||| ")
                continue
            parts = " | ".join(f"{row['milliseconds'][part]:.2f}" for part in ("draft", "target", "rest"))
            lines.append(
                f"| {row['batch']} | {row['context']} | {row['nodes']} | {row['round']:.2f} | {parts} | "
                f"{row['bandwidth_share']:.0%} | {row['synthetic_tokens_per_second']:.0f} |"
            )
    (folder / "rounds.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return whole


if __name__ == "__main__":
    run(main, sys.argv[1:])
