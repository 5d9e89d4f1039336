"""Default settings against stock `generate`, llama.cpp and transformers' own speculation, prompt by
prompt, greedy.

    python benchmarks/cpu.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl \\
        --llama LLAMA/bin/python

The sides answer every prompt in turn, each time beginning with another one: stock `generate` in its
fastest dtype here, plain steps, the head, and those that options add: llama.cpp (--llama, the
Python of an environment with llama-cpp-python) with the same GGUF file on as many threads;
transformers' prompt lookup (--lookup) and assisted generation (--assistant, a draft model's
folder); the head with another drafter beside it (--beside prompt-lookup:6). --eager leaves out the
compiled kernels, as on a machine without a compiler. --kinds also selects prompts of five kinds
from a file of rows {"source": ..., "messages": [...]}. Ratios are medians and quartiles over
prompts. To measure as on a processor without AVX-512:

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \\
        python benchmarks/cpu.py ...
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from common import (
    HEAD,
    LOOKUP,
    TARGET,
    Side,
    arguments,
    compared,
    encoded,
    ours,
    ratio,
    save,
    stock,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

from headstart.heads.base import dtype_name
from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer
from headstart.inference.targets.loading import locate
from headstart.inference.targets.provenance import hardware
from headstart.inference.text.chat_template import prompt_ids
from headstart.scripts.measuring.comparison import answer_settings, first_difference, quartiles

LLAMA = """
import json, sys
from llama_cpp import Llama
threads = int(sys.argv[2])
llama = Llama(sys.argv[1], n_threads=threads, n_threads_batch=threads, n_ctx=4096, verbose=False)
print("ready", flush=True)
for line in sys.stdin:
    tokens, count, end = json.loads(line)
    llama.reset()
    found = []
    for token in llama.generate(tokens, temp=0.0, reset=True):
        found.append(token)
        if token == end or len(found) == count:
            break
    print(json.dumps(found), flush=True)
