"""A head that adapts to what it decodes: acceptance before and after, on fresh prompts of the same
kind and of others.

    python benchmarks/adapt.py --prompts asked/{translation,roleplay}.jsonl \\
        --replay conversations.jsonl --fresh held-out/*.jsonl --output runs/adapt

The prompts of each file are one kind. They are answered greedily and recorded, and `headstart
adapt` trains the head on the recordings:

    alone    from the first head, to each kind by itself
    curve    the same with fewer recorded answers
    day      one kind after another: every hour answers of one more kind are recorded, and the
             head adapts

A day adapts to all that was recorded until then, as one does who records into one folder.
`--replay` names what half of the training sequences are taken from, so that the head keeps what it
knew: a file of the conversations that it was first trained on, or a folder of answers to other
prompts. Acceptance is measured on fresh prompts by replay: the target answers each once, and the
decoding loop runs over these answers with every head. Every step leaves its result in the output
folder, and is not repeated there.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from common import HEAD, TARGET, TREES, arguments, encoded
from torch import Tensor

from headstart.addons.record import record
from headstart.addons.record.adapt import adapt
from headstart.addons.record.config import AdaptConfig
from headstart.console import console
from headstart.files import text_shards, write_whole
from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import DynamicShape, SpeculativeLM, Target, load_tokenizer
from headstart.inference.feature_cache import MANIFEST
from headstart.inference.replay import ReplayTarget
from headstart.inference.rounds.sequences import left_padded
from headstart.inference.targets.provenance import hardware
from headstart.train.evaluate import difference_interval, greedy_answers

BATCH = 4
"""Prompts that are answered at once."""
Rounds = dict[str, dict[str, list[list[int]]]]
"""By tree and kind, the tokens and rounds of each fresh prompt."""


def main() -> None:
    """Record, adapt and measure; print and write the tables."""
    parser = arguments(__doc__, "runs/adapt")
    parser.add_argument(
        "--prompts",
        nargs="+",
        required=True,
        help="JSONL files of prompts to adapt to, one kind each",
    )
    parser.add_argument(
        "--replay", help="file of conversations, or folder of recorded answers, to train on as well"
    )
    parser.add_argument(
        "--fresh",
        nargs="+",
        required=True,
        help="JSONL files of prompts to measure on, one kind each",
    )
    parser.add_argument("--answers", type=int, default=200, help="recorded answers of each kind")
    parser.add_argument("--limit", type=int, default=40, help="fresh prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=AdaptConfig.steps)
    parser.add_argument(
        "--counts",
        type=int,
        nargs="*",
        default=[200],
        help="recorded answers to adapt to, of each kind alone",
    )
    parser.add_argument("--hours", type=int, default=0, help="adaptations in a day")
    args = parser.parse_args()
    output = Path(args.output)
    answer(
        encoded(load_tokenizer(TARGET), args.prompts, args.answers),
        args.new_tokens,
        output / "recorded",
    )
    measure = Measure(args, output)
    lines = [f"Hardware: {hardware()}.", ""]
    for count in args.counts:
        adapted = {}
        for path in args.prompts:
            kind = Path(path).stem
            files = text_shards(output / "recorded" / kind)[:count]
            recorded = linked(files, output / "recorded" / f"{kind}-{count}")
            adapted[kind] = adapted_head(args, output / f"{kind}-{count}", HEAD, recorded)
            measure.of(adapted[kind])
        lines += measure.table(adapted, f"{count} answers")
        write_whole(output / "tables.md", "\n".join(lines) + "\n")
    lines += day(args, output, measure)
    write_whole(output / "tables.md", "\n".join(lines) + "\n")
    console.print("\n".join(lines), markup=False)


def answer(kinds: dict[str, list[Tensor]], new_tokens: int, output: Path) -> None:
    """Answer all prompts, each kind recorded in a folder of its own."""
    lm = None
    for kind, prompts in kinds.items():
        folder = output / kind
        if len(text_shards(folder)) >= len(prompts):
            continue
        lm = lm or SpeculativeLM.from_pretrained(TARGET, HEAD, tree="chain:5", adaptive=False)
        with record(lm, folder, kind=kind, tokenizer=load_tokenizer(TARGET)) as recording:
            for start in range(0, len(prompts), BATCH):
                batch = [ids_1T[0] for ids_1T in prompts[start : start + BATCH]]
                inputs, mask = left_padded(batch, lm.target.device)
                lm.generate(inputs, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        console.print(f"{kind}: {recording.summary()}")


def linked(files: list[Path], folder: Path) -> Path:
    """A folder with some of the recorded answers, numbered by their age."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / MANIFEST, (files[0].parent / MANIFEST).read_text(encoding="utf-8"))
    for number, path in enumerate(files):
        kind_and_random = path.name.split("-", 2)[2]
        place = folder / f"recorded-{number:020d}-{kind_and_random}"
        if not place.exists():
            os.link(path, place)
    return folder


