"""What one change of a recipe does: the same short training from the same start, with one option changed at a time.

    python benchmarks/recipes.py --conversations conversations.jsonl --output runs/recipes

Acceptance is compared and not the loss, which differs with the objective: real, greedy, on held-out prompts. The
states of the first conversations are computed once and shared by all runs, so that a run costs the head's own steps
only. A run that is finished is not made again: the command resumes where it was stopped. The table is `recipes.md`
under `--output`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from headstart.heads.checkpoints.save_load import load_head
from headstart.scripts.command_line import options
from headstart.train.config import TrainConfig
from headstart.train.console import console, show_on_console
from headstart.train.loop import train

CHANGES = {
    "as it is": [],
    "AdamW, lr 1e-3": ["--optim.name=adamw", "--optim.lr=1e-3"],
    "AdamW, lr 3e-4": ["--optim.name=adamw", "--optim.lr=3e-4"],
    "Muon, lr 5e-3": ["--optim.lr=5e-3"],
    "linear schedule": ["--optim.schedule=linear"],
    "constant after the warm-up": ["--optim.schedule=constant_with_warmup"],
    "EMA 0.95": ["--optim.ema=0.95"],
    "start: random": ["--head.start=random"],
    "3.1: fc_norm and norm_output": ["--head.fc_norm=true", "--head.norm_output=true"],
    "loss: hard CE": ["--head.loss={ce: 1.0}"],
    "loss: reverse KL": ["--head.loss={reverse_kl: 1.0}"],
    "loss: LK, alpha": ["--head.loss={lk_alpha: 1.0}"],
    "loss: LK, lambda": ["--head.loss={lk_lambda: 1.0}"],
    "depth weights: D-PACE": ["--head.depth_weights=d_pace"],
    "2 steps of training-time test": ["--head.train_steps=2"],
    "7 steps of training-time test": ["--head.train_steps=7"],
    "draft vocabulary 2,048": ["--head.draft_vocab_size=2048"],
    "states in int8": ["--features.format=int8"],
}
"""What is changed, in the table's order, and the options that change it."""


def main() -> None:
    """Train what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-eagle3.yaml")
    parser.add_argument("--conversations", required=True, help="JSONL file to train on")
    parser.add_argument("--steps", type=int, default=80, help="of each run")
    parser.add_argument("--limit", type=int, default=700, help="conversations that are read")
    parser.add_argument("--prompts", type=int, default=32, help="held out, for acceptance")
    parser.add_argument("--only", nargs="+", choices=CHANGES, metavar="CHANGE", help=f"some of: {', '.join(CHANGES)}")
    parser.add_argument("--output", default="runs/recipes")
    args = parser.parse_args()
    output = Path(args.output)
    lines = [
        f"{args.steps} steps of {args.config}; acceptance length on {args.prompts} held-out prompts, with its 95 % "
        "interval; accuracy at depths 1 to 3, the true tokens before them given.",
        "",
        "| change | chain | dynamic tree | accuracy | seconds a step |",
        "|---|---|---|---|---|",
    ]
    for name in args.only or CHANGES:
        states = "states-int8" if "--features.format=int8" in CHANGES[name] else "states"
        given = [
            *("--config", args.config, "--data.sources", f"[{args.conversations}]"),
            *("--output", str(output / "".join(c if c.isalnum() else "-" for c in name))),
            *(f"--data.max_conversations={args.limit}", "--data.held_out=0.08"),
            "--head.draft_vocab_size=4096",  # of the tokens of so few conversations
            *("--features.mode=cached", "--features.folder", str(output / states)),
            *(f"--loop.max_steps={args.steps}", "--loop.eval_every=0", "--loop.save_every=0"),
            *(f"--eval.prompts={args.prompts}", "--eval.new_tokens=64", "--eval.conversations=60"),
        ]
        metadata = load_head(train(options(TrainConfig, "train", "", [*given, *CHANGES[name]])) / "best")[1]
        found, run = metadata.measured, metadata.training
        chain, dynamic = (
            f"{row['acceptance_length']:.2f} ({row['interval'][0]:.2f} to {row['interval'][1]:.2f})"
            for row in (found["trees"]["chain"], found["trees"]["dynamic"])
        )
        accuracy = " ".join(f"{ranks[0]:.3f}" for ranks in found["accuracy"][:3])
        lines.append(f"| {name} | {chain} | {dynamic} | {accuracy} | {run['seconds'] / run['step']:.2f} |")
        (output / "recipes.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines))


if __name__ == "__main__":
    show_on_console()
    main()
