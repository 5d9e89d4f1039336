"""Training on cached states against computing them: the same losses, how fast, how large.

    python benchmarks/features.py --config configs/smollm2-eagle3.yaml --conversations conversations.jsonl --steps 60

Every step is made by each side in turn, with a head of its own, on the same batch: states computed online; from a cache
that was written before, in each format; and states that lie in memory, which is what training costs with the target's
forward left out. Losses are compared with the online side's at the same step.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from headstart.heads import TargetFeatures
from headstart.scripts.command import options
from headstart.train.benchmark import quartiles
from headstart.train.config import TrainConfig
from headstart.train.console import console
from headstart.train.data.batches import Order
from headstart.train.data.chat_template import Batch, collate
from headstart.train.engines import autocast
from headstart.train.features.cached import FORMATS, FeatureCache, bytes_per_token
from headstart.train.features.online import CachedFeatures, kept_layers, online_features
from headstart.train.optim import build_optimizer
from headstart.train.precision import resolved
from headstart.train.provenance import provenance
from headstart.train.setup import set_up

WARM_UP = 3
"""Steps that are not timed."""


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-eagle3.yaml")
    parser.add_argument("--conversations", required=True, help="JSONL file to train on")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="features.md")
    args = parser.parse_args()
    given = ["--config", args.config, "--data.sources", f"[{args.conversations}]", "--output", "unused"]
    accelerator = Accelerator()
    config = resolved(options(TrainConfig, "train", "", given), accelerator)
    setup = set_up(config, accelerator)
    target, training = setup.target, setup.training
    order = Order([len(example.tokens) for example in training], config.loop.batch_size, config.loop.seed)
    steps = list(itertools.islice((rows for _, rows in order.from_step(0)), args.steps))
    batches = [collate([training[i] for row in rows for i in row]) for rows in steps]
    layers = kept_layers(setup.head.feature_layers)
    with tempfile.TemporaryDirectory() as folder:
        sources: dict[str, Callable[[Batch], TargetFeatures]] = {"online": partial(online_features, target, setup.head)}
        writing = {}
        for word in FORMATS:
            cache = FeatureCache(Path(folder) / word, {"format": word})
            sources[word] = CachedFeatures(target, setup.head, cache)
            start = time.perf_counter()
            for batch in batches:
                sources[word](batch)
            cache.flush()
            writing[word] = sum(len(batch.loss_mask_BT) for batch in batches) / (time.perf_counter() - start)
            sources[word] = CachedFeatures(target, setup.head, FeatureCache(Path(folder) / word, {"format": word}))
        held = {id(batch): online_features(target, setup.head, batch) for batch in batches}
        sources["left out"] = lambda batch: held[id(batch)]
        seconds, losses = measured(sources, batches, setup.head, config, accelerator)
    lines = [
        f"Hardware: {provenance()['hardware']}. {len(batches)} steps of {config.loop.batch_size} conversations.",
        "",
        "| states | bytes a token | answer tokens/s | of the rate with the target left out | largest relative "
        "difference of a loss |",
        "|---|---|---|---|---|",
    ]
    tokens = [int(batch.loss_mask_BT.sum()) for batch in batches]
    for name in sources:
        size = f"{bytes_per_token(len(layers), target.info.hidden_size, name):,}" if name in FORMATS else "-"
        pairs = list(zip(tokens, seconds[name], seconds["left out"], strict=True))[WARM_UP:]
        rate = quartiles([count / own for count, own, _ in pairs])
        share = quartiles([out / own for _, own, out in pairs])
        apart = max(abs(a - b) / b for a, b in zip(losses[name], losses["online"], strict=True))
        lines.append(
            f"| {name} | {size} | {rate['median']:.0f} | {share['median']:.3f} ({share['lower_quartile']:.3f} to "
            f"{share['upper_quartile']:.3f}) | {apart:.1e} |"
        )
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines))
    console.print(json.dumps({"conversations a second while writing": writing}))


def measured(
    sources: dict[str, Callable[[Batch], TargetFeatures]],
    batches: list[Batch],
    start: torch.nn.Module,
    config: TrainConfig,
    accelerator: Accelerator,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and loss of every step, by side; each step begins with another side."""
    heads = {name: copy.deepcopy(start) for name in sources}
    optimizers = {name: build_optimizer(head, config.optim, len(batches), {}) for name, head in heads.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    losses: dict[str, list[float]] = {name: [] for name in sources}
    names = list(sources)
    for number, batch in enumerate(batches):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            features = sources[name](batch)
            with autocast(accelerator, config.loop.precision):
                output = heads[name](features)
            (output.loss / batch.loss_mask_BT.sum()).backward()
            torch.nn.utils.clip_grad_norm_(heads[name].parameters(), config.optim.clip)
            optimizer, schedule = optimizers[name]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seconds[name].append(time.perf_counter() - began)
            losses[name].append(float(output.losses_K.sum() / output.counts_K.sum()))
        console.print(f"step {number + 1} of {len(batches)}", end="\r")
    return seconds, losses


if __name__ == "__main__":
    main()
