"""How fast conversations are made: `headstart data`'s way of answering prompts against stock
batches of `generate`.

    python benchmarks/answers.py --prompts prompts.jsonl --limit 192 \\
        --head examples/smollm2-135m-eagle3

The same prompts, greedy, so that all sides write texts of the same lengths: stock `generate` in
batches of `--batch`, in the order of the file; our engine with as many places, of which a prompt
that waits takes each that becomes free; the same with all prompts of a batch padded to the longest;
and with a head. Interleaved by blocks of prompts; the ratios' median and quartiles over blocks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import TARGET, arguments, ratio, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.console import console
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.targets.provenance import hardware
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.inference.tuning.machine import turns
from headstart.scripts.measuring.comparison import quartiles
from headstart.train.data.self_made import WAVES

PADDED = "headstart, prompts padded to the longest"


def main() -> None:
    """Measure and write the table."""
    parser = arguments(__doc__, "answers.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", help="also with this head")
    parser.add_argument("--prompts", required=True, help="JSONL file of prompts")
    parser.add_argument("--limit", type=int, default=256, help="prompts")
    parser.add_argument("--batch", type=int, default=16, help="answered at the same time")
    parser.add_argument("--new-tokens", type=int, default=256, help="of the longest answer")
    args = parser.parse_args()
    target, tokenizer = (
        Target.from_pretrained(args.target, torch.bfloat16),
        load_tokenizer(args.target),
    )
    prompts = [prompt_ids(tokenizer, row)[0] for row in read_prompts(args.prompts, args.limit)]
    settings = {
        "max_new_tokens": args.new_tokens,
        "do_sample": False,
        "pad_token_id": tokenizer.pad_token_id,
    }
    plain = SpeculativeLM.from_pretrained(target).warmup()
    sides: dict[str, Any] = {"generate": target, PADDED: plain, "headstart": plain}
    if args.head:
        sides["headstart with a head"] = SpeculativeLM.from_pretrained(target, args.head).warmup()
    block = WAVES * args.batch
    least = target.engine.least_padding
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number, start in enumerate(range(0, len(prompts) - block + 1, block)):
        for name in turns([*sides], number):
            target.engine.least_padding = int(1e9) if name == PADDED else least
            began = time.perf_counter()
            tokens = answer(
                sides[name], prompts[start : start + block], args.batch, target, settings
            )
            rates[name].append(tokens / (time.perf_counter() - began))
            console.print(
                f"prompts from {start}: {name} {rates[name][-1]:.0f} tokens/s, {tokens} tokens"
            )
    lines = [
        (
            f"Hardware: {hardware()}. {len(prompts)} prompts in blocks of {block}, {args.batch} at"
            f" a time, at most {args.new_tokens} new tokens."
        ),
        "",
        "| | answer tokens/s | against stock batches |",
        "|---|---|---|",
    ]
    for name in sides:
        rate = quartiles(rates[name])["median"]
        lines.append(f"| {name} | {rate:.0f} | {ratio(rates[name], rates['generate'])} |")
    save(args.output, lines)


def answer(
    side: Any, prompts: list[Tensor], batch: int, target: Target, settings: dict[str, Any]
) -> int:
    """Answer a block; return how many tokens were written, each answer's end token counted."""
    size = batch if isinstance(side, Target) else len(prompts)
    tokens = 0
    for start in range(0, len(prompts), size):
        rows = prompts[start : start + size]
        ids = pad_sequence(
            rows, batch_first=True, padding_side="left", padding_value=settings["pad_token_id"]
        )
        mask = pad_sequence(
            [torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"
        )
        if isinstance(side, Target):
            sequences = side.model.generate(ids, attention_mask=mask, **settings)
        else:
            sequences = side.generate(
                ids, attention_mask=mask, max_batch_size=batch, **settings
            ).sequences
        for row in sequences[:, ids.shape[1] :].tolist():
            ends = [place for place, token in enumerate(row) if token in target.end_tokens]
            tokens += ends[0] + 1 if ends else len(row)
    return tokens


if __name__ == "__main__":
    main()
