"""Every head on the same conversations with the same budget: trained, then compared on the same
prompts.

    python benchmarks/heads.py --conversations conversations.jsonl \\
        --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl

One training per configs/smollm2-*.yaml, each as long as `--minutes` allows on this machine (a probe
of some steps tells how many that are); then, for every prompt file and temperature, all heads with
a chain and with a dynamic tree in every round, and with the default, which chooses a tree or a
plain step in each: interleaved prompt by prompt with stock `model.generate` and plain steps; then
acceptance after longer and longer contexts. Every piece that is finished lies under `--output` and
is not made again: the command resumes where it was stopped. `heads.md` there holds the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from common import TARGET, Side, arguments, compared, encoded, ours, ratio, remembered, save, stock
from torch import Tensor

from headstart.console import console
from headstart.heads.checkpoints.files import json_ready
from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer
from headstart.inference.targets.provenance import provenance
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.inference.trees.stats import acceptance_figures
from headstart.inference.tuning.tree_search import default_dynamic_tree
from headstart.scripts.command_line import options
from headstart.scripts.measuring.comparison import answer_settings
from headstart.train.config import TrainConfig
from headstart.train.data.conversations import read_conversations
from headstart.train.loop import train

CONFIGS = Path(__file__).parents[1] / "configs"
PROBE_STEPS = 12
"""Steps of the run that measures how long one takes."""
Sides = Callable[[], dict[str, Side]]


def main() -> None:
    """Make the pieces that are missing, then the tables."""
    parser = arguments(__doc__, "runs/heads")
    parser.add_argument("--conversations", required=True, help="JSONL file to train on")
    parser.add_argument(
        "--prompts", nargs="+", required=True, help="JSONL files of prompts; a table each"
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        help=(
            "names of configs/smollm2-NAME.yaml, each with options of its own: "
            "'dflash --head.num_layers=2'; all if not given"
        ),
    )
    parser.add_argument(
        "--options", default="", help="options for every training: '--data.max_conversations=1000'"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, for each head")
    parser.add_argument(
        "--steps", type=int, help="of training, for each head: in place of --minutes"
    )
    parser.add_argument("--limit", type=int, default=20, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--nodes", type=int, default=32, help="of the dynamic trees")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument(
        "--contexts",
        nargs="*",
        type=int,
        default=[128, 256, 512, 1024, 2048],
        help="tokens of context after which acceptance is measured; training saw up to 512",
    )
    parser.add_argument("--eager", action="store_true", help="transformers' own operations")
    parser.add_argument(
        "--also",
        nargs="*",
        default=[],
        metavar="NAME=FOLDER",
        help="heads that are trained already",
    )
    parser.add_argument(
        "--train-only", action="store_true", help="compare later, by the same command without this"
    )
    args = parser.parse_args()
    # a mistake is told before the trainings
    prompts = encoded(load_tokenizer(TARGET), args.prompts, args.limit)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    names = args.heads or [
        path.stem.removeprefix("smollm2-") for path in sorted(CONFIGS.glob("smollm2-*.yaml"))
    ]
    given = ["--data.sources", f"[{args.conversations}]", *args.options.split()]
    folders = {name: trained(name, given, args.minutes, args.steps, output) for name in names}
    if args.train_only:
        return
    folders |= {
        name: Path(folder) for name, _, folder in (pair.partition("=") for pair in args.also)
    }

    # not before a piece is missing
    sides = cache(partial(loaded, folders, args.nodes, not args.eager))
    measure = {
        "heads": [*folders],
        "limit": args.limit,
        "new_tokens": args.new_tokens,
        "nodes": args.nodes,
    }
    measure |= {"compile": not args.eager}
    pieces: dict[str, Any] = {}
    after: dict[str, dict[str, Any]] = {}
    for path, (kind, rows) in zip(args.prompts, prompts.items(), strict=True):
        for temperature in args.temperatures:
            name = f"{kind}-T{temperature:g}"
            make = partial(
                measured, sides, rows, answer_settings(args.new_tokens, temperature), name
            )
            pieces[name] = remembered(output / f"{name}.json", {**measure, "prompts": path}, make)
            save(str(output / "heads.md"), tables(pieces, after, folders))
    if args.contexts:
        measure |= {
            "prompts": args.prompts[0],
            "contexts": args.contexts,
            "conversations": args.conversations,
        }
        make = partial(after_contexts, sides, args)
        after = remembered(output / "contexts.json", measure, make)
        save(str(output / "heads.md"), tables(pieces, after, folders))


def trained(name: str, given: list[str], minutes: float, steps: int | None, output: Path) -> Path:
    """Train a head for `steps`, or about so many minutes, evaluations left out; a finished run is
    not trained again."""
    config_name, *more = name.split()
    folder = output / name.replace(" --head.", "-")
    given = ["--config", str(CONFIGS / f"smollm2-{config_name}.yaml"), *given, *more]
    config = options(TrainConfig, "train", "", [*given, "--output", str(folder)])
    plan = folder.with_name(f"{folder.name}.steps.json")

    def probed() -> dict[str, float]:
        loop = dataclasses.replace(config.loop, max_steps=PROBE_STEPS, eval_every=0, save_every=0)
        probe = train(
            dataclasses.replace(
                config, loop=loop, output=str(folder.with_name(f"{folder.name}.probe"))
            )
        )
        run = load_head(probe / "last")[1].training
        seconds = run["seconds"] / run["step"]
        return {"steps": max(1, round(60 * minutes / seconds)), "seconds_per_step": seconds}

    if steps is None:
        steps = remembered(plan, {"minutes": minutes, "options": given}, probed)["steps"]
    loop = dataclasses.replace(config.loop, max_steps=steps, eval_every=0)
    return train(dataclasses.replace(config, loop=loop)) / "best"


def loaded(folders: dict[str, Path], nodes: int, compile: bool) -> dict[str, Side]:
    """Every side by its name; heads with an adapter have a target, and a `generate`, of their
    own."""
    shared = Target.from_pretrained(TARGET)
    sides = {
        "generate": stock(shared),
        "plain": ours(SpeculativeLM.from_pretrained(shared, compile=compile)),
    }
    for name, folder in folders.items():
        target, (head, metadata) = shared, load_head(folder)
        if metadata.adapted:
            target = Target.from_pretrained(TARGET)
            target.merge_adapter(folder / "adapter")
            sides[f"generate, {name}"] = stock(target)
        always = partial(
            SpeculativeLM.from_pretrained, target, folder, compile=compile, adaptive=False
        )
        sides[f"{name}: chain"] = ours(always(tree=f"chain:{head.max_depth}"))
        sides[f"{name}: tree"] = ours(always(tree=default_dynamic_tree(head.max_depth, nodes)))
        sides[f"{name}: default"] = ours(
            SpeculativeLM.from_pretrained(target, folder, compile=compile)
        )
    return sides


def measured(
    sides: Sides, rows: list[Tensor], settings: dict[str, Any], title: str
) -> dict[str, Any]:
    """Speed of every side, and what the heads' decoding counted."""
    torch.manual_seed(0)
    rates, stats = compared(sides(), rows, settings, title)
    heads = {name: found for name, found in stats.items() if ": " in name}
    counted = {
        name: {**acceptance_figures(found), "parts": found.round_parts}
        for name, found in heads.items()
    }
    return json_ready({"rates": rates, "heads": counted, **provenance()})


