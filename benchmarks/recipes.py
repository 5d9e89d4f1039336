"""What one change of a recipe does: trainings of equal length from the same start, with one option changed at a time.

    python benchmarks/recipes.py --conversations conversations.jsonl --prompts held-out/*.jsonl --minutes 5

Acceptance is compared and not the loss, which differs with the objective: real, greedy, on prompts of every file. The
states of the first conversations are computed once and shared by all runs, so that a run's time is the head's own. A
run that is finished is not made again: the command resumes where it was stopped. `--seeds 0 1 2` repeats the changes
named by `--only`, where differences are small. The table is `recipes.md` under `--output`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

import torch
from common import TARGET, encoded, train_for

from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import DynamicShape, Target, TreeShape, load_tokenizer
from headstart.scripts.command_line import options
from headstart.train.config import TrainConfig
from headstart.train.console import console, show_on_console
from headstart.train.evaluate import greedy_answers, summary

CHANGES = {
    "as it is": [],
    "loss: soft CE": ["--head.loss={soft_ce: 1.0}"],
    "loss: hard CE": ["--head.loss={ce: 1.0}"],
    "loss: KL": ["--head.loss={kl: 1.0}"],
    "loss: reverse KL": ["--head.loss={reverse_kl: 1.0}"],
    "loss: TV": ["--head.loss={tv: 1.0}"],
    "loss: LK, alpha": ["--head.loss={lk_alpha: 1.0}"],
    "loss: LK, lambda": ["--head.loss={lk_lambda: 1.0}"],
    "loss: soft CE and TV": ["--head.loss={soft_ce: 0.5, tv: 0.5}"],
    "loss: soft CE and hard CE": ["--head.loss={soft_ce: 0.5, ce: 0.5}"],
    "depth weights: all 1": ["--head.decay=1.0"],
    "depth weights: 0.6": ["--head.decay=0.6"],
    "depth weights: D-PACE": ["--head.depth_weights=d_pace"],
    "2 steps of training-time test": ["--head.train_steps=2"],
    "3 steps of training-time test": ["--head.train_steps=3"],
    "5 steps of training-time test": ["--head.train_steps=5"],
    "7 steps of training-time test": ["--head.train_steps=7"],
    "3.1: fc_norm": ["--head.fc_norm=true"],
    "3.1: norm_output": ["--head.norm_output=true"],
    "3.1: both": ["--head.fc_norm=true", "--head.norm_output=true"],
    "norm_before_residual": ["--head.norm_before_residual=true"],
    "draft vocabulary 2,048": ["--head.draft_vocab_size=2048"],
    "draft vocabulary 8,192": ["--head.draft_vocab_size=8192"],
    "draft vocabulary 16,384": ["--head.draft_vocab_size=16384"],
    "features: last block": ["--head.feature_layers=[28]"],
    "features: 9, 19, 28": ["--head.feature_layers=[9, 19, 28]"],
    "features: 5 of them": ["--head.feature_layers=[1, 8, 14, 21, 27]"],
    "2 decoder layers": ["--head.num_layers=2"],
    "MLP of 768, random start": ["--head.intermediate_size=768", "--head.start=random"],
    "MLP of 3,072, random start": ["--head.intermediate_size=3072", "--head.start=random"],
    "start: random": ["--head.start=random"],
    "own embedding": ["--head.own_embedding=true"],
    "AdamW, lr 1e-3": ["--optim.name=adamw", "--optim.lr=1e-3"],
    "AdamW, lr 3e-4": ["--optim.name=adamw", "--optim.lr=3e-4"],
    "Muon, lr 1e-3": ["--optim.lr=1e-3"],
    "Muon, lr 5e-3": ["--optim.lr=5e-3"],
    "Muon, lr 1e-2": ["--optim.lr=1e-2"],
    "linear schedule": ["--optim.schedule=linear"],
    "constant after the warm-up": ["--optim.schedule=constant_with_warmup"],
    "EMA 0.95": ["--optim.ema=0.95"],
    "EMA 0.99": ["--optim.ema=0.99"],
    "batches of 4": ["--loop.batch_size=4"],
    "batches of 16": ["--loop.batch_size=16"],
    "packed rows": ["--data.pack=1024", "--loop.batch_size=2"],
    "states in int8": ["--features.format=int8"],
}
"""What is changed, in the table's order, and the options that change it."""
TREES = {"chain of 3": TreeShape.chain(3), "dynamic tree of 32": DynamicShape(32, 7, 8)}


