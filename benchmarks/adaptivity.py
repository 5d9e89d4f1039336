"""Each part of adaptive drafting, on and off, on every kind of prompt: speed over plain steps,
greedy.

    python benchmarks/adaptivity.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl \
        runs/data/prompts-held-out/{translation,summaries,context,retrieval,instructions}.jsonl

The last files are held-out prompts of `benchmarks/prompts.py --config configs/data/assistant.yaml`.
`--sides` names the columns to measure, such as `--sides default` for what users get without
options; plain steps are always measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import (
    HEAD,
    TARGET,
    arguments,
    compared,
    encoded,
    ours,
    ratio,
    save,
    without_history,
)

from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.targets.provenance import hardware
from headstart.scripts.measuring.comparison import answer_settings

TREES = "chain:1|dynamic:4:3:2|dynamic:8:4:2|dynamic:16:5:5"
"""Trees to choose from, round by round."""


SIDES = {
    "tree": "one tree",
    "tree-or-plain": "one tree, or plain",
    "trees": "trees by the round",
    "default": "history, trees, or plain (default)",
    "stop": "`stop:0.4:chain:5`",
    "lookup": "lookup, or plain",
    "heads-own": "the head's trees, or plain",
}
"""The columns, by the names of --sides."""


def main() -> None:
    """A table of speeds, and one of tokens a round; a row for each file."""
    parser = arguments(__doc__, "adaptivity.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument(
        "--sides", nargs="+", default=list(SIDES), choices=list(SIDES), help="columns to measure"
    )
    args = parser.parse_args()
    target, tokenizer = Target.from_pretrained(args.target), load_tokenizer(args.target)

    def head(**options: Any) -> SpeculativeLM:
        return SpeculativeLM.from_pretrained(target, args.head, **options)

    lookup: dict[str, Any] = {"drafter": "prompt-lookup:6"}
    made: dict[str, Callable[[], SpeculativeLM]] = {
        "tree": lambda: head(tree="dynamic:4:3:2", adaptive=False),
        "tree-or-plain": lambda: head(tree="dynamic:4:3:2"),
        "trees": lambda: head(tree=TREES, adaptive=False),
        "default": head,
        "stop": lambda: head(tree="stop:0.4:chain:5", adaptive=False),
        "lookup": lambda: SpeculativeLM.from_pretrained(target, **lookup),
        "heads-own": lambda: without_history(head()),
    }
    engines = {"plain": SpeculativeLM.from_pretrained(target)}
    for side in args.sides:
        engines[SIDES[side]] = made[side]()
    lengths = []
    titles = ["prompts", *list(engines)[1:]]
    heading = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    speeds = [
        f"Hardware: {hardware()}. {args.limit} prompts of each file, {args.new_tokens} tokens.",
        "",
        *heading,
    ]
    for file, prompts in encoded(tokenizer, args.prompts, args.limit).items():
        sides = {name: ours(engine) for name, engine in engines.items()}
        rates, stats = compared(sides, prompts, answer_settings(args.new_tokens, 0.0), file)
        cells = [ratio(rates[name], rates["plain"]) for name in titles[1:]]
        speeds.append(f"| {file} | {' | '.join(cells)} |")
        lengths.append(
            f"| {file} |"
            f" {' | '.join(f'{stats[name].acceptance_length:.2f}' for name in titles[1:])} |"
        )
        save(args.output, [*speeds, "", "Tokens a round:", "", *heading, *lengths])


if __name__ == "__main__":
    main()
