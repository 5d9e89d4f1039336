"""Time of a training step on a GPU, by part, for a large model with random weights.

The step is that of `headstart train`: the frozen target reads rows of random tokens, the head computes under autocast
in bfloat16 with float32 weights, AdamW steps. The host waits for the device between parts, which a real step does not:
the parts show shares of the time, and the tokens per second are those of whole steps without such waits.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from headstart.heads import TargetFeatures, build_head
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.layers.training_time_test import TrainingTimeTest
from headstart.inference import Target
from headstart.scripts.measuring.bandwidth import now
from headstart.train.config import OptimConfig
from headstart.train.data.batches import Batch, collate
from headstart.train.data.chat_template import Example
from headstart.train.features.online import online_features
from headstart.train.optim import build_optimizer
from headstart.train.report import PEAK_TFLOPS, count_flops


def training_of(target: Target, options: dict[str, Any], rows: int, length: int, repeats: int) -> dict[str, Any]:
    """Time training steps.

    Returns:
        Tokens per second, TFLOP/s and their share of the device's peak (None where that is unknown), milliseconds by
        part, and the peak of memory, bytes (None on a CPU).
    """
    device = target.device
    torch.manual_seed(0)
    head = build_head("eagle3", options, target.info)
    assert isinstance(head, Eagle3Head)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    head = head.to(device).train()
    optimizer, _ = build_optimizer(head, OptimConfig(), 100, {})
    tokens_BT = torch.randint(target.info.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    examples = [Example(row, [True] * length) for row in tokens_BT.tolist()]
    flops = count_flops(target, head, examples[:1], cached=False, adapted=False) * length * rows
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    parts: dict[str, list[float]] = {name: [] for name in ("batch", "target", "head", "loss", "backward", "optimizer")}
    for turn in range(repeats + 1):
        marks = timed_step(target, head, optimizer, examples)
        if turn > 0:
            for name, seconds in marks.items():
                parts[name].append(seconds)
    start = now(device)
    for _ in range(repeats):
        timed_step(target, head, optimizer, examples, apart=False)
    seconds = (now(device) - start) / repeats
    tflops = flops / seconds / 1e12
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    peak = next((most for part, most in PEAK_TFLOPS.items() if part in name.replace("-", " ").split()), None)
    return {
        "rows": rows,
        "length": length,
        "tokens_per_second": rows * length / seconds,
        "teraflops": tflops,
        "model_flop_utilisation": None if peak is None else tflops / peak,
        "milliseconds": {name: 1000 * statistics.median(taken) for name, taken in parts.items()},
        "peak_memory": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


def timed_step(
    target: Target,
    head: Eagle3Head,
    optimizer: torch.optim.Optimizer,
    examples: list[Example],
    apart: bool = True,
) -> dict[str, float]:
    """Make a step; the seconds of its parts if `apart`.

    The time of the loss is that of the head's forward less that of its layers, which run a second time to be timed.
    """
    device = target.device
    clock: Callable[[], float] = (lambda: now(device)) if apart else (lambda: 0.0)
    marks = [clock()]
    batch: Batch = collate(examples)
    batch.tokens_BT.to(device)
    marks.append(clock())
    features: TargetFeatures = online_features(target, head, batch)
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
    waited, read, layers, forward, backward, stepped = (b - a for a, b in itertools.pairwise(marks))
    return {
        "batch": waited,
        "target": read,
        "head": layers,
        "loss": max(forward - layers, 0.0),
        "backward": backward,
        "optimizer": stepped,
    }


def told_training(name: str, row: dict[str, Any]) -> str:
    """One line for the screen."""
    whole = sum(row["milliseconds"].values())
    shares = ", ".join(f"{part} {value / whole:.0%}" for part, value in row["milliseconds"].items())
    used = row["model_flop_utilisation"]
    more = "" if used is None else f", {used:.0%} of the peak"
    memory = "" if row["peak_memory"] is None else f", {row['peak_memory'] / 2**30:.1f} GiB"
    return (
        f"{name}, training, {row['rows']} rows of {row['length']}: {row['tokens_per_second']:.0f} tokens/s, "
        f"{row['teraflops']:.1f} TFLOP/s{more}{memory} ({shares})"
    )


def head_options(target: Target) -> dict[str, Any]:
    """Options of an EAGLE-3 head as published: seven steps, 32,000 draft tokens."""
    layers = target.info.num_layers
    options: dict[str, Any] = {"depth": 7, "draft_vocab_size": min(32000, target.info.vocab_size)}
    return options if layers >= 7 else {**options, "feature_layers": sorted({0, layers - 2})}
