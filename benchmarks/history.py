"""A history beside a head: speed over plain steps where answers repeat what came before, greedy,
and rounds where the same prompts are answered again and again, as in reinforcement learning.

    python benchmarks/history.py --conversations conversations.jsonl --prompts gsm8k.jsonl \
        mt_bench.jsonl runs/data/prompts-held-out/{translation,summaries,context}.jsonl

The prompt files are those of benchmarks/adaptivity.py; from the conversations come code edits,
second turns that ask for the first answer again, and an agent's calls, whose context grows.
`--epochs 8` answers `--limit` prompts of the first file so often at temperature 1, with and without
what was answered before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
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
from torch import Tensor

from headstart.console import console
from headstart.inference import History, SpeculativeLM, Target, load_tokenizer
from headstart.inference.targets.provenance import hardware
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.tuning.machine import turns
from headstart.scripts.measuring.comparison import answer_settings
from headstart.train.data.conversations import read_conversations

CALLS = 10
"""Calls of the agent's loop."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def first_turns(path: str, with_code: bool) -> Iterator[tuple[str, str]]:
    """Questions with their answers, those with code or those without."""
    for row in read_conversations(path):
        texts = [message["content"] for message in row["messages"] if message["role"] != "system"]
        if len(texts) > 1 and ("```python" in texts[1]) == with_code and len(texts[1]) > 200:
            yield texts[0], texts[1]


def kinds(path: str, limit: int) -> dict[str, list[list[dict[str, str]]]]:
    """Prompts whose answers repeat what came before, by kind."""
    edits = []
    turns = []
    calls = []
    code = first_turns(path, with_code=True)
    prose = first_turns(path, with_code=False)
    for _ in range(limit):
        _, answer = next(code)
        edits.append([user(f"{answer}\n\nRewrite this code with a comment at every line.")])
        question, answer = next(prose)
        asked = [user(question), {"role": "assistant", "content": answer}]
        turns.append([*asked, user("Write your answer again, with all its sentences.")])
    # One loop: each call sees all earlier ones.
    context: list[dict[str, str]] = []
    for _ in range(CALLS):
        question, answer = next(code)
        context += [user(f"Explain step by step what this does, and quote it:\n\n{answer}")]
        calls.append(list(context))
        context.append({"role": "assistant", "content": answer})
    return {"code edits": edits, "second turns": turns, "agent's calls": calls}


def epochs(
    lms: dict[str, SpeculativeLM], prompts: list[Tensor], count: int, new_tokens: int
) -> list[str]:
    """Rounds and seconds of each side in each epoch over the same prompts.

    All sides answer a prompt before the next one, in an order that rotates.
    """
    lines = ["| epoch | " + " | ".join(f"{name}: rounds, seconds" for name in lms) + " |"]
    lines.append("|---" * (len(lms) + 1) + "|")
    total = dict.fromkeys(lms, (0, 0.0))
    for epoch in range(count):
        rounds = dict.fromkeys(lms, 0)
        seconds = dict.fromkeys(lms, 0.0)
        for number, ids in enumerate(prompts):
            for name in turns(list(lms), number):
                seed = torch.Generator().manual_seed(epoch * len(prompts) + number)
                settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": True}
                settings |= {"temperature": 1.0, "top_k": 0, "generator": seed}
                began = time.perf_counter()
                output = lms[name].generate(ids, attention_mask=torch.ones_like(ids), **settings)
                seconds[name] += time.perf_counter() - began
                rounds[name] += output.stats.rounds
        cells = [f"{rounds[name]:,}, {seconds[name]:.0f}" for name in lms]
        lines.append(f"| {epoch + 1} | {' | '.join(cells)} |")
        console.print(lines[-1], markup=False)
        for name in lms:
            total[name] = (total[name][0] + rounds[name], total[name][1] + seconds[name])
    cells = [f"{rounds:,}, {seconds:.0f}" for rounds, seconds in total.values()]
    lines.append(f"| all | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Write the tables."""
    parser = arguments(__doc__, "history.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--conversations")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=0)
    args = parser.parse_args()
    target, tokenizer = Target.from_pretrained(args.target), load_tokenizer(args.target)
    head = SpeculativeLM.from_pretrained(target, args.head)
    heading = f"Hardware: {hardware()}. {args.limit} prompts, {args.new_tokens} new tokens."
    if args.epochs:
        apart = History(earlier=False)
        lms = {
            "head": without_history(head),
            "head and own text": SpeculativeLM.from_pretrained(target, args.head, drafter=apart),
            "head and history": head,
        }
        [rows] = encoded(tokenizer, args.prompts[:1], args.limit).values()
        save(args.output, [heading, "", *epochs(lms, rows, args.epochs, args.new_tokens)])
        return
    engines = {
        "plain": SpeculativeLM.from_pretrained(target),
        "head alone": without_history(head),
        "history alone": SpeculativeLM.from_pretrained(target, drafter="history"),
        "head and history (default)": head,
    }
    files = encoded(tokenizer, args.prompts, args.limit)
    if args.conversations:
        for kind, chats in kinds(args.conversations, args.limit).items():
            files[kind] = [prompt_ids(tokenizer, messages) for messages in chats]
    titles = [*engines][1:]
    lines = [heading, "", f"| prompts | {' | '.join(titles)} | tokens a round |"]
    lines.append("|---" * (len(titles) + 2) + "|")
    for file, prompts in files.items():
        sides = {name: ours(engine) for name, engine in engines.items()}
        rates, stats = compared(sides, prompts, answer_settings(args.new_tokens, 0.0), file)
        cells = [ratio(rates[name], rates["plain"]) for name in titles]
        lengths = ", ".join(f"{stats[name].acceptance_length:.2f}" for name in titles)
        lines.append(f"| {file} | {' | '.join(cells)} | {lengths} |")
        save(args.output, lines)


if __name__ == "__main__":
    main()
