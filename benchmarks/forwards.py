"""The price of a forward: linear layers by number of tokens, whole forwards by context and batch,
and prefill.

    python benchmarks/forwards.py

The linear layers of the model, one after another. Its weights are integers with scales and offsets
(GGUF): torch multiplies them as float32 (MKL), as bfloat16 (oneDNN, which rounds them) and, those
of 4 bits, by its kernel for int4 weights and float32 inputs; the LM head, of 8 bits, stays in
float32 there. Every side reads each weight once, so the floor is the bytes over the memory's
bandwidth. Then bare compiled forwards by nodes checked, context and rows, and the prefill of 2,048
tokens beside the stock model's. The sides of a table take turns; medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from common import TARGET, arguments, ratio, save
from torch import Tensor
from torch.nn import functional as F

from headstart.inference import Target
from headstart.inference.drafters.costs import checker, seconds_of
from headstart.inference.engines.cpu_kernels import GROUP, Packed, library, linear, pack
from headstart.inference.targets.provenance import hardware
from headstart.inference.tuning.machine import seconds_in_turns
from headstart.scripts.measuring.bandwidth import memory_bandwidth

NODES = (1, 6, 16, 32)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8000)
ROWS = (1, 2, 4, 8)
BATCH_CONTEXT = 256
PREFILL = 2048
REPEATS = 9
Layer = Callable[[Tensor], Tensor]


@torch.inference_mode()
def main() -> None:
    """Three tables, and prefill."""
    parser = arguments(__doc__, "forwards.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 6, 8, 12, 16, 32, 128])
    args = parser.parse_args()
    if library() is None:
        raise SystemExit("the CPU kernels could not be compiled on this machine")
    lines = linear_layers(args.target, args.tokens)
    target = Target.from_pretrained(args.target, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def texts(rows: int, length: int) -> Tensor:
        return torch.randint(1, target.info.vocab_size, (rows, length), generator=generator)

    lines += ["", f"Hardware: {hardware()}; bfloat16. Milliseconds of a compiled forward.", ""]
    lines.append(f"Prefill of {PREFILL} tokens: " + prefills(target, texts(1, PREFILL)))
    target.compile()
    lines.append("Compiled: " + prefills(target, texts(1, PREFILL)))
    lines += table(target, "context", {length: texts(1, length) for length in CONTEXTS})
    lines += table(
        target,
        f"rows, {BATCH_CONTEXT} tokens each",
        {rows: texts(rows, BATCH_CONTEXT) for rows in ROWS},
    )
    save(args.output, lines)


def linear_layers(source: str, numbers: list[int]) -> list[str]:
    """A row for each number of tokens."""
    model = Target.from_pretrained(source, torch.float32).model
    weights = [
        layer.weight.detach() for layer in model.modules() if isinstance(layer, torch.nn.Linear)
    ]
    packed = [pack(weight) for weight in weights]
    sides: dict[str, list[Layer]] = {
        "float32": [partial(F.linear, weight=weight) for weight in weights],
        "bfloat16": [partial(in_bfloat16, weight.bfloat16()) for weight in weights],
        "torch's int4": [int4(weight, each) for weight, each in zip(weights, packed, strict=True)],
        "ours": [partial(linear, each) for each in packed],
    }
    bandwidth = memory_bandwidth(torch.device("cpu"))
    size = sum(
        part.nbytes for each in packed for part in (each.words, each.scales) if part is not None
    )
    lines = [
        (
            f"Hardware: {hardware()}. {len(weights)} layers; ours hold {size / 1e6:.0f} MB, which"
            f" take {1e3 * size / bandwidth:.1f} ms at {bandwidth / 1e9:.0f} GB/s. Milliseconds."
        ),
        "",
        "| tokens | " + " | ".join(sides) + " |",
        "|---" * (1 + len(sides)) + "|",
    ]
    for tokens in numbers:
        rows = {
            inputs: torch.randn(tokens, inputs)
            for inputs in {weight.shape[1] for weight in weights}
        }
        calls = {
            name: partial(one_after_another, layers, weights, rows)
            for name, layers in sides.items()
        }
        medians = (
            f"{1e3 * statistics.median(seconds):.1f}"
            for seconds in seconds_in_turns(calls, REPEATS).values()
        )
        lines.append(f"| {tokens} | " + " | ".join(medians) + " |")
    return lines


def one_after_another(layers: list[Layer], weights: list[Tensor], rows: dict[int, Tensor]) -> None:
    """Each layer once, as in a forward."""
    for layer, weight in zip(layers, weights, strict=True):
        layer(rows[weight.shape[1]])


def in_bfloat16(weight: Tensor, rows: Tensor) -> Tensor:
    """A linear layer in bfloat16, by oneDNN where the processor multiplies that format."""
    return F.linear(rows.bfloat16(), weight)


def int4(weight_OI: Tensor, packed: Packed) -> Layer:
    """A linear layer by torch's int4 kernel, (number - 8) * scale + zero in groups; float32 for
    wider weights."""
    if packed.format != "affine4":
        return partial(F.linear, weight=weight_OI)
    groups = weight_OI.unflatten(1, (-1, GROUP))
    least, most = groups.aminmax(dim=2, keepdim=True)
    scale = ((most - least) / 15).half().float()
    numbers = ((groups - least) / scale).nan_to_num(0.0).round().clamp(0, 15).int().flatten(1)
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    both = torch.cat([scale, least + 8 * scale], dim=2).transpose(0, 1).contiguous()
    return lambda rows: torch.ops.aten._weight_int4pack_mm_for_cpu(rows, words, GROUP, both)


def table(target: Target, what: str, texts: dict[int, Tensor]) -> list[str]:
    """A row for each text or batch of texts, a column for each number of nodes."""
    checks = {size: checker(target, text_BT, ()) for size, text_BT in texts.items()}
    sides = {
        (size, nodes): partial(check, nodes) for size, check in checks.items() for nodes in NODES
    }
    taken = seconds_of(target, sides, REPEATS)
    lines = [
        "",
        f"| {what} | " + " | ".join(f"{nodes} nodes" for nodes in NODES) + " |",
        "|---" * 5 + "|",
    ]
    for size in texts:
        found = (f"{1000 * statistics.median(taken[size, nodes]):.1f}" for nodes in NODES)
        lines.append(f"| {size} | " + " | ".join(found) + " |")
    return lines


def prefills(target: Target, text_1T: Tensor) -> str:
    """Time of prefill and the last logits, ours and the stock model's."""

    def ours() -> None:
        target.engine.read_chunk(
            text_1T, text_1T.shape[1], target.engine.new_cache(1), (), [text_1T.shape[1] - 1]
        )

    def stock() -> None:
        target.model(text_1T, use_cache=True, logits_to_keep=1)

    taken = seconds_in_turns({"ours": ours, "stock": stock}, REPEATS)
    milliseconds = {
        side: f"{1000 * statistics.median(seconds):.0f} ms" for side, seconds in taken.items()
    }
    return (
        f"ours {milliseconds['ours']}, the stock model {milliseconds['stock']}, ratio "
        f"{ratio(taken['ours'], taken['stock'])}."
    )


if __name__ == "__main__":
    main()