def adapted_head(args: argparse.Namespace, output: Path, head: str, recorded: Path) -> str:
    """The head after adapting: the new one if it was taken, else the old one."""
    done = output / "taken.json"
    if not done.exists():
        config = AdaptConfig(
            target=TARGET,
            head=head,
            recorded=str(recorded),
            output=str(output),
            replay=args.replay,
            steps=args.steps,
        )
        best = adapt(config)
        write_whole(done, json.dumps(head if best is None else str(best)))
    return str(json.loads(done.read_text(encoding="utf-8")))


class Measure:
    """Acceptance of heads on the fresh prompts; what was measured before is read from the output
    folder."""

    def __init__(self, args: argparse.Namespace, output: Path) -> None:
        self.new_tokens = args.new_tokens
        self.output = output
        self.fresh = encoded(load_tokenizer(TARGET), args.fresh, args.limit)

    @cached_property
    def targets(self) -> dict[str, ReplayTarget]:
        """Replay target of each kind, with the answers to its fresh prompts, which the output
        folder keeps."""
        original = Target.from_pretrained(TARGET, torch.float32)
        original.compile()
        found = {}
        for kind, prompts in self.fresh.items():
            target = ReplayTarget(original)
            path = self.output / "answers" / f"{kind}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                target.learn([ids_1T[0] for ids_1T in prompts], self.new_tokens)
                texts = [[len(prompt), text_T.tolist()] for prompt, text_T in target.texts.items()]
                write_whole(path, json.dumps(texts))
            for length, text in json.loads(path.read_text(encoding="utf-8")):
                target.keep(torch.tensor(text[:length]), torch.tensor(text))
            found[kind] = target
        return found

    def of(self, head: str) -> Rounds:
        """Tokens and rounds of a head."""
        path = self.output / "measured" / f"{Path(head).parent.name}-{Path(head).name}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(
                path, json.dumps(rounds_of(self.targets, head, self.fresh, self.new_tokens))
            )
        found: Rounds = json.loads(path.read_text(encoding="utf-8"))
        return found

    def table(self, adapted: dict[str, str], what: str) -> list[str]:
        """A table for each tree: kinds down, the heads that were adapted to each across."""
        before = self.of(HEAD)
        lines = []
        for tree in TREES:
            lines += [
                f"| {tree}, {what} | before | {' | '.join(adapted)} |",
                "|---" * (2 + len(adapted)) + "|",
            ]
            for kind in self.fresh:
                cells = [f"{length(before[tree][kind]):.2f}"]
                for head in adapted.values():
                    cells.append(change(self.of(head)[tree][kind], before[tree][kind]))
                lines.append(f"| {kind} | {' | '.join(cells)} |")
            lines.append("")
        return lines


def rounds_of(
    targets: dict[str, ReplayTarget], path: str, fresh: dict[str, list[Tensor]], new_tokens: int
) -> Rounds:
    """Tokens and rounds of each fresh prompt with a head."""
    first = next(iter(targets.values()))
    head, _ = load_head(path, first.info, first.dtype)
    head = head.to(first.device).eval()
    found: Rounds = {}
    for name, tree in TREES.items():
        if isinstance(tree, DynamicShape):
            tree = replace(tree, depth=min(tree.depth, head.max_depth))
        found[name] = {}
        for kind, prompts in fresh.items():
            rows = [ids_1T[0] for ids_1T in prompts]
            found[name][kind] = greedy_answers(
                targets[kind], head, tree, rows, new_tokens
            ).stats.tokens_and_rounds
    return found


def length(rounds: list[list[int]]) -> float:
    """Acceptance length of all prompts."""
    tokens, count = torch.tensor(rounds).sum(0).tolist()
    return float(tokens / count)


def change(after: list[list[int]], before: list[list[int]]) -> str:
    """Acceptance length afterwards, and the 95 % confidence interval of the difference, paired by
    prompt."""
    low, high = difference_interval(after, before)
    return f"{length(after):.2f} ({low:+.2f} to {high:+.2f})"


def day(args: argparse.Namespace, output: Path, measure: Measure) -> list[str]:
    """Adapt to one kind after another, each time to all that was recorded until then, and measure
    every head."""
    kinds = [Path(path).stem for path in args.prompts]
    share = args.answers * len(kinds) // max(args.hours, 1)
    head = HEAD
    until_now: list[Path] = []
    heads: dict[str, str] = {}
    for hour in range(args.hours):
        kind = kinds[hour % len(kinds)]
        start = hour // len(kinds) * share
        until_now += text_shards(output / "recorded" / kind)[start : start + share]
        recorded = linked(until_now, output / "recorded" / f"hours-{hour + 1}")
        head = adapted_head(args, output / f"hour-{hour + 1}", head, recorded)
        heads[f"{hour + 1}: {kind}"] = head
    return measure.table(heads, "a day") if heads else []


if __name__ == "__main__":
    main()
