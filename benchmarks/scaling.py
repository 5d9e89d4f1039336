"""Acceptance by the number of answer tokens that a head was trained on: measured, and a law fitted
to it.

    python benchmarks/scaling.py --conversations conversations.jsonl \\
        --prompts eval/*.jsonl held-out/*.jsonl

For each size a head is trained on the first conversations that hold as many answer tokens, by one
recipe and for the same number of epochs; its draft vocabulary grows with the data, because a few
conversations hold few different tokens. Acceptance length is measured on every file of prompts, one
kind each, greedily in float32. The law is

    length(tokens) = start + gain * log2(tokens / 100,000)

fitted to each kind by least squares: `gain` is what twice the data adds. Its error is that of the
largest size, predicted from the smaller ones. What is finished is not made again: the command
resumes where it was stopped. `--also NAME=HEAD` measures other heads beside them. The tables are
`scaling.md` under `--output`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    TARGET,
    TREES,
    acceptance,
    arguments,
    encoded,
    named_heads,
    remembered,
    replay_target,
    save,
)
from torch import Tensor

from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import load_tokenizer
from headstart.inference.replay import ReplayTarget
from headstart.inference.targets.provenance import hardware
from headstart.scripts.command_line import options
from headstart.train.config import TrainConfig
from headstart.train.data.conversations import open_source
from headstart.train.loop import train

SIZES = ["50000:4096", "100000:6144", "200000:8192", "400000:8192"]
MORE = (1e6, 3e6, 10e6)
"""Answer tokens that the law is asked about."""
UNIT = 100_000
"""Answer tokens at which a line has its start."""
Lengths = dict[str, dict[str, float]]
"""Acceptance length by tree, then by kind."""


@dataclass(frozen=True)
class Law:
    """The line of a kind of prompt."""

    start: float
    """Acceptance length at `UNIT` answer tokens."""
    gain: float
    """Increase of the acceptance length when the data is doubled."""

    @classmethod
    def fitted(cls, lengths: Mapping[int, float]) -> Law:
        """Fit the line to acceptance lengths by answer tokens, by least squares."""
        doublings = [math.log2(tokens / UNIT) for tokens in lengths]
        middle = sum(doublings) / len(doublings)
        mean = sum(lengths.values()) / len(lengths)
        covariance = sum(
            (place - middle) * length
            for place, length in zip(doublings, lengths.values(), strict=True)
        )
        gain = covariance / sum((place - middle) ** 2 for place in doublings)
        return cls(mean - gain * middle, gain)

    def length(self, tokens: float) -> float:
        """Acceptance length after training on that many answer tokens."""
        return self.start + self.gain * math.log2(tokens / UNIT)


def main() -> None:
    """Train what is missing, measure, fit, and write the tables."""
    parser = arguments(__doc__, "runs/scaling")
    parser.add_argument("--config", default="configs/smollm2-eagle3.yaml")
    parser.add_argument("--conversations", required=True, help="JSONL file to train on")
    parser.add_argument(
        "--prompts", nargs="+", required=True, help="JSONL files of prompts, one kind each"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=SIZES,
        metavar="TOKENS[:VOCABULARY]",
        help="the config's if none",
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--options", nargs="*", default=[], help="of each training, such as optim.lr=5e-3"
    )
    parser.add_argument("--limit", type=int, default=20, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument(
        "--also", nargs="*", default=[], metavar="NAME=HEAD", help="heads to measure beside them"
    )
    args = parser.parse_args()
    others, output = named_heads(parser, args.also), Path(args.output)
    pairs = (each.partition(":") for each in args.sizes)
    sizes = {int(tokens): int(vocabulary or 0) for tokens, _, vocabulary in pairs}
    conversations = {
        tokens: conversations_with(args.conversations, tokens) for tokens in sorted(sizes)
    }
    output.mkdir(parents=True, exist_ok=True)
    kinds = encoded(load_tokenizer(TARGET), args.prompts, args.limit)
    target = replay_target(kinds, args.new_tokens)
    measure = {"prompts": args.prompts, "limit": args.limit, "new_tokens": args.new_tokens}
    beside = {}
    for name, head in others.items():
        make = partial(acceptance, target, head, kinds, args.new_tokens)
        beside[name] = remembered(output / f"{name}.json", measure, make)
    found: dict[int, dict[str, Any]] = {}
    for tokens, count in conversations.items():
        given = ["--config", args.config, "--data.sources", f"[{args.conversations}]"]
        given += ["--output", str(output / str(tokens)), f"--data.max_conversations={count}"]
        given += [f"--head.draft_vocab_size={sizes[tokens]}"] if sizes[tokens] else []
        given += [f"--loop.epochs={args.epochs}"]
        given += [f"--{each}" for each in args.options]
        make = partial(trained, given, target, kinds, args.new_tokens)
        found[tokens] = remembered(output / f"{tokens}.json", {**measure, "options": given}, make)
        save(str(output / "scaling.md"), tables(found, beside, args))


def trained(
    given: list[str], target: ReplayTarget, kinds: dict[str, list[Tensor]], new_tokens: int
) -> dict[str, Any]:
    """Train by these options, and return the head's acceptance and the hours that it took."""
    head, metadata = load_head(train(options(TrainConfig, "train", "", given)) / "last")
    lengths = acceptance(target, head, kinds, new_tokens)
    return {"lengths": lengths, "hours": metadata.training["seconds"] / 3600}


