"""Sampling at temperature 1: tokens a round and speed, by where drafts come from and by which rule they are judged.

    python benchmarks/sampling.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl

*Alike*: the head picks the tokens that the numbers of each place would make it draw, which the rule then draws by the
same numbers (arXiv:2408.07978); what sampling does by default. *Blind*: it picks its likeliest tokens. *Drawn*: it
draws tokens of its own, judged by rejection sampling. All sides answer every prompt in turns, with all tokens allowed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from common import HEAD, TARGET, Side, arguments, compared, encoded, ratio, save
from torch import Tensor

from headstart.inference import SpeculativeLM, Stats, load_tokenizer
from headstart.scripts.measuring.comparison import answer_settings
from headstart.train.run_folder import hardware

TREES = ("chain:1", "chain:3", "branch:4", "branch:3x1x1", "dynamic:8:4:2", "dynamic:16:5:5")


def seeded(lm: SpeculativeLM, blind: bool = False) -> Side:
    """A side that answers with the same random numbers as all others."""
    begin: Any = lm.drafter.begin
    if blind:
        lm.drafter.begin = lambda start: begin(replace(start, gumbel=None))  # type: ignore[method-assign]

    def answer(ids: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Stats]:
        generator = torch.Generator().manual_seed(ids.shape[1])
        output = lm.generate(ids, torch.ones_like(ids), generator=generator, **settings)
        return output.sequences, output.stats

    return answer


def main() -> None:
    """Print and write a table with a row for each kind of drafts, a pair of columns for each file."""
    parser = arguments(__doc__, "sampling.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    default = SpeculativeLM.from_pretrained(args.target, args.head).warmup()
    sides = {"without drafts": seeded(SpeculativeLM.from_pretrained(default.target)), "default": seeded(default)}
    for tree in TREES:
        ways = ("alike", "blind") if "dynamic" in tree else ("alike", "blind", "drawn")
        for way in ways:
            word = f"drawn:{tree}" if way == "drawn" else tree
            lm = SpeculativeLM.from_pretrained(default.target, args.head, tree=word, fallback=False)
            sides[f"`{tree}`, {way}"] = seeded(lm, way == "blind")
    tokenizer = load_tokenizer(args.target)
    settings = answer_settings(args.new_tokens, 1.0) | {"top_k": 0, "top_p": 1.0}
    lengths: dict[str, list[float]] = {name: [] for name in sides}
    ratios: dict[str, list[str]] = {name: [] for name in sides}
    files = encoded(tokenizer, args.prompts, args.limit)
    for file, prompts in files.items():
        rates, stats = compared(sides, prompts, settings, file)
        for name in sides:
            lengths[name].append(stats[name].acceptance_length)
            ratios[name].append(ratio(rates[name], rates["without drafts"]))
    lines = [
        f"Hardware: {hardware()}. {args.limit} prompts of each file, {args.new_tokens} new tokens.",
        "",
        f"| drafts | tokens a round: {' | '.join(files)} | over plain steps: {' | '.join(files)} |",
        "|---" * (1 + 2 * len(files)) + "|",
        *(
            f"| {name} | " + " | ".join([*(f"{length:.2f}" for length in lengths[name]), *ratios[name]]) + " |"
            for name in sides
        ),
    ]
    save(args.output, lines)


if __name__ == "__main__":
    main()