def after_contexts(sides: Sides, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Greedy acceptance of each head's tree when earlier turns, of other conversations, stand
    before a prompt."""
    tokenizer, settings = load_tokenizer(TARGET), answer_settings(args.new_tokens, 0.0)
    earlier = [
        turn for row in read_conversations(args.conversations, 200) for turn in row["messages"]
    ]
    found: dict[str, dict[str, Any]] = {}
    for length in args.contexts:
        asked = []
        for number, messages in enumerate(read_prompts(args.prompts[0], args.limit)):
            first = 20 * number % len(earlier)
            turns = 0
            while (
                prompt_ids(tokenizer, earlier[first : first + turns] + messages).shape[1]
                < length - args.new_tokens
            ):
                turns += 2
            asked.append(prompt_ids(tokenizer, earlier[first : first + turns] + messages))
        for name, side in sides().items():
            if name.endswith(": tree"):
                runs = [side(ids, settings)[1] for ids in asked]
                found.setdefault(name, {})[str(length)] = json_ready(
                    acceptance_figures(Stats.merged(runs))
                )
        console.print(f"contexts of {length} tokens: done")
    return found


def tables(
    pieces: dict[str, Any], after: dict[str, dict[str, Any]], folders: dict[str, Path]
) -> list[str]:
    """The page's tables in Markdown."""
    lines = [f"Hardware: {next(iter(pieces.values()))['hardware']}.", ""]
    for piece, row in pieces.items():
        lines += [
            f"### {piece}",
            "",
            (
                "| head | acceptance length (95 %) | rate by depth | draft, ms a round | vs"
                " generate | vs plain |"
            ),
            "|---|---|---|---|---|---|",
        ]
        for name, found in row["heads"].items():
            own = f"generate, {name.partition(':')[0]}"
            generate = row["rates"].get(own, row["rates"]["generate"])
            rates, plain = row["rates"][name], row["rates"]["plain"]
            low, high = found["interval"]
            by_depth = " ".join(
                "-" if rate is None else f"{rate:.2f}" for rate in found["acceptance_rate_by_depth"]
            )
            lines.append(
                f"| {name} | {found['acceptance_length']:.2f} ({low:.2f} to {high:.2f}) |"
                f" {by_depth} | {1000 * found['parts']['draft']:.1f} | {ratio(rates, generate)} |"
                f" {ratio(rates, plain)} |"
            )
        lines.append("")
    if after:
        contexts = [*next(iter(after.values()))]
        lines += [
            "### after longer contexts",
            "",
            f"| head | {' | '.join(contexts)} |",
            "|---" * (1 + len(contexts)) + "|",
        ]
    for name, by_length in after.items():
        lengths = [f"{found['acceptance_length']:.2f}" for found in by_length.values()]
        lines.append(f"| {name} | " + " | ".join(lengths) + " |")
    lines += [
        "",
        "### what was trained",
        "",
        "| head | parameters | steps | answer tokens | minutes |",
        "|---|---|---|---|---|",
    ]
    for name, folder in folders.items():
        head, metadata = load_head(folder)
        count, run = sum(parameter.numel() for parameter in head.parameters()), metadata.training
        lines.append(
            f"| {name} | {count:,} | {run['step']} | {run['answer_tokens']:,} |"
            f" {run['seconds'] / 60:.0f} |"
        )
    return lines


if __name__ == "__main__":
    main()