def conversations_with(path: str, tokens: int) -> int:
    """Number of the first conversations that hold this many answer tokens together."""
    total = 0
    for number, (_, row) in enumerate(open_source(path).read(), start=1):
        total += row["tokens"]
        if total >= tokens:
            return number
    raise ValueError(
        f"{path} holds {total} answer tokens, not {tokens}; name smaller sizes by --sizes"
    )


def tables(
    found: dict[int, dict[str, Any]], others: dict[str, Lengths], args: argparse.Namespace
) -> list[str]:
    """Measured lengths by tree, from three sizes on with the law, its error and what more data
    would give."""
    sizes = sorted(found)
    lines = [
        f"Hardware: {hardware()}. {args.limit} prompts of each file, {args.new_tokens} tokens,"
        " greedy, float32."
    ]
    for tree in TREES:
        columns = {f"{size:,}": found[size]["lengths"][tree] for size in sizes}
        columns |= {name: lengths[tree] for name, lengths in others.items()}
        kinds = [*next(iter(columns.values()))]
        columns = {
            name: {**each, "mean": sum(each.values()) / len(kinds)}
            for name, each in columns.items()
        }
        kinds.append("mean")
        law = len(sizes) > 2
        ahead = [f"law: {tokens / 1e6:g}M" for tokens in MORE] if law else []
        heads = ["prompts", *columns, *(["twice the data", *ahead] if law else [])]
        lines += [
            "",
            f"## {tree[0].upper()}{tree[1:]}",
            "",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
        ]
        errors = []
        for kind in kinds:
            lengths = {size: columns[f"{size:,}"][kind] for size in sizes}
            cells = [f"{each[kind]:.2f}" for each in columns.values()]
            if law:
                fit = Law.fitted(lengths)
                cells += [f"{fit.gain:+.2f}", *(f"{fit.length(tokens):.2f}" for tokens in MORE)]
                before = Law.fitted({size: lengths[size] for size in sizes[:-1]})
                errors.append(before.length(sizes[-1]) - lengths[sizes[-1]])
            lines.append(f"| {kind} | " + " | ".join(cells) + " |")
        if law:
            error = math.sqrt(sum(each**2 for each in errors[:-1]) / len(errors[:-1]))
            lines += [
                "",
                (
                    f"{sizes[-1]:,} tokens, predicted from the smaller sizes: {error:.2f} off (root"
                    f" mean square over the kinds); the mean is predicted {abs(errors[-1]):.2f} too"
                    f" {'high' if errors[-1] > 0 else 'low'}."
                ),
            ]
    hours = ", ".join(f"{found[size]['hours']:.2f} for {size:,}" for size in sizes)
    return [*lines, "", f"Hours of training: {hours}."]


if __name__ == "__main__":
    main()
