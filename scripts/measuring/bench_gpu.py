"""Measure rounds and a training step on a GPU, in under ten minutes, without a network.

    python scripts/measuring/bench_gpu.py --output benchmarks/gpu

Models of the shapes of Llama-3.1-8B, Qwen3-8B and Llama-3.3-70B with random weights, as many as fit, and EAGLE-3 heads
for them: the cost of a round by batch, context and tree, against transformers' own steps, and a training step of the
first of them. The acceptance is SYNTHETIC: each round's accepted tokens are drawn at a rate that gives the acceptance
length published for EAGLE-3 (arXiv:2503.01840, table 1).

The training step is that of `headstart train`, over rows of random tokens. The host waits for the device between its
parts, which show shares of the time; the tokens per second are those of whole steps without such waits.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from headstart.console import log
from headstart.heads import DraftHead, build_head
from headstart.heads.checkpoints.files import json_ready
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.layers.training_time_test import TrainingTimeTest
from headstart.inference import DynamicShape, Stats, Target, TreeShape, kv_cache
from headstart.inference.drafters.base import DraftContext, Drafter, NoDraft, PrefillChunk
from headstart.inference.drafters.by_name import tree_drafter
from headstart.inference.drafters.tree_policies import HeadDrafter
from headstart.inference.logits import RandomSampler, Sampler
from headstart.inference.loop import Verification
from headstart.inference.provenance import provenance
from headstart.inference.tree import DraftTree
from headstart.inference.verify import VerifyResult, greedy
from headstart.options import CommandOptions
from headstart.scripts.command_line import options, run
from headstart.scripts.measuring.bandwidth import memory_bandwidth, now, weight_bytes
from headstart.train.config import OptimConfig
from headstart.train.data.batches import collate
from headstart.train.data.chat_template import Example
from headstart.train.features.online import online_features
from headstart.train.optim import build_optimizer
from headstart.train.report import count_flops, peak_tflops

TRAINING_STEPS = 5
"""Training steps that are timed."""
HEADROOM = 0.85
"""Share of the device's memory that weights and caches may take."""
LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-3.1-8b": lambda: LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, **LLAMA_3
    ),
    "qwen3-8b": lambda: Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    ),
    "llama-3.3-70b": lambda: LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **LLAMA_3
    ),
}
"""Published dimensions; the largest that fits the device's memory are measured."""
DEPTH, WIDTH = 7, 10
"""Depth and width of the trees, as in EAGLE-2."""
RATE = 0.93
"""Synthetic acceptance rate at every depth: 1 + sum of RATE^d over 7 depths is 6.3, near the published 6.13."""


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


def main(arguments: list[str]) -> None:
    """Parse and measure."""
    bench_gpu(options(GpuBenchConfig, "bench-gpu", __doc__, arguments))


def bench_gpu(config: GpuBenchConfig) -> dict[str, Any]:
    """Measure, print, write JSON and a table; what is measured already stays if a later shape fails."""
    unknown = sorted(set(config.shapes) - set(SHAPES))
    if unknown:
        raise ValueError(f"unknown shape {unknown[0]!r}; choose from {', '.join(SHAPES)}")
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
        shape = SHAPES[name]()
        free = HEADROOM * kv_cache.free_memory(device)
        with torch.device("meta"):
            weights = 2 * sum(weight.numel() for weight in AutoModelForCausalLM.from_config(shape).parameters())
        if weights > free:
            log.info(f"{name}: {weights / 1e9:.0f} GB of weights, {free / 1e9:.0f} GB to use: left out")
            continue
        target, head = random_pair(shape, device)
        if config.training and not report["training"]:
            rows_of, length = config.training
            report["training"][name] = training_of(target, rows_of, length)
            log.info(training_line(name, report["training"][name]))
            write_report(report, config)
        decide = Verification(synthetic)
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
                    rows.append(rounds_of(target, head, decide, batch, context, nodes, bandwidth, config.repeats))
                    row = rows[-1]
                    parts = ", ".join(f"{part} {value:.2f}" for part, value in row["milliseconds"].items())
                    log.info(
                        f"{name}, batch {batch}, context {context}, {nodes} nodes: {row['round']:.2f} ms ({parts}), "
                        f"{row['bandwidth_share']:.0%} of the bandwidth, "
                        f"{row['synthetic_tokens_per_second']:.0f} tokens/s (synthetic)"
                    )
                    write_report(report, config)
            rows += stock(target, batch, config.repeats, name)
        del target, head
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return write_report(report, config)


