"""What one change of a recipe does: trainings of equal length from the same start, with one option
changed at a time.

    python benchmarks/recipes.py --conversations conversations.jsonl \\
        --prompts eval/*.jsonl held-out/*.jsonl

Acceptance is compared and not the loss, which differs with the objective: real, greedy, in float32,
on the same prompts of every kind. The states of the conversations are computed once and shared by
all runs, so that a run's time is the head's own; a change whose steps cost more gets fewer of them.
A training that fails is named in the table. What is finished is not made again: the command resumes
where it was stopped. `--seeds 0 1 2` repeats the changes named by `--only`, where differences are
small. `--sampled` adds what a head is worth at temperature 1: the acceptance rate of exact
verification, 1 - TV, over conversations that were sampled and not trained on. The table is
`recipes.md` under `--output`.
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path
from typing import Any

from common import TARGET, TREES, acceptance, arguments, encoded, remembered, replay_target, save
from torch import Tensor

from headstart.heads import DraftHead
from headstart.heads.checkpoints.save_load import load_head
from headstart.heads.objective import Objective
from headstart.inference import Target, load_tokenizer
from headstart.inference.drafters.acceptance import means
from headstart.inference.replay import TOKENS_AT_ONCE, ReplayTarget
from headstart.inference.targets.provenance import hardware
from headstart.scripts.command_line import options
from headstart.train.config import TrainConfig
from headstart.train.data.conversations import read_conversations
from headstart.train.data.split import rendering
from headstart.train.evaluate import batched, sums_of
from headstart.train.loop import train

AS_IT_IS = "as it is"
CHANGES = {
    AS_IT_IS: [],
    "loss: hard CE": ["objective.loss={ce: 1.0}"],
    "loss: reverse KL": ["objective.loss={reverse_kl: 1.0}"],
    "loss: TV": ["objective.loss={tv: 1.0}"],
    "loss: LK, alpha": ["objective.loss={lk_alpha: 1.0}"],
    "loss: LK, lambda": ["objective.loss={lk_lambda: 1.0}"],
    "loss: soft CE and TV": ["objective.loss={soft_ce: 0.5, tv: 0.5}"],
    "loss: soft CE and hard CE": ["objective.loss={soft_ce: 0.5, ce: 0.5}"],
    "depth weights: all 1": ["objective.decay=1.0"],
    "depth weights: 0.6": ["objective.decay=0.6"],
    "depth weights: D-PACE": ["objective.depth_weights=d_pace"],
    "2 steps of training-time test": ["head.train_steps=2"],
    "3 steps of training-time test": ["head.train_steps=3"],
    "5 steps of training-time test": ["head.train_steps=5"],
    "7 steps of training-time test": ["head.train_steps=7"],
    "3.1: fc_norm": ["head.fc_norm=true"],
    "3.1: norm_output": ["head.norm_output=true"],
    "3.1: both": ["head.fc_norm=true", "head.norm_output=true"],
    "norm_before_residual": ["head.norm_before_residual=true"],
    "norms of speculators": [
        "head.norm_before_residual=true",
        "head.norm_before_fc=true",
        "head.norm_output=true",
    ],
    "draft vocabulary 2,048": ["head.draft_vocab_size=2048"],
    "draft vocabulary 8,192": ["head.draft_vocab_size=8192"],
    "features: last block but one": ["head.feature_layers=[28]"],
    "features: 9, 19, 28": ["head.feature_layers=[9, 19, 28]"],
    "features: 5 of them": ["head.feature_layers=[1, 8, 14, 21, 27]"],
    "2 decoder layers": ["head.num_layers=2"],
    "MLP of 768, random start": ["head.intermediate_size=768", "head.start=random"],
    "MLP of 3,072, random start": ["head.intermediate_size=3072", "head.start=random"],
    "start: random": ["head.start=random"],
    "own embedding": ["head.own_embedding=true"],
    "AdamW, lr 3e-4": ["optim.name=adamw", "optim.lr=3e-4"],
    "AdamW, lr 1e-3": ["optim.name=adamw", "optim.lr=1e-3"],
    "AdamW, lr 3e-3": ["optim.name=adamw", "optim.lr=3e-3"],
    "Muon, lr 2e-3": ["optim.name=muon", "optim.lr=2e-3"],
    "Muon, lr 5e-3": ["optim.name=muon", "optim.lr=5e-3"],
    "Muon, lr 1e-2": ["optim.name=muon", "optim.lr=1e-2"],
    "Muon, lr 2e-2": ["optim.name=muon", "optim.lr=2e-2"],
    "linear schedule": ["optim.schedule=linear"],
    "constant after the warm-up": ["optim.schedule=constant_with_warmup"],
    "batches of 4": ["loop.batch_size=4"],
    "batches of 16": ["loop.batch_size=16"],
    "packed rows": ["data.pack=1024", "loop.batch_size=2"],
    "states in int8": ["features.format=int8"],
}
"""What is changed, in the table's order, and the options that change it. KL has the gradient of
soft CE."""
COSTS = {
    "2 steps of training-time test": 0.74,
    "3 steps of training-time test": 0.87,
    "5 steps of training-time test": 1.2,
    "7 steps of training-time test": 1.6,
    "draft vocabulary 8,192": 1.15,
    "2 decoder layers": 1.4,
    "MLP of 768, random start": 0.95,
    "MLP of 3,072, random start": 1.1,
    "batches of 4": 0.5,
    "batches of 16": 2.0,
}
"""Time of a step over that of the recipe as it is, about, where it differs."""

RATES = 3
"""Depths whose acceptance rate at temperature 1 is shown."""


def main() -> None:
    """Train and measure what is missing, and write the table."""
    parser = arguments(__doc__, "runs/recipes")
    parser.add_argument("--config", default="configs/smollm2-eagle3.yaml")
    parser.add_argument("--conversations", required=True, help="JSONL file to train on")
    parser.add_argument(
        "--prompts", nargs="+", required=True, help="JSONL files of prompts, one kind each"
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="of each training; fewer where a step costs more"
    )
    parser.add_argument(
        "--max-conversations", type=int, default=1000, help="conversations that are read"
    )
    parser.add_argument(
        "--draft-vocabulary",
        type=int,
        default=4096,
        help="of so few conversations; 0: the config's",
    )
    parser.add_argument(
        "--options", nargs="*", default=[], help="of every training, such as data.max_length=1024"
    )
    parser.add_argument("--limit", type=int, default=6, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--sampled",
        help="JSONL file of sampled conversations, for the acceptance rate at temperature 1",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CHANGES,
        metavar="CHANGE",
        help=f"some of: {', '.join(CHANGES)}",
    )
    args = parser.parse_args()
    kinds = encoded(load_tokenizer(TARGET), args.prompts, args.limit)
    target = replay_target(kinds, args.new_tokens)
    columns = ["change", *TREES, "over as it is", *(["rates at T = 1"] if args.sampled else [])]
    columns += ["seconds a step", "steps", "seeds"]
    found: dict[str, list[dict[str, Any]]] = {}
    for name in dict.fromkeys([AS_IT_IS, *(args.only or CHANGES)]):
        found[name] = [measured(name, seed, args, target, kinds) for seed in args.seeds]
        lines = [
            (
                f"Hardware: {hardware()}. {args.steps} steps of {args.config}, or as many as take"
                f" the same time; acceptance length, the mean of {len(kinds)} kinds of {args.limit}"
                f" prompts, {args.new_tokens} tokens."
            ),
            "",
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
            *(table_row(each, runs, found[AS_IT_IS], len(columns)) for each, runs in found.items()),
        ]
        save(str(Path(args.output) / "recipes.md"), lines)


def measured(
    name: str,
    seed: int,
    args: argparse.Namespace,
    target: ReplayTarget,
    kinds: dict[str, list[Tensor]],
) -> dict[str, Any]:
    """Train with one change, and measure its acceptance; a training that fails is reported as an
    error."""
    folder = Path(args.output) / file_name(f"{name} {seed}")
    states = file_name(
        " ".join(["states", *(option for option in CHANGES[name] if "feature" in option)])
    )
    given = [
        "--config",
        args.config,
        "--data.sources",
        f"[{args.conversations}]",
        "--output",
        str(folder),
    ]
    given += [
        f"--data.max_conversations={args.max_conversations}",
        f"--loop.seed={seed}",
        "--loop.save_every=0",
    ]
    given += [f"--head.draft_vocab_size={args.draft_vocabulary}"] if args.draft_vocabulary else []
    given += ["--loop.eval_every=0", f"--loop.max_steps={round(args.steps / COSTS.get(name, 1.0))}"]
    given += ["--eval.prompts=1", "--eval.max_new_tokens=8", "--eval.conversations=8"]
    given += ["--features.mode=cached", f"--features.folder={Path(args.output) / states}"]
    given += [f"--{option}" for option in [*args.options, *CHANGES[name]]]

    def make() -> dict[str, Any]:
        try:
            config = options(TrainConfig, "train", "", given)
            head, metadata = load_head(train(config) / "last")
        except ValueError as error:
            return {"error": str(error)}
        run = metadata.training
        lengths = acceptance(target, head, kinds, args.new_tokens)
        rates = (
            {"rates": sampled_rates(target.original, head, args.sampled, config)}
            if args.sampled
            else {}
        )
        return {
            "steps": run["step"],
            "seconds_per_step": run["seconds"] / run["step"],
            **lengths,
            **rates,
        }

    measure = {
        "prompts": args.prompts,
        "limit": args.limit,
        "new_tokens": args.new_tokens,
        "options": given,
    }
    measure |= {"sampled": args.sampled} if args.sampled else {}
    return remembered(folder.with_suffix(".json"), measure, make)


def sampled_rates(target: Target, head: DraftHead, path: str, config: TrainConfig) -> list[float]:
    """Acceptance rate at temperature 1 by depth, the true tokens before it given: 1 - TV, where TV
    is the TV loss."""
    render = rendering(config, target, load_tokenizer(TARGET))
    rows = enumerate(read_conversations(path))
    examples = [
        example
        for number, row in rows
        for example in render.encode(row, f"{path}: row {number}", number)
    ]
    sums = sums_of(target, head, Objective({"tv": 1.0}), batched(examples, TOKENS_AT_ONCE))
    loss_K, _ = means(sums, head.max_depth)
    return [1 - loss for loss in loss_K[:RATES]]


def file_name(text: str) -> str:
    """The text with a hyphen for all that is no letter or digit."""
    return "-".join(re.findall(r"\w+", text.replace("_", "-")))


def table_row(
    name: str, runs: list[dict[str, Any]], base: list[dict[str, Any]], columns: int
) -> str:
    """Means over kinds and seeds; the ratio to `base` in trees, with its standard error over kinds
    and seeds."""
    if errors := [run["error"] for run in runs if "error" in run]:
        return "| " + " | ".join([name, errors[0], *[""] * (columns - 3), str(len(runs))]) + " |"
    cells = [
        name,
        *(
            f"{statistics.mean(statistics.mean(run[tree].values()) for run in runs):.3f}"
            for tree in TREES
        ),
    ]
    tree = [*TREES][-1]
    pairs = [(run, own) for run, own in zip(runs, base, strict=True) if "error" not in own]
    ratios = [run[tree][kind] / own[tree][kind] for run, own in pairs for kind in run[tree]]
    error = f" ± {statistics.stdev(ratios) / len(ratios) ** 0.5:.3f}" if len(ratios) > 1 else ""
    cells.append(f"{statistics.mean(ratios):.3f}{error}" if ratios else "")
    if all("rates" in run for run in runs):
        rates = zip(*(run["rates"] for run in runs), strict=True)
        cells.append(" ".join(f"{statistics.mean(rate):.3f}" for rate in rates))
    cells.append(f"{statistics.mean(run['seconds_per_step'] for run in runs):.2f}")
    cells += [f"{statistics.mean(run['steps'] for run in runs):.0f}", str(len(runs))]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
