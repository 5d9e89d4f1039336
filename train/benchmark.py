"""Speed, measured: stock `model.generate`, our engine without speculation, our engine with it.

All three run in one process on the same prompts, one prompt after the other, each time in another order, so that a
machine whose speed drifts treats them alike. Ratios are taken prompt by prompt.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..heads.checkpoints.save_load import json_ready
from ..inference import SpeculativeLM, Stats, Target
from ..inference.tuning.machine import turns
from .commands import BenchConfig
from .console import ProgressBar, Stopped, StopRequest, console, log, number
from .data.chat_template import check_lengths, prompt_ids, read_prompts
from .engine import Shared, as_loaded, load_engine
from .evaluate import answer_settings, summary
from .floors import profile
from .provenance import provenance

SIDES = ("generate", "plain", "speculative")


@dataclass(frozen=True)
class Answered:
    """One prompt, answered by all three."""

    tokens: dict[str, int]
    """New tokens, by side."""
    seconds: dict[str, float]
    """Wall-clock of the whole call, prefill included, by side."""
    difference: dict[str, float] | None
    """Where speculation first differs from stock `generate`, and how near the two tokens' logits are; None if
    nowhere."""
    stats: Stats
    """Of the speculative side."""

    def rate(self, side: str) -> float:
        """Tokens per second."""
        return self.tokens[side] / self.seconds[side]


def benchmark(config: BenchConfig, deadline: float = math.inf, shared: Shared | None = None) -> dict[str, Any]:
    """Run the comparison, print its table, write its JSON.

    Args:
        config: of the command.
        deadline: on `time.monotonic`'s clock; what prompts fit before it are answered, at least one.
        shared: the target, if others use it too.

    Raises:
        ValueError: a target, head, tree or prompt file that cannot be used.
        Stopped: Ctrl-C or SIGTERM; what was measured is printed and written.
    """
    prompts = {path: read_prompts(path, config.limit) for path in config.prompts}
    empty = [path for path, rows in prompts.items() if not rows]
    if empty:
        raise ValueError(f"{empty[0]} holds no prompts")
    fast, tokenizer = load_engine(config, shared)
    config, target = as_loaded(config, fast), fast.target
    encoded = {
        path: [prompt_ids(tokenizer, messages, config.thinking).to(target.device) for messages in rows]
        for path, rows in prompts.items()
    }
    for path, rows_of_ids in encoded.items():
        check_lengths(rows_of_ids, config.max_new_tokens, target.max_positions, path)
    with StopRequest() as stop:
        answered = _answer_all(target, encoded, _sides(target, fast, config), deadline, stop)
        report = _report(config, fast, encoded, answered, stop.wanted)
        if stop.wanted:
            raise Stopped(f"stopped after {report['total']['prompts']} prompts; the same command asks them again")
    return report


def _report(
    config: BenchConfig,
    fast: SpeculativeLM,
    encoded: dict[str, list[Tensor]],
    answered: dict[str, list[Answered]],
    stopped: bool,
) -> dict[str, Any]:
    """All figures, printed and written."""
    greedy = config.temperature == 0
    report = {
        "options": dataclasses.asdict(config),
        "nodes": fast.drafter.max_nodes,
        "complete": all(len(answered[path]) == len(rows) for path, rows in encoded.items()),
        "stopped": stopped,
        "files": {path: figures(rows, greedy) for path, rows in answered.items() if rows},
        "total": figures([row for rows in answered.values() for row in rows], greedy),
        **provenance(),
    }
    if config.profile and report["total"]["prompts"]:
        longest = max((ids for rows in encoded.values() for ids in rows), key=lambda ids: ids.shape[1])
        stats = Stats.merged(row.stats for rows in answered.values() for row in rows)
        report["profile"] = profile(fast, stats, longest)
    report = json_ready(report)
    print_report(report)
    if config.output:
        Path(config.output).parent.mkdir(parents=True, exist_ok=True)
        Path(config.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def figures(answered: list[Answered], greedy: bool = True) -> dict[str, Any]:
    """All figures of a set of prompts; two sampled answers are independent, so only greedy ones are compared."""
    stats = Stats.merged(row.stats for row in answered)
    rounds = max(stats.rounds, 1)
    return {
        "prompts": len(answered),
        "tokens_per_second": {
            side: sum(row.tokens[side] for row in answered) / sum(row.seconds[side] for row in answered)
            for side in SIDES
        },
        "speedup_vs_generate": quartiles([row.rate("speculative") / row.rate("generate") for row in answered]),
        "speedup_vs_plain": quartiles([row.rate("speculative") / row.rate("plain") for row in answered]),
        "plain_vs_generate": quartiles([row.rate("plain") / row.rate("generate") for row in answered]),
        **summary(stats),
        "identical": sum(row.difference is None for row in answered) if greedy else None,
        "differences": [row.difference for row in answered if row.difference is not None] if greedy else None,
        "milliseconds_per_round": {
            name: 1000 * seconds / rounds for name, seconds in stats.seconds.items() if name != "prefill"
        },
    }


@torch.inference_mode()
def first_difference(target: Target, stock_1T: Tensor, ours_1T: Tensor, prompt: int) -> dict[str, float] | None:
    """Where two answers to one prompt part, and how near the two tokens were to each other.

    Returns:
        `token`, counted from the first new one, and `logit_gap` between the two tokens there, by a forward of the
        target over the whole text; None if the answers are equal.
    """
    shorter = min(stock_1T.shape[1], ours_1T.shape[1])
    parting = (stock_1T[0, :shorter] != ours_1T[0, :shorter]).nonzero()
    if len(parting) == 0:
        return None if stock_1T.shape == ours_1T.shape else {"token": shorter - prompt, "logit_gap": float("inf")}
    place = int(parting[0])
    logits_V = target.model(stock_1T[:, :place], logits_to_keep=1).logits[0, -1].float()
    gap = logits_V[stock_1T[0, place]] - logits_V[ours_1T[0, place]]
    return {"token": place - prompt, "logit_gap": float(gap)}


def quartiles(values: list[float]) -> dict[str, float]:
    """Median and quartiles over prompts."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "lower_quartile": low, "upper_quartile": high}