"""
SOURCES = ("self-instruct-t0", "llamafactory-alpaca-en-demo")
"""Sources of the prompts of five kinds."""
LONG = 300
"""Characters from which a prompt may hold a context."""


def main() -> None:
    """One table, a row for each file."""
    parser = arguments(__doc__, "cpu.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--kinds", type=Path, help="file to select prompts of five kinds from")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each file or kind")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--llama", help="a Python that has llama-cpp-python")
    parser.add_argument("--lookup", action="store_true", help="also transformers' prompt lookup")
    parser.add_argument("--assistant", help="draft model for transformers' assisted generation")
    parser.add_argument(
        "--beside", help="history that takes turns with the head, as prompt-lookup:6"
    )
    parser.add_argument("--eager", action="store_true", help="without compiled kernels")
    args = parser.parse_args()
    tokenizer, settings = load_tokenizer(args.target), answer_settings(args.new_tokens, 0.0)
    prompts = encoded(tokenizer, args.prompts, args.limit)
    if args.kinds:
        for name, chats in sorted(by_kind(args.kinds, args.limit).items()):
            prompts[name] = [prompt_ids(tokenizer, messages) for messages in chats]
    if not prompts:
        parser.error("--prompts or --kinds is needed")
    compile = not args.eager
    began = time.perf_counter()
    lm = SpeculativeLM.from_pretrained(args.target, args.head, compile=compile)
    loaded = time.perf_counter() - began
    lm.warmup()
    ready = time.perf_counter() - began
    dtype, fastest, target = fastest_generate(
        args.target, lm.target, next(iter(prompts.values()))[0], settings
    )
    sides: dict[str, Side] = {"generate": fastest}
    if args.lookup:
        sides["its prompt lookup"] = stock(target, **LOOKUP)
    if args.assistant:
        draft: Any = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=target.dtype).eval()
        sides["its assisted generation"] = stock(target, assistant_model=draft)
    if args.llama:
        sides["llama.cpp"] = llama(args.llama, args.target, lm.target)
    theirs = [*sides]
    sides |= {
        "plain": ours(SpeculativeLM.from_pretrained(lm.target, compile=compile)),
        "head": ours(lm),
    }
    if args.beside:
        both = SpeculativeLM.from_pretrained(
            lm.target, args.head, drafter=args.beside, compile=compile
        )
        sides["head and source"] = ours(both)
    pairs = [(side, other) for side in [*sides][len(theirs) :] for other in theirs] + [
        ("head", "plain")
    ]
    lines = [
        (
            f"Hardware: {hardware()}. {args.limit} prompts of each file, {args.new_tokens} new"
            f" tokens, {'eager' if args.eager else 'default settings'}; stock `generate` in"
            f" {dtype}. Loaded in {loaded:.1f} s, warm after {ready:.1f} s."
        ),
        "",
        "| prompts | "
        + " | ".join(f"{name}, tok/s" for name in sides)
        + " | "
        + " | ".join(f"{one} / {other}" for one, other in pairs)
        + " | tokens a round | plain rounds | texts of float32 `generate` |",
        "|---" * (4 + len(sides) + len(pairs)) + "|",
    ]
    for name, rows in prompts.items():
        lines.append(row_of(name, rows, sides, pairs, lm.target, settings))
        save(args.output, lines)


def by_kind(path: Path, limit: int) -> dict[str, list[list[dict[str, str]]]]:
    """The first prompts of each kind."""
    kinds: dict[str, list[list[dict[str, str]]]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            if (name := kind(row)) and len(kinds[name]) < limit:
                kinds[name].append(row["messages"][:1])
    return kinds


def kind(row: dict[str, Any]) -> str:
    """The first kind whose words a prompt holds; empty for none of the five."""
    text = row["messages"][0]["content"]
    if row["source"] not in SOURCES:
        return ""
    if re.search(r"\btranslate\b|\btranslation", text, re.IGNORECASE):
        return "translation"
    if re.search(r"summar", text, re.IGNORECASE):
        return "summaries"
    if len(text) >= LONG and re.search(
        r"\b(passage|context|article|paragraph|document)\b", text, re.IGNORECASE
    ):
        return "context"
    if len(text) < LONG and text.rstrip().endswith("?"):
        return "questions"
    return "instructions" if row["source"] == SOURCES[1] else ""


def row_of(
    name: str,
    prompts: list[Tensor],
    sides: dict[str, Side],
    pairs: list[tuple[str, str]],
    target: Target,
    settings: dict[str, Any],
) -> str:
    """Rates, ratios and acceptance of one file of prompts, as a row of the table."""
    written: list[Tensor] = []
    same: list[bool] = []

    def head(ids: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Stats]:
        sequences, stats = sides["head"](ids, settings)
        written.append(sequences)
        return sequences, stats

    def check(ids: Tensor) -> None:
        expected = target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        same.append(first_difference(target, expected, written[-1], ids.shape[1]) is None)

    rates, found = compared(sides | {"head": head}, prompts, settings, name, check)
    stats = found["head"]
    columns = [f"{quartiles(rates[side])['median']:.1f}" for side in sides]
    columns += [ratio(rates[one], rates[other]) for one, other in pairs]
    columns += [
        f"{stats.acceptance_length:.2f}",
        f"{stats.plain_rounds / max(stats.rounds, 1):.0%}",
    ]
    columns += [f"{sum(same[1:])} of {len(prompts)}"]  # the first time warms up
    return f"| {name} | " + " | ".join(columns) + " |"


def fastest_generate(
    source: str, target: Target, ids: Tensor, settings: dict[str, Any]
) -> tuple[str, Side, Target]:
    """Stock `generate` in float32 or bfloat16: the dtype's name, the side and its target."""
    found: dict[float, tuple[str, Side, Target]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        other = target if dtype == target.dtype else Target.from_pretrained(source, dtype)
        answer = stock(other)
        answer(ids, settings)
        start = time.perf_counter()
        answer(ids, settings)
        found[time.perf_counter() - start] = (dtype_name(dtype), answer, other)
    return found[min(found)]


def llama(python: str, source: str, target: Target) -> Side:
    """llama.cpp, in a process that waits between prompts."""
    folder, file = locate(source)
    command = [python, "-c", LLAMA, str(Path(folder) / str(file)), str(torch.get_num_threads())]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    to, found = process.stdin, process.stdout
    assert found.readline().strip() == "ready"
    end = min(target.end_tokens, default=-1)

    def answer(ids: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Stats]:
        print(json.dumps([ids[0].tolist(), settings["max_new_tokens"], end]), file=to, flush=True)
        return torch.cat([ids, torch.tensor([json.loads(found.readline())])], dim=1), Stats()

    return answer


if __name__ == "__main__":
    main()
