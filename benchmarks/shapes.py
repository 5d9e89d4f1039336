"""Batches and long prompts: the speed of speculation by batch size, and memory by prompt length.

    python benchmarks/shapes.py --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl

Batches: the same prompts at every batch size, all sides interleaved batch by batch, greedy. Memory:
one process for each length and side; the peak is VmHWM (Linux), counted from after loading.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import HEAD, TARGET, arguments, encoded, ratio, save
from process_status import memory_mib
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer
from headstart.inference.targets.provenance import hardware
from headstart.inference.tuning.machine import turns

SIZES = (1, 2, 4, 8)
"""Rows of a batch."""
LENGTHS = (1000, 2000, 4000, 8000)
"""Tokens of a prompt."""
SIDES = ("generate", "plain", "speculative")
LONG_TOKENS = 16
"""New tokens after a long prompt."""


def main() -> None:
    """Two tables, or with --length the figures of one process."""
    parser = arguments(__doc__, "shapes.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument("--prompts", nargs="+", default=[], help="JSONL files of prompts")
    parser.add_argument(
        "--limit", type=int, default=8, help=f"prompts of each file, a multiple of {max(SIZES)}"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer of the batches")
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.length:
        print(json.dumps(memory_of(args.target, args.head, args.side, args.length)))
        return
    if not args.prompts or args.limit % max(SIZES):
        parser.error(
            f"--prompts is needed, and --limit must be a multiple of {max(SIZES)}, not {args.limit}"
        )
    save(args.output, batches(args) + lengths(args))


def batches(args: argparse.Namespace) -> list[str]:
    """A row for each batch size."""
    target, tokenizer = (
        Target.from_pretrained(args.target, torch.bfloat16),
        load_tokenizer(args.target),
    )
    prompts = [
        ids[0] for rows in encoded(tokenizer, args.prompts, args.limit).values() for ids in rows
    ]
    whole = load_head(args.head)[1].tree
    assert whole is not None
    sides: dict[str, Any] = {
        "generate": target,
        "plain": SpeculativeLM(target),
        "whole tree": SpeculativeLM.from_pretrained(target, args.head, tree=whole, adaptive=False),
        "auto": SpeculativeLM.from_pretrained(target, args.head, adaptive=False),
    }
    settings = {"max_new_tokens": args.new_tokens, "do_sample": False}
    nodes = sides["auto"].drafter.max_nodes
    lines = [
        (
            f"Hardware: {hardware()}; bfloat16. {len(prompts)} prompts, {args.new_tokens} new"
            f" tokens, {nodes} nodes."
        ),
        "",
        (
            "| batch | plain tok/s | vs generate | whole tree vs plain | its τ | auto: nodes a row"
            " | vs plain | its τ |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        rates: dict[str, list[float]] = {name: [] for name in sides}
        stats: dict[str, list[Stats]] = {name: [] for name in sides}
        groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        for number, group in enumerate([groups[0], *groups]):  # the first time warms up
            for name in turns([*sides], number):
                rate, found = answered(
                    sides[name], group, settings, int(tokenizer.pad_token_id or 0)
                )
                if number > 0:
                    rates[name].append(rate)
                    stats[name].append(found)
        length = {name: Stats.merged(found).acceptance_length for name, found in stats.items()}
        lines.append(
            f"| {size} | {sum(rates['plain']) / len(groups):.1f} |"
            f" {ratio(rates['plain'], rates['generate'])} |"
            f" {ratio(rates['whole tree'], rates['plain'])} | {length['whole tree']:.2f} |"
            f" {max(1, nodes // size)} | {ratio(rates['auto'], rates['plain'])} |"
            f" {length['auto']:.2f} |"
        )
    return lines


def answered(
    side: Any, rows: list[Tensor], settings: dict[str, Any], padding: int
) -> tuple[float, Stats]:
    """New tokens a second of one batch, not counting what follows a row's end token."""
    input_ids = pad_sequence(rows, batch_first=True, padding_side="left", padding_value=padding)
    mask = pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"
    )
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


def lengths(args: argparse.Namespace) -> list[str]:
    """A row for each prompt length: peak memory in MiB beyond the weights, and seconds."""
    lines = [
        "",
        (
            f"Hardware: {hardware()}; bfloat16, {LONG_TOKENS} new tokens. MiB beyond the weights;"
            " seconds."
        ),
        "",
        "| prompt | target's cache | "
        + " | ".join(f"{side}: peak | prefill and tokens" for side in SIDES)
        + " |",
        "|---|---|" + "---|---|" * len(SIDES),
    ]
    for length in LENGTHS:
        rows = []
        for side in SIDES:
            command = [
                sys.executable,
                __file__,
                "--target",
                args.target,
                "--head",
                args.head,
                "--side",
                side,
            ]
            done = subprocess.run(
                [*command, "--length", str(length)], check=True, stdout=subprocess.PIPE, text=True
            )
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        cells = " | ".join(f"{row['peak']:.0f} | {row['seconds']:.1f}" for row in rows)
        lines.append(f"| {length} | {rows[-1]['cache']:.0f} | {cells} |")
    return lines


def memory_of(source: str, head: str, side: str, length: int) -> dict[str, float]:
    """Peak memory beyond what was there after loading, the size of the target's cache, both in MiB,
    and seconds."""
    target = Target.from_pretrained(source, torch.bfloat16)
    lm = SpeculativeLM.from_pretrained(
        target, head if side == "speculative" else None, adaptive=False
    )
    input_ids = torch.randint(
        1, target.info.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)
    )
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(input_ids),
        "max_new_tokens": LONG_TOKENS,
        "do_sample": False,
    }
    generate = target.model.generate if side == "generate" else lm.generate
    # warm up
    generate(input_ids[:, :8], **{**settings, "attention_mask": settings["attention_mask"][:, :8]})
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_mib("VmRSS")
    start = time.perf_counter()
    generate(input_ids, **settings)
    seconds = time.perf_counter() - start
    cache = target.cache_bytes(1, length + LONG_TOKENS) / 2**20
    return {"peak": memory_mib("VmHWM") - before, "cache": cache, "seconds": seconds}


if __name__ == "__main__":
    main()
