"""Plan how much data a head needs: `headstart plan-data --length 2.2 --kind summaries --recorded FOLDER`.

What twice the data adds to the acceptance length was measured for one small model, SmolLM2-135M with EAGLE-3 heads,
from 50,000 to 200,000 answer tokens (benchmarks/scaling.md), by kind of prompt. The command answers from the line
through these points, with its prediction interval: what a number of answer tokens gives, how many an acceptance length
takes, and, from what was recorded of your own prompts, how many more. Other models, heads and recipes have other lines:
take it as a first guess, and measure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headstart.console import console, log
from headstart.files import recorded_files
from headstart.options import CommandOptions
from headstart.scripts.command_line import options, run
from headstart.scripts.measuring.data_law import (
    CHAIN,
    LONGEST,
    MEAN,
    NODES,
    SHIPPED,
    SHIPPED_TOKENS,
    SIZES,
    TOKENS,
    TreeName,
    check_kind,
    interval,
    law_of,
    tokens_interval,
)

SHOWN = (50_000, 100_000, 200_000, 400_000, 1_000_000, 3_000_000, 10_000_000)
"""Answer tokens that are shown if nothing is asked."""
TREE_NAMES = {"chain": "chain of 3", "tree": "dynamic tree of 32"}
MOST_TIMES = 1000.0
"""Times the data beyond which a number would only pretend to be one."""


@dataclass(frozen=True)
class PlanConfig(CommandOptions):
    """Questions to the law."""

    minimum: ClassVar[dict[str, float]] = {"tokens": TOKENS[0], "learned": 1}

    tokens: int | None = None
    """Answer tokens to train on: what acceptance length do they give?"""
    length: float | None = None
    """Acceptance length, tokens per round: how many answer tokens does it take?"""
    kind: str = MEAN
    """Kind of the prompts: gsm8k, humaneval, mt_bench, translation, summaries, questions, context,
    instructions, or mean."""
    tree: TreeName = "tree"
    """What is drafted: chain (of 3 tokens) or tree (dynamic, of 32 nodes)."""
    recorded: str | None = None
    """Folder of recorded answers: what do they say of your own prompts? null for none."""
    learned: int | None = None
    """Answer tokens of each recorded kind that the head has learned from; null for as many as give the
    recorded acceptance length by the law."""
    rate: float | None = None
    """Answer tokens that you make or record in a second, for the time that the data take; null for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind(self.kind)
        if self.tokens is not None and self.tokens > TOKENS[1]:
            raise ValueError(
                f"tokens is {self.tokens:,}, of which the law says nothing: it was measured from {SIZES[0]:,} to "
                f"{SIZES[-1]:,} answer tokens, and is asked about {TOKENS[0]:,} to {TOKENS[1]:,}"
            )
        longest = LONGEST[self.tree]
        if self.length is not None and not 1 < self.length <= longest:
            raise ValueError(
                f"length must be above 1, which is plain decoding, and at most the {longest} tokens that a round with "
                f"this tree ({self.tree}) emits, not {self.length}"
            )
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate must be above 0 tokens a second, not {self.rate}")


def main(arguments: list[str]) -> None:
    """Run `headstart plan-data` with these command-line arguments."""
    plan(options(PlanConfig, "plan-data", __doc__, arguments))


def plan(config: PlanConfig) -> None:
    """Print what the law, and the recorded answers, say of a number of answer tokens or an acceptance length."""
    rows = None if config.recorded is None else recorded_answers(config.recorded)
    if config.tokens is not None:
        print_lengths(config, [config.tokens])
    if config.length is not None:
        print_tokens(config, config.length)
    if config.tokens is None and config.length is None and rows is None:
        print_lengths(config, SHOWN)
    if rows is not None:
        print_recorded(config, rows)
    law = law_of(config.tree, config.kind)
    log.info(
        f"The law: {config.kind}, {TREE_NAMES[config.tree]}, {law.start:.2f} at 100,000 answer tokens and "
        f"{law.gain:+.2f} for twice as many. Measured from {SIZES[0]:,} to {SIZES[-1]:,} for one small model "
        "(SmolLM2-135M, EAGLE-3, benchmarks/scaling.md); its 95 % prediction interval holds there, beyond is a guess. "
        f"The shipped head, trained otherwise on {SHIPPED_TOKENS:,}, reaches {SHIPPED[config.tree][config.kind]:.2f}; "
        f"the law says {law.length(SHIPPED_TOKENS):.2f}. Your model has a line of its own."
    )


def print_lengths(config: PlanConfig, tokens: Iterable[int]) -> None:
    """Print the acceptance lengths that numbers of answer tokens give."""
    from rich.table import Table

    table = Table("answer tokens", "acceptance length", "95 %", "measured range", *_time_column(config))
    for number in tokens:
        length = max(law_of(config.tree, config.kind).length(number), 1.0)
        low, high = interval(config.tree, config.kind, number)
        shown = min(length, LONGEST[config.tree])
        table.add_row(f"{number:,}", f"{shown:.2f}", f"{low:.2f} to {high:.2f}", _range(number), *_time(config, number))
    console.print(table)


def print_tokens(config: PlanConfig, length: float) -> None:
    """Print how many answer tokens an acceptance length takes."""
    from rich.table import Table

    tokens = law_of(config.tree, config.kind).tokens(length)
    low, high = tokens_interval(config.tree, config.kind, length)
    table = Table("acceptance length", "answer tokens", "95 %", "measured range", *_time_column(config))
    spread = f"{_count(low)} to {_count(high)}"
    table.add_row(f"{length:.2f}", _count(tokens), spread, _range(tokens), *_time(config, tokens))
    console.print(table)