def _sides(
    target: Target, fast: SpeculativeLM, config: BenchConfig
) -> dict[str, Callable[[Tensor], tuple[Tensor, Stats | None]]]:
    plain = SpeculativeLM.from_pretrained(target, compile=config.compile)
    settings = answer_settings(config.max_new_tokens, config.temperature)
    generator = torch.Generator(target.device).manual_seed(config.seed)
    torch.manual_seed(config.seed)  # stock generate draws from the global generator

    def stock(input_ids: Tensor) -> tuple[Tensor, None]:
        return target.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings), None

    def ours(lm: SpeculativeLM) -> Callable[[Tensor], tuple[Tensor, Stats]]:
        def side(input_ids: Tensor) -> tuple[Tensor, Stats]:
            mask = torch.ones_like(input_ids)
            output = lm.generate(input_ids, attention_mask=mask, generator=generator, **settings)
            return output.sequences, output.stats

        return side

    return {"generate": stock, "plain": ours(plain), "speculative": ours(fast)}


def _answer_all(
    target: Target,
    encoded: dict[str, list[Tensor]],
    sides: dict[str, Callable[[Tensor], tuple[Tensor, Stats | None]]],
    deadline: float,
    stop: StopRequest,
) -> dict[str, list[Answered]]:
    """What is answered before the deadline, or before somebody stops it: at least one prompt."""
    answered: dict[str, list[Answered]] = {path: [] for path in encoded}
    total = sum(map(len, encoded.values()))
    log.info("each side answers the first prompt once, to be warm")
    with stop.at_once():
        for side in sides.values():
            side(next(iter(encoded.values()))[0])
    began = time.monotonic()
    with ProgressBar("prompts", total) as bar, suppress(Stopped):
        for path, prompts in encoded.items():
            for number, input_ids in enumerate(prompts):
                each = (time.monotonic() - began) / max(bar.done, 1)
                if bar.done and time.monotonic() + each > deadline:
                    return answered
                with stop.at_once():
                    found = _answer(target, input_ids, sides, turns(SIDES, number))
                answered[path].append(found)
                bar.update(bar.done + 1, Path(path).name)
    if not any(answered.values()):
        raise Stopped("stopped before a prompt was answered")
    return answered