def write_report(report: dict[str, Any], config: GpuBenchConfig) -> dict[str, Any]:
    """Write the report as JSON and as Markdown."""
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    whole = report | {"options": dataclasses.asdict(config)}
    (folder / "rounds.json").write_text(json.dumps(json_ready(whole), indent=1) + "\n", encoding="utf-8")
    lines = [
        f"Hardware: {report['hardware']}. Acceptance is synthetic (random weights): a rate of {RATE} at each depth."
    ]
    lines += [f"\n{training_line(name, row)}" for name, row in report["training"].items()]
    for name, rows in report["shapes"].items():
        columns = "| batch | context | nodes | round, ms | draft | target | rest | bandwidth | synthetic tokens/s |"
        lines += ["", f"### {name}", "", columns, "|---" * 9 + "|"]
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


def random_pair(shape: PretrainedConfig, device: torch.device) -> tuple[Target, DraftHead]:
    """A target with random weights, and an EAGLE-3 head for it, in bfloat16."""
    torch.manual_seed(0)
    with device:
        target = Target(AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval().requires_grad_(False))
    return target, new_head(target, torch.bfloat16, start="random").eval().requires_grad_(False)


def new_head(target: Target, dtype: torch.dtype, **options: Any) -> Eagle3Head:
    """An EAGLE-3 head as published: seven steps, 32,000 draft tokens."""
    layers, vocabulary = target.info.num_layers, target.info.vocab_size
    options |= {"depth": DEPTH, "draft_vocab_size": min(32000, vocabulary)}
    if layers < 7:
        options["feature_layers"] = sorted({0, layers - 2})
    with target.device:
        head = build_head("eagle3", options, target.info).to(dtype)
        head.initialize(target.modules, torch.ones(vocabulary, dtype=torch.int64))
    assert isinstance(head, Eagle3Head)
    return head


@torch.inference_mode()
def rounds_of(
    target: Target,
    head: DraftHead,
    decide: Verification,
    batch: int,
    context: int,
    nodes: int,
    bandwidth: float,
    repeats: int,
) -> dict[str, Any]:
    """Milliseconds of a round's parts after `context` tokens; the content of the cache is arbitrary."""
    shape = TreeShape.chain(nodes - 1) if nodes <= DEPTH else DynamicShape(nodes, DEPTH, WIDTH)
    drafter: Drafter = NoDraft() if nodes == 1 else tree_drafter(head, shape, target.modules)
    if target.compiled:
        drafter.compile()
    room = (repeats + 3) * (DEPTH + 1)
    roots_B = torch.zeros(batch, dtype=torch.int64, device=target.device)
    drafter.begin(DraftContext(batch, context + room + nodes, RandomSampler(None), None))
    cache = target.new_cache(batch)
    longest = context
    target.forward_tree(NoDraft().propose(roots_B), context + room, cache, drafter.feature_layers)  # allocates
    cache.lengths_B = torch.full_like(roots_B, context)
    if isinstance(drafter, HeadDrafter):
        width = len(drafter.feature_layers) * target.info.hidden_size
        features_B1F = torch.zeros(batch, 1, width, dtype=target.dtype, device=target.device)
        drafter.prefill(PrefillChunk(roots_B[:, None], roots_B[:, None], features_B1F, torch.ones_like(roots_B)))
        drafter.shared.state = dataclasses.replace(drafter.catch_up(), lengths_B=torch.full_like(roots_B, context))
    draw = RandomSampler(torch.Generator(target.device).manual_seed(0))
    taken, emitted = [], []
    for turn in range(repeats + 3):  # the first ones compile
        marks = [now(target.device)]
        tree = drafter.propose(roots_B)
        marks.append(now(target.device))
        output = target.forward_tree(tree, longest, cache, drafter.feature_layers)
        marks.append(now(target.device))
        finished = decide.verify_and_commit(tree, output, output.logits_BNV, draw, cache, Stats())
        marks.append(now(target.device))
        drafter.observe(finished)
        marks.append(now(target.device))
        longest += tree.max_depth + 1
        if turn >= 3:
            taken.append((marks[1] - marks[0] + marks[4] - marks[3], marks[2] - marks[1], marks[3] - marks[2]))
            emitted.append(float(finished.lengths_B.float().mean()))
    medians = [1000 * statistics.median(seconds) for seconds in zip(*taken, strict=True)]
    middle = dict(zip(("draft", "target", "rest"), medians, strict=True))
    read = weight_bytes(target) + target.cache_bytes(batch, context)
    return {
        "batch": batch,
        "context": context,
        "nodes": nodes,
        "milliseconds": middle,
        "round": sum(middle.values()),
        "bandwidth_share": read / (middle["target"] / 1000) / bandwidth,
        "synthetic_tokens": statistics.mean(emitted),
        "synthetic_tokens_per_second": 1000 * batch * statistics.mean(emitted) / sum(middle.values()),
    }