def print_recorded(config: PlanConfig, rows: Sequence[dict[str, Any]]) -> None:
    """Print what recorded answers say, by kind of prompt, and what adapting would use of them."""
    from rich.table import Table

    from headstart.train.adapting_data import FEWEST, divided
    from headstart.train.config import AdaptConfig

    wanted = config.length
    more = [] if wanted is None else [f"data for {wanted:.2f}", "more answer tokens"]
    table = Table("kind", "answers", "answer tokens", "acceptance length", "nodes: length", "gain of", *more)
    kinds = sorted({row["kind"] for row in rows})
    for kind in kinds:
        own = [row for row in rows if row["kind"] == kind]
        by_nodes = rounds_by_nodes(own)
        now = accepted(by_nodes, config.tree)
        like = kind if kind in CHAIN else config.kind
        cells = [kind or "(none)", str(len(own)), f"{sum(sum(row['loss_mask']) for row in own):,}"]
        cells += ["-" if now is None else f"{now:.2f}", _by_nodes(by_nodes), like]
        if wanted is not None:
            cells += _needed(config, like, now, wanted)
        table.add_row(*cells)
    console.print(table)
    if len(rows) < FEWEST:
        log.info(f"{len(rows)} different answers: `headstart adapt` needs {FEWEST}.")
    else:
        training, judged = divided(list(rows), AdaptConfig.held_out)
        tokens = sum(sum(row["loss_mask"]) for row in training)
        passes = AdaptConfig.steps * AdaptConfig.batch_size / max(len(training), 1)
        log.info(
            f"`headstart adapt` would train on {len(training)} of {len(rows)} different answers ({tokens:,} answer "
            f"tokens, {passes:.0f} passes in {AdaptConfig.steps} steps) and judge on the {len(judged)} newest."
        )
    learned = "as many as give this length by the law (learned)"
    if config.learned is not None:
        learned = f"{config.learned:,}"
    log.info(
        f"Acceptance length as recorded: of rounds with {NODES[config.tree]} nodes, as the law has them, if there were "
        "any; else of all rounds with drafts. Data: by the law's gain from there on. More tokens: of each kind, if the "
        f"head has learned from {learned}."
    )


def recorded_answers(folder: str) -> list[dict[str, Any]]:
    """The different recorded answers of a folder, the oldest first.

    Raises:
        ValueError: no folder, or one without recorded answers.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"no folder at {folder!r}; `headstart chat --record FOLDER` makes one")
    files = recorded_files(folder)
    if not files:
        holds = "is empty" if not any(Path(folder).iterdir()) else "holds no recorded answers (recorded-*.safetensors)"
        raise ValueError(f"the folder {folder!r} {holds}; name one that `headstart chat --record` or lm.record made")
    from headstart.inference.recorded_folder import recorded_rows  # imports torch

    return recorded_rows(files)


def rounds_by_nodes(rows: Iterable[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """Rounds and the tokens that they returned, by the nodes of their trees, the root counted."""
    counts: dict[int, tuple[int, int]] = {}
    for row in rows:
        for nodes, (rounds, tokens) in row.get("rounds", {}).items():  # older recordings do not tell
            before_rounds, before_tokens = counts.get(int(nodes), (0, 0))
            counts[int(nodes)] = before_rounds + rounds, before_tokens + tokens
    return dict(sorted(counts.items()))


def accepted(by_nodes: dict[int, tuple[int, int]], tree: TreeName) -> float | None:
    """Acceptance length of rounds with as many nodes as the law's tree has, else of all that drafted; None if none."""
    drafting = {nodes: counts for nodes, counts in by_nodes.items() if nodes > 1 and counts[0] > 0}
    if NODES[tree] in drafting:
        drafting = {NODES[tree]: drafting[NODES[tree]]}
    rounds = sum(counts[0] for counts in drafting.values())
    tokens = sum(counts[1] for counts in drafting.values())
    return tokens / rounds if rounds else None


def _needed(config: PlanConfig, kind: str, now: float | None, wanted: float) -> list[str]:
    """How many times the data, and how many more tokens, take a recorded acceptance length to the wanted one."""
    if now is None:
        return ["-", "-"]
    if now >= wanted:
        return ["there already", "0"]
    law = law_of(config.tree, kind)
    times = law.times(now, wanted)
    if times > MOST_TIMES:
        return [f"over {MOST_TIMES:.0f} times", "another way"]
    known = config.learned or law.tokens(now)
    return [f"{times:.1f} times", _count((times - 1) * known)]


def _by_nodes(by_nodes: dict[int, tuple[int, int]]) -> str:
    parts = [f"{nodes}: {tokens / rounds:.2f}" for nodes, (rounds, tokens) in by_nodes.items() if nodes > 1 and rounds]
    return ", ".join(parts) or "-"


def _count(tokens: float) -> str:
    """A number of tokens to two digits; what lies outside of `TOKENS` is not told exactly."""
    if tokens >= TOKENS[1]:
        return f"over {TOKENS[1]:,}"
    if tokens <= TOKENS[0]:
        return f"under {TOKENS[0]:,}"
    return f"{float(f'{tokens:.2g}'):,.0f}"


def _range(tokens: float) -> str:
    if SIZES[0] <= tokens <= SIZES[-1]:
        return "inside"
    times = tokens / SIZES[-1] if tokens > SIZES[-1] else SIZES[0] / tokens
    return f"{times:.1f} times beyond: a guess"


def _time_column(config: PlanConfig) -> list[str]:
    return [] if config.rate is None else [f"at {config.rate:g} tokens/s"]


def _time(config: PlanConfig, tokens: float) -> list[str]:
    if config.rate is None:
        return []
    if tokens > TOKENS[1]:
        return ["-"]
    hours = tokens / config.rate / 3600
    return [f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"]


if __name__ == "__main__":
    run(main, sys.argv[1:])