def main() -> None:
    """Train what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-eagle3.yaml")
    parser.add_argument("--conversations", required=True, help="JSONL file to train on")
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files of prompts to measure on")
    parser.add_argument("--minutes", type=float, default=5.0, help="of each training")
    parser.add_argument("--limit", type=int, default=1500, help="conversations that are read")
    parser.add_argument("--of-each", type=int, default=6, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only", nargs="+", choices=CHANGES, metavar="CHANGE", help=f"some of: {', '.join(CHANGES)}")
    parser.add_argument("--output", default="runs/recipes")
    args = parser.parse_args()
    target, output = Target.from_pretrained(TARGET, torch.bfloat16), Path(args.output)
    files = encoded(load_tokenizer(TARGET), args.prompts, args.of_each)
    prompts = [ids_1T[0] for rows in files.values() for ids_1T in rows]
    lines = [
        f"{args.minutes:g} minutes of {args.config} on {args.limit} conversations; acceptance length on {len(prompts)} "
        "prompts, with its 95 % interval, over all seeds.",
        "",
        f"| change | {' | '.join(TREES)} | seconds a step | steps | seeds |",
        "|---" * (4 + len(TREES)) + "|",
    ]
    for name in args.only or CHANGES:
        found = [measured(name, seed, args, target, prompts) for seed in args.seeds]
        lines.append(table_row(name, found))
        (output / "recipes.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines), markup=False)


def measured(
    name: str, seed: int, args: argparse.Namespace, target: Target, prompts: list[torch.Tensor]
) -> dict[str, Any]:
    """Train with one change, and measure its acceptance; a training that diverges is reported as an error."""
    folder = Path(args.output) / file_name(f"{name} {seed}")
    result = folder.with_suffix(".json")
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8"))
    states = file_name(" ".join(["states", *(option for option in CHANGES[name] if "feature" in option)]))
    given = [
        *("--config", args.config, "--data.sources", f"[{args.conversations}]", "--output", str(folder)),
        *(f"--data.max_conversations={args.limit}", f"--loop.seed={seed}", "--loop.save_every=0"),
        "--head.draft_vocab_size=4096",  # of the tokens of so few conversations
        *("--features.mode=cached", "--features.folder", str(Path(args.output) / states)),
        *("--eval.prompts=2", "--eval.new_tokens=8", "--eval.conversations=20"),
    ]
    try:
        head, metadata = load_head(train_for(args.minutes, options(TrainConfig, "train", "", [*given, *CHANGES[name]])))
    except ValueError as error:
        found: dict[str, Any] = {"error": str(error)}
    else:
        head = head.to(target.device, target.dtype).eval()
        run = metadata.training
        found = {"steps": run["step"], "seconds_per_step": run["seconds"] / run["step"]}
        for tree, shape in TREES.items():
            found[tree] = summary(greedy_answers(target, head, shape, prompts, args.new_tokens).stats)
    result.write_text(json.dumps(found), encoding="utf-8")
    return found


def file_name(text: str) -> str:
    """The text with a hyphen for all that is no letter or digit."""
    return "-".join(re.findall(r"\w+", text.replace("_", "-")))


def table_row(name: str, found: list[dict[str, Any]]) -> str:
    """Means over the seeds; intervals are those of one seed, from prompt to prompt."""
    errors = [run["error"] for run in found if "error" in run]
    if errors:
        return f"| {name} | " + " | ".join([errors[0], *[""] * (len(TREES) - 1), "", "", str(len(found))]) + " |"

    def mean(*path: Any) -> float:
        values = []
        for run in found:
            value: Any = run
            for key in path:
                value = value[key]
            values.append(value)
        return statistics.mean(values)

    cells = [
        f"{mean(tree, 'acceptance_length'):.3f} ({mean(tree, 'interval', 0):.2f} to {mean(tree, 'interval', 1):.2f})"
        for tree in TREES
    ]
    cells += [f"{mean('seconds_per_step'):.2f}", f"{mean('steps'):.0f}", str(len(found))]
    return f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    show_on_console()
    main()
