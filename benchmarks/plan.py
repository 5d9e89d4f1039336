"""What `--plan one` says a training step takes, against what it takes.

    python benchmarks/plan.py --config configs/smollm2-eagle3.yaml

One optimizer step on rows of the greatest length, of random tokens. Measured: the tensors that stay (target, weights,
gradients, optimizer), counted one by one, and the peak of those that come and go, from the profiler.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from memory import peak_of

from headstart.heads.checkpoints.save_load import build_head
from headstart.scripts.command import options
from headstart.train.config import TrainConfig
from headstart.train.data.chat_template import Batch
from headstart.train.engines import autocast
from headstart.train.features.online import online_features
from headstart.train.features.placement import load_target
from headstart.train.memory_plan import plan_run
from headstart.train.optim import build_optimizer
from headstart.train.precision import resolved
from headstart.train.provenance import provenance
from headstart.train.setup import head_options

STAYS = ("target", "head", "gradients", "optimizer")


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-eagle3.yaml")
    args = parser.parse_args()
    given = ["--config", args.config, "--data.sources", "[unused.jsonl]", "--output", "unused", "--plan", "one"]
    config = resolved(options(TrainConfig, "train", "", given), Accelerator())
    planned = plan_run(config).memory
    stays, comes = measured(config)
    print(f"{provenance()['hardware']}, torch {torch.__version__}, {args.config}\n")
    print("| | planned, MiB | measured, MiB | planned / measured |\n|---|---|---|---|")
    for name in STAYS:
        row(name, planned[name], stays[name])
    row("comes and goes", sum(size for name, size in planned.items() if name not in STAYS), comes)
    row("together", sum(planned.values()), sum(stays.values()) + comes)


def row(name: str, planned: int, found: int) -> None:
    """A line of the table."""
    print(f"| {name} | {planned / 2**20:,.0f} | {found / 2**20:,.0f} | {planned / found:.3f} |")


def measured(config: TrainConfig) -> tuple[dict[str, int], int]:
    """Bytes that stay, by what they hold, and the peak of the others."""
    accelerator = Accelerator()
    target = load_target(config, accelerator)
    head = build_head(*head_options(config), target.info)
    counts_V = torch.arange(target.info.vocab_size).flip(0) + 1
    head.initialize(target.modules, counts_V)
    head.recompute = config.loop.recompute
    optimizer, _ = build_optimizer(head, config.optim, 10, {})
    rows, length = config.loop.micro_batch or config.loop.batch_size, config.data.max_length
    tokens_BT = torch.randint(head.draft_vocab_size, (rows, length))
    batch = Batch(tokens_BT, torch.ones(rows, length, dtype=torch.bool), ((length,),) * rows)

    def step() -> None:
        features = online_features(target, head, batch)
        with autocast(accelerator, config.loop.precision):
            output = head(features)
        (output.loss / tokens_BT.numel()).backward()
        optimizer.step()

    most = peak_of(step, optimizer)
    parts = getattr(optimizer, "parts", {"": optimizer}).values()
    states = [value for part in parts for state in part.state.values() for value in state.values()]
    return {
        "target": size(target.model.parameters()),
        "head": size(head.parameters()),
        "gradients": size(parameter.grad for parameter in head.parameters() if parameter.grad is not None),
        "optimizer": size(value for value in states if torch.is_tensor(value)),
    }, most


def size(tensors: object) -> int:
    """Bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
