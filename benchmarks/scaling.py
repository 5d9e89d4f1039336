"""Acceptance by the number of answer tokens that a head was trained on: measured, and a law fitted to it.

    python benchmarks/scaling.py --conversations conversations.jsonl --prompts held-out/*.jsonl eval/*.jsonl

For each size the first conversations that hold as many answer tokens are trained on by one recipe, for the same number
of epochs; acceptance length is measured on every file of prompts, one kind each. The law is

    length(tokens) = limit - scale * (tokens / 1e6) ** -exponent

fitted to all kinds at once by least squares, with one exponent, and a limit and a scale of each kind; its error is that
of the largest size, predicted from the smaller ones. What is finished is not made again: the command resumes where it
was stopped. The tables are `scaling.md` under `--output`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import TARGET, encoded
from torch import Tensor

from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import DynamicShape, Target, load_tokenizer
from headstart.scripts.command_line import options
from headstart.train.config import TrainConfig
from headstart.train.console import console, show_on_console
from headstart.train.data.conversations import open_source
from headstart.train.evaluate import greedy_answers, summary
from headstart.train.loop import train
from headstart.train.run_folder import hardware

TREE = DynamicShape(32, 7, 8)
EXPONENTS = np.linspace(0.02, 1.5, 75)


def main() -> None:
    """Train what is missing, measure, fit, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-eagle3.yaml")
    parser.add_argument("--conversations", required=True, help="JSONL file to train on")
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files of prompts, one kind each")
    parser.add_argument("--tokens", nargs="+", type=int, default=[50_000, 150_000, 500_000, 1_500_000, 3_000_000])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, default=20, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--output", default="runs/scaling")
    args = parser.parse_args()
    target, output = Target.from_pretrained(TARGET, torch.bfloat16), Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    kinds = encoded(load_tokenizer(TARGET), args.prompts, args.limit)
    lengths: dict[int, dict[str, float]] = {}
    hours: dict[int, float] = {}
    for tokens in sorted(args.tokens):
        found = measured(tokens, args, target, kinds)
        lengths[tokens], hours[tokens] = found["lengths"], found["hours"]
        (output / "scaling.md").write_text(tables(lengths, hours), encoding="utf-8")
    console.print((output / "scaling.md").read_text(encoding="utf-8"), markup=False)


def measured(tokens: int, args: argparse.Namespace, target: Target, kinds: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Train on the first conversations with this many answer tokens, and measure every kind."""
    folder = Path(args.output) / f"{tokens}"
    result = folder.with_suffix(".json")
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8"))
    given = ["--config", args.config, "--data.sources", f"[{args.conversations}]", "--output", str(folder)]
    given += [f"--data.max_conversations={conversations_with(args.conversations, tokens)}"]
    given += [f"--loop.epochs={args.epochs}", "--loop.eval_every=0"]
    head, metadata = load_head(train(options(TrainConfig, "train", "", given)) / "last")
    head = head.to(target.device, target.dtype).eval()
    lengths = {}
    for kind, rows in kinds.items():
        prompts = [ids_1T[0] for ids_1T in rows]
        lengths[kind] = summary(greedy_answers(target, head, TREE, prompts, args.new_tokens).stats)["acceptance_length"]
    found = {"lengths": lengths, "hours": metadata.training["seconds"] / 3600}
    result.write_text(json.dumps(found), encoding="utf-8")
    return found


def conversations_with(path: str, tokens: int) -> int:
    """Number of the first conversations that hold this many answer tokens together."""
    total = 0
    for number, (_, row) in enumerate(open_source(path).read(), start=1):
        total += row["tokens"]
        if total >= tokens:
            return number
    raise ValueError(f"{path} holds {total} answer tokens, not {tokens}")


def fit(lengths: dict[int, dict[str, float]]) -> tuple[float, dict[str, tuple[float, float]]]:
    """The exponent, and limit and scale of every kind, by least squares; the exponent is searched on a grid."""
    millions = np.array(sorted(lengths)) / 1e6
    kinds = list(next(iter(lengths.values())))
    measured_KS = np.array([[lengths[tokens][kind] for tokens in sorted(lengths)] for kind in kinds])

    def solved(exponent: float) -> tuple[np.ndarray, float]:
        terms_S2 = np.stack([np.ones_like(millions), -(millions**-exponent)], axis=1)
        solution_2K = np.linalg.lstsq(terms_S2, measured_KS.T, rcond=None)[0]
        return solution_2K, float(((terms_S2 @ solution_2K - measured_KS.T) ** 2).sum())

    exponent = min(EXPONENTS, key=lambda each: solved(each)[1])
    limit_K, scale_K = solved(exponent)[0]
    return float(exponent), {kind: (float(a), float(b)) for kind, a, b in zip(kinds, limit_K, scale_K, strict=True)}


def predicted(law: tuple[float, dict[str, tuple[float, float]]], kind: str, tokens: float) -> float:
    """Acceptance length by the law."""
    exponent, coefficients = law
    limit, scale = coefficients[kind]
    return limit - scale * (tokens / 1e6) ** -exponent


def tables(lengths: dict[int, dict[str, float]], hours: dict[int, float]) -> str:
    """Measured lengths, and from four sizes on the law with its error and what more data would give."""
    sizes, kinds = sorted(lengths), list(next(iter(lengths.values())))
    lines = [f"Hardware: {hardware()}. Greedy, dynamic tree of {TREE.size} nodes.", ""]
    lines += [f"| prompts | {' | '.join(f'{size:,}' for size in sizes)} |", "|---" * (1 + len(sizes)) + "|"]
    lines += [f"| {kind} | " + " | ".join(f"{lengths[size][kind]:.2f}" for size in sizes) + " |" for kind in kinds]
    lines += ["| hours of training | " + " | ".join(f"{hours[size]:.1f}" for size in sizes) + " |"]
    if len(sizes) >= 4:
        law, before = fit(lengths), fit({size: lengths[size] for size in sizes[:-1]})
        errors = [predicted(before, kind, sizes[-1]) - lengths[sizes[-1]][kind] for kind in kinds]
        error = math.sqrt(sum(each**2 for each in errors) / len(errors))
        lines += [
            "",
            f"Exponent {law[0]:.2f}. The largest size is predicted from the smaller ones to {error:.2f} tokens.",
            "",
        ]
        lines += ["| prompts | limit | scale | at 10M tokens | at 100M |", "|---|---|---|---|---|"]
        for kind in kinds:
            limit, scale = law[1][kind]
            more = (predicted(law, kind, tokens) for tokens in (1e7, 1e8))
            lines.append(f"| {kind} | {limit:.2f} | {scale:.2f} | " + " | ".join(f"{each:.2f}" for each in more) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    show_on_console()
    main()
