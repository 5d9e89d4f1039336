"""Drafts without a trained head, and beside one, on prompts and on a text to be edited.

    python benchmarks/sources.py --head examples/smollm2-135m-eagle3 \\
        --conversations conversations.jsonl --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl

Every source answers every prompt in turn, greedy, our engine compiled; ratios are medians and
quartiles over prompts, to our plain steps and, where it runs, to transformers' own prompt lookup.
The copying task asks for a text of the conversations with one word changed. Retrieval looks in the
other conversations.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from common import LOOKUP, TARGET, Side, arguments, compared, encoded, ours, ratio, save, stock
from torch import Tensor

from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.targets.provenance import hardware
from headstart.inference.text.chat_template import prompt_ids
from headstart.scripts.datastore import DatastoreConfig, build_datastore
from headstart.scripts.measuring.comparison import answer_settings
from headstart.train.data.conversations import read_conversations

COPIED_WORDS = (40, 90)
"""Length of the texts that are to be copied."""


def main() -> None:
    """One table for each file."""
    parser = arguments(__doc__, "sources.md")
    parser.add_argument("--head", required=True)
    parser.add_argument("--conversations", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument(
        "--only",
        nargs="+",
        help="sources by name (generate stands for both of transformers'); plain always runs",
    )
    args = parser.parse_args()
    tokenizer = load_tokenizer(TARGET)
    prompts = encoded(tokenizer, args.prompts, args.limit)
    texts = read_conversations(args.conversations)
    copied, others = texts[: 50 * args.limit], texts[50 * args.limit :]
    if not others:
        parser.error(
            f"--conversations holds {len(texts)}; copying looks at {50 * args.limit}, retrieval at"
            " the others"
        )
    prompts["copying"] = [prompt_ids(tokenizer, row) for row in copying(copied, args.limit)]
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "others.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in others), encoding="utf-8"
        )
        build_datastore(DatastoreConfig(TARGET, [f"{scratch}/others.jsonl"], f"{scratch}/store"))
        sides = engines(args.head, f"{scratch}/store")
        unknown = sorted(set(args.only or ()) - set(sides))
        if unknown:
            parser.error(f"unknown source {unknown[0]!r}; choose from {', '.join(sides)}")
        if args.only:
            sides = {name: side for name, side in sides.items() if name in ("plain", *args.only)}
        lines = [
            f"Hardware: {hardware()}. {args.limit} prompts of each file, {args.new_tokens} tokens."
        ]
        for name, rows in prompts.items():
            lines += table(name, sides, rows, args.new_tokens)
            save(args.output, lines)


def copying(conversations: list[dict[str, Any]], limit: int) -> list[list[dict[str, str]]]:
    """Texts of conversations, each to be written again with its commonest long word changed."""
    asked = []
    for row in conversations:
        text = row["messages"][-1]["content"]
        words = re.findall(r"[a-z]{5,}", text)
        if COPIED_WORDS[0] <= len(text.split()) <= COPIED_WORDS[1] and words and text.isascii():
            word = Counter(words).most_common(1)[0][0]
            question = (
                f'Write this text again, with "{word}" replaced by "{word.upper()}":\n\n{text}'
            )
            asked.append([{"role": "user", "content": question}])
    return asked[:limit]


def engines(head: str, store: str) -> dict[str, SpeculativeLM | Target]:
    """Decoders by name; all share one target."""
    target = Target.from_pretrained(TARGET, torch.bfloat16)

    def lm(**options: object) -> SpeculativeLM:
        return SpeculativeLM.from_pretrained(target, **({"adaptive": False} | options))  # type: ignore[arg-type]

    return {
        "generate": target,
        "plain": lm(),
        "prompt lookup": lm(drafter="prompt-lookup:6"),
        "retrieval": lm(drafter=f"retrieval:{store}:6"),
        "head": lm(head=head),
        "head, adaptive": lm(head=head, adaptive=True),
        "head and history": lm(head=head, drafter="history"),
    }


def table(
    name: str, engines: dict[str, SpeculativeLM | Target], rows: list[Tensor], new_tokens: int
) -> list[str]:
    """A row for each source."""
    sides: dict[str, Side] = {}
    for side, engine in engines.items():
        if isinstance(engine, Target):
            sides |= {side: stock(engine), "transformers' prompt lookup": stock(engine, **LOOKUP)}
        else:
            sides[side] = ours(engine)
    rates, stats = compared(sides, rows, answer_settings(new_tokens, 0.0), name)
    others = [other for other in ("plain", "transformers' prompt lookup") if other in sides]
    titles = ["source", *(f"vs {other}" for other in others), "acceptance length"]
    lines = ["", f"### {name}", "", "| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for side in sides:
        length = stats[side].acceptance_length
        told = "-" if length != length else f"{length:.2f}"
        lm = engines.get(side)
        parts = lm.drafter.nested() if isinstance(lm, SpeculativeLM) else ()
        if any(isinstance(part, AdaptiveDrafter) for part in parts):
            told += f" ({stats[side].plain_rounds / stats[side].rounds:.0%} plain)"
        cells = [ratio(rates[side], rates[other]) for other in others]
        lines.append(f"| {side} | " + " | ".join(cells) + f" | {told} |")
    return lines


if __name__ == "__main__":
    main()