def _answer(
    target: Target,
    input_ids: Tensor,
    sides: dict[str, Callable[[Tensor], tuple[Tensor, Stats | None]]],
    order: list[str],
) -> Answered:
    outputs: dict[str, tuple[Tensor, Stats | None]] = {}
    seconds: dict[str, float] = {}
    for name in order:
        start = time.perf_counter()
        outputs[name] = sides[name](input_ids)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
    stats = outputs["speculative"][1]
    assert stats is not None
    return Answered(
        tokens={name: sequences.shape[1] - input_ids.shape[1] for name, (sequences, _) in outputs.items()},
        seconds=seconds,
        difference=first_difference(target, outputs["generate"][0], outputs["speculative"][0], input_ids.shape[1]),
        stats=stats,
    )


def print_report(report: dict[str, Any]) -> None:
    """The table, as `benchmark` returns or wrote it."""
    options = report["options"]
    title = f"{options['target']}, {options['dtype']}, temperature {options['temperature']:g}, {report['nodes']} nodes"
    table = Table(title=f"{title}, {options['max_new_tokens']} new tokens\n{report['hardware']}")
    columns = (
        "prompts",
        "generate tok/s",
        "plain tok/s",
        "speculative tok/s",
        "vs generate",
        "vs plain",
        "τ",
        "α by depth",
        "identical",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "prompts" else "right")
    stems = [Path(path).stem for path in report["files"]]
    names = {
        Path(path).stem if stems.count(Path(path).stem) == 1 else path: row for path, row in report["files"].items()
    }
    for name, row in {**names, "total": report["total"]}.items():
        rates = row["tokens_per_second"]
        table.add_row(
            name,
            *(f"{rates[side]:.1f}" for side in SIDES),
            spread(row["speedup_vs_generate"]),
            spread(row["speedup_vs_plain"]),
            number(row["acceptance_length"]),
            " ".join(number(rate) for rate in row["acceptance_rate_by_depth"]),
            "-" if row["identical"] is None else f"{row['identical']}/{row['prompts']}",
        )
    console.print(table)
    parts = ", ".join(f"{name} {value:.1f}" for name, value in report["total"]["milliseconds_per_round"].items())
    log.info(f"a round in milliseconds: {parts}")
    plain, rounds = report["total"]["plain_rounds"], report["total"]["rounds"]
    log.info(f"{plain} of {rounds} rounds without drafts, where plain steps were measured or faster")
    if "profile" in report:
        found = report["profile"]
        log.info(
            f"of {found['round']:.1f} ms, {found['milliseconds']['mask']:.1f} are the mask's (of the target's part); "
            f"the bare forward over {found['nodes']} nodes takes {found['floors']['forward']:.1f} "
            f"({found['of_the_round']['forward']:.0%}), reading its {found['bytes_read'] / 1e6:.0f} MB at "
            f"{found['bytes_per_second'] / 1e9:.1f} GB/s {found['floors']['bytes']:.1f} "
            f"({found['of_the_round']['bytes']:.0%})"
        )


def spread(row: dict[str, float]) -> str:
    """What `quartiles` gives, for a table."""
    return f"{row['median']:.2f} ({row['lower_quartile']:.2f}-{row['upper_quartile']:.2f})"