def synthetic(tree: DraftTree, scores_BNV: Tensor, draw: Sampler) -> VerifyResult:
    """Accept each depth with probability `RATE`, whatever the logits: a path of random length down the tree."""
    passed_BD = draw.accept(scores_BNV.new_full((len(scores_BNV), tree.max_depth), RATE))
    lengths_B = 1 + passed_BD.long().cumprod(-1).sum(-1)
    places_A = torch.arange(tree.max_depth + 1, device=lengths_B.device)
    path_BA = places_A.expand(len(lengths_B), -1)  # any nodes: costs do not depend on them
    result = greedy(tree, scores_BNV, draw)  # so that the cost of a rule is included
    return VerifyResult(path_BA, lengths_B, result.next_tokens_B)


def stock(target: Target, batch: int, repeats: int, name: str) -> list[dict[str, Any]]:
    """Milliseconds of a step of transformers' own `generate`: eager, and with its compiled static cache."""
    ids = torch.zeros(batch, 512, dtype=torch.int64, device=target.device)
    found = []
    for what, more in (("eager", {}), ("static cache, compiled", {"cache_implementation": "static"})):
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **more}
        settings["stop_strings"] = None
        seconds = []
        for count in (2 + repeats, 2 + repeats, 2):  # the first one warms up and compiles
            start = now(target.device)
            target.model.generate(ids, max_new_tokens=count, min_new_tokens=count, **settings)
            seconds.append(now(target.device) - start)
        step = 1000 * (seconds[1] - seconds[2]) / repeats
        found.append({"transformers": what, "batch": batch, "context": 512, "step": step})
        log.info(f"{name}, batch {batch}: transformers, {what}: {step:.2f} ms a step")
    return found


def training_of(target: Target, rows: int, length: int) -> dict[str, Any]:
    """Time training steps; shares of a peak are None where it is unknown, the peak of memory is None on a CPU."""
    device = target.device
    torch.manual_seed(0)
    head = new_head(target, torch.float32).train()
    optimizer, _ = build_optimizer(head, OptimConfig(), 100, {})
    tokens_BT = torch.randint(target.info.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    examples = [Example(row, [True] * length) for row in tokens_BT.tolist()]
    objective = head.default_objective(head.config)
    flops = count_flops(target, head, objective, examples[:1], cached=False, adapted=False) * length * rows
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed_step(target, head, optimizer, examples)  # warms up
    turns = [timed_step(target, head, optimizer, examples) for _ in range(TRAINING_STEPS)]
    start = now(device)
    for _ in range(TRAINING_STEPS):
        timed_step(target, head, optimizer, examples, apart=False)
    seconds = (now(device) - start) / TRAINING_STEPS
    tflops = flops / seconds / 1e12
    peak = peak_tflops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return {
        "rows": rows,
        "length": length,
        "tokens_per_second": rows * length / seconds,
        "teraflops": tflops,
        "model_flop_utilisation": None if peak is None else tflops / peak,
        "milliseconds": {part: 1000 * statistics.median(turn[part] for turn in turns) for part in turns[0]},
        "peak_memory": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


def timed_step(
    target: Target, head: Eagle3Head, optimizer: torch.optim.Optimizer, examples: list[Example], apart: bool = True
) -> dict[str, float]:
    """Make a step; the seconds of its parts if `apart`.

    The time of the loss is that of the head's forward less that of its layers, which run a second time to be timed.
    """
    device = target.device
    clock: Callable[[], float] = (lambda: now(device)) if apart else (lambda: 0.0)
    marks = [clock()]
    batch = collate(examples)
    batch.tokens_BT.to(device)
    marks.append(clock())
    features = online_features(target, head, batch)
    marks.append(clock())
    with torch.autocast(device.type, torch.bfloat16):
        if apart:
            with torch.no_grad():
                head.drafts(features, TrainingTimeTest(head.config.num_layers), head.max_depth)
        marks.append(clock())
        output = head(features)
    marks.append(clock())
    (output.loss / max(batch.loss_mask_BT.numel(), 1)).backward()
    marks.append(clock())
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    marks.append(clock())
    parts = ("batch", "target", "head", "loss", "backward", "optimizer")
    seconds = dict(zip(parts, (b - a for a, b in itertools.pairwise(marks)), strict=True))
    seconds["loss"] = max(seconds["loss"] - seconds["head"], 0.0)
    return seconds


def training_line(name: str, row: dict[str, Any]) -> str:
    """Throughput of a training step, and the shares of its parts, as one line."""
    whole = sum(row["milliseconds"].values())
    shares = ", ".join(f"{part} {value / whole:.0%}" for part, value in row["milliseconds"].items())
    more = "" if (used := row["model_flop_utilisation"]) is None else f", {used:.0%} of the peak"
    memory = "" if row["peak_memory"] is None else f", {row['peak_memory'] / 2**30:.1f} GiB"
    return (
        f"{name}, training, {row['rows']} rows of {row['length']}: {row['tokens_per_second']:.0f} tokens/s, "
        f"{row['teraflops']:.1f} TFLOP/s{more}{memory} ({shares})"
    )


if __name__ == "__main__":
    run(main, sys.argv[1:])
