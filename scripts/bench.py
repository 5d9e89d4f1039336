"""Measure speed: `headstart bench --target MODEL --head HEAD --prompts '[FILE.jsonl]'`.

Stock `model.generate`, plain decoding by this package and speculation answer the same prompts in one process, one
prompt after the other, in another order each time, so that a machine whose speed drifts treats them alike. Ratios are
taken prompt by prompt. A table row for each file, and with `--output FILE.json` every figure with versions and
hardware. A speedup over `generate` alone flatters: it holds the gain of the plain engine, too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headstart.console import ProgressBar, console, log, number
from headstart.scripts.command_line import SpeculativeOptions, options
from headstart.stopping import StopFlag, Stopped, stop_on_signals

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.inference import SpeculativeLM, Stats, Target

SIDES = ("generate", "plain", "speculative")
WELL_COVERED = 0.95
"""Share of the answers' tokens in the draft vocabulary below which the command says what to do."""


@dataclass(frozen=True)
class BenchConfig(SpeculativeOptions):
    """Stock `model.generate`, plain decoding and speculation, interleaved on the same prompts."""

    required = ("target", "prompts")
    minimum: ClassVar[dict[str, float]] = {"limit": 1, "temperature": 0, "price_per_hour": 0, "watts": 0}

    prompts: list[str] = field(default_factory=list)
    """JSONL files of prompts; a table row each."""
    limit: int | None = None
    """Use only the first prompts of each file; null for all."""
    output: str | None = None
    """JSON file for all figures."""
    profile: bool = False
    """Compare a round's parts with the target's bare forward and with the time to read its bytes from memory."""
    price_per_hour: float | None = None
    """What an hour of this machine costs; prints the cost of a million tokens."""
    watts: float | None = None
    """Power that this machine draws; prints the energy of a million tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head and not self.drafter:
            raise ValueError("a head or a drafter is required and neither was given")
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens must be at least 2, not {self.max_new_tokens}: the first is the prefill's"
            )


@dataclass(frozen=True)
class ComparedPrompt:
    """One prompt, answered by all three sides."""

    tokens: dict[str, int]
    """New tokens, by side."""
    seconds: dict[str, float]
    """Wall-clock of the whole call, prefill included, by side."""
    difference: dict[str, float] | None
    """Where speculation first differs from stock `generate`, by `first_difference`."""
    stats: Stats
    """Rounds of the speculative side."""
    covered: int | None = None
    """New tokens of the speculative side that are in the draft vocabulary; None if all tokens are."""


Side = Callable[["Tensor"], "tuple[Tensor, Stats | None]"]
"""Answers a prompt [1, time]: the whole sequence and, of this package's sides, the statistics."""


def main(arguments: list[str]) -> None:
    """Run `headstart bench` with these command-line arguments."""
    benchmark(options(BenchConfig, "bench", __doc__, arguments))


def benchmark(config: BenchConfig) -> dict[str, Any]:
    """Compare the three sides on each prompt; print the report and write it.

    Raises:
        Stopped: Ctrl-C or SIGTERM; the report is of the prompts before.
    """
    from headstart.heads.checkpoints.files import json_ready
    from headstart.inference import Stats
    from headstart.scripts.measuring.bandwidth import profile
    from headstart.scripts.measuring.comparison import load_with_prompts, read_prompt_files
    from headstart.train.run_folder import provenance

    fast, encoded = load_with_prompts(config, read_prompt_files(config.prompts, config.limit))
    config = config.as_loaded(fast)
    with stop_on_signals() as stop:
        compared = _compare(fast, encoded, _sides(fast, config), stop)
        every, greedy = [row for rows in compared.values() for row in rows], config.temperature == 0
        report = {
            "options": dataclasses.asdict(config),
            "nodes": fast.drafter.max_nodes,
            "complete": all(len(compared[path]) == len(rows) for path, rows in encoded.items()),
            "stopped": stop.wanted,
            "files": {path: figures(rows, greedy) for path, rows in compared.items() if rows},
            "total": figures(every, greedy),
            **provenance(),
        }
        if config.profile and every:
            longest = max((ids for rows in encoded.values() for ids in rows), key=lambda ids: ids.shape[1])
            report["profile"] = profile(fast, Stats.merged(row.stats for row in every), longest)
        report = json_ready(report)
        print_report(report)
        if config.output:
            Path(config.output).parent.mkdir(parents=True, exist_ok=True)
            Path(config.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if stop.wanted:
            raise Stopped(f"stopped after {len(every)} prompts; the same command starts over")
    return report


def _sides(fast: SpeculativeLM, config: BenchConfig) -> dict[str, Side]:
    import torch

    from headstart.inference import SpeculativeLM
    from headstart.scripts.measuring.comparison import answer_settings, stock_settings

    target, settings = fast.target, answer_settings(config.max_new_tokens, config.temperature)
    more = stock_settings(target)
    generator = torch.Generator(target.device).manual_seed(config.seed)
    torch.manual_seed(config.seed)  # stock generate samples with the global generator

    def stock(input_ids: Tensor) -> tuple[Tensor, None]:
        mask = torch.ones_like(input_ids)
        return target.model.generate(input_ids, attention_mask=mask, **settings, **more), None

    def ours(lm: SpeculativeLM, input_ids: Tensor) -> tuple[Tensor, Stats]:
        mask = torch.ones_like(input_ids)
        output = lm.generate(input_ids, attention_mask=mask, generator=generator, **settings)
        return output.sequences, output.stats

    plain = SpeculativeLM.from_pretrained(target, compile=config.compile)
    return {"generate": stock, "plain": partial(ours, plain), "speculative": partial(ours, fast)}


def _draft_vocabulary(fast: SpeculativeLM) -> Tensor | None:
    """Tokens that the head can draft; None if these are all tokens, or there is no head."""
    import torch

    from headstart.inference.drafters.tree_policies import HeadDrafter

    heads = [each.head for each in fast.drafter.nested() if isinstance(each, HeadDrafter)]
    if not heads or heads[0].draft_vocab_size >= fast.target.info.vocab_size:
        return None
    return heads[0].target_tokens(torch.arange(heads[0].draft_vocab_size, device=fast.target.device))


def _compare(
    fast: SpeculativeLM, encoded: dict[str, list[Tensor]], sides: dict[str, Side], stop: StopFlag
) -> dict[str, list[ComparedPrompt]]:
    """Answer the prompts, until a stop is wanted."""
    from headstart.inference.tuning.machine import turns

    vocabulary_D = _draft_vocabulary(fast)
    compared: dict[str, list[ComparedPrompt]] = {path: [] for path in encoded}
    log.info("each side answers the first prompt once, to be warm")
    for side in sides.values():
        side(next(iter(encoded.values()))[0])
    with ProgressBar("prompts", sum(map(len, encoded.values()))) as bar:
        for path, prompts in encoded.items():
            for place, input_ids in enumerate(prompts):
                if stop.wanted:
                    break
                found = _compare_one(fast.target, vocabulary_D, input_ids, sides, turns(SIDES, place))
                compared[path].append(found)
                bar.update(bar.done + 1, Path(path).name)
    if not any(compared.values()):
        raise Stopped("stopped before a prompt was answered; the same command starts over")
    return compared


def _compare_one(
    target: Target, vocabulary_D: Tensor | None, input_ids: Tensor, sides: dict[str, Side], order: list[str]
) -> ComparedPrompt:
    import torch

    from headstart.scripts.measuring.bandwidth import now
    from headstart.scripts.measuring.comparison import first_difference

    outputs: dict[str, tuple[Tensor, Stats | None]] = {}
    seconds: dict[str, float] = {}
    for name in order:
        start = now(target.device)
        outputs[name] = sides[name](input_ids)
        seconds[name] = now(target.device) - start
    sequences, stats = outputs["speculative"]
    assert stats is not None
    answer_T = sequences[0, input_ids.shape[1] :]
    return ComparedPrompt(
        tokens={name: sequences.shape[1] - input_ids.shape[1] for name, (sequences, _) in outputs.items()},
        seconds=seconds,
        difference=first_difference(target, outputs["generate"][0], sequences, input_ids.shape[1]),
        stats=stats,
        covered=None if vocabulary_D is None else int(torch.isin(answer_T, vocabulary_D).sum()),
    )


def figures(compared: list[ComparedPrompt], greedy: bool = True) -> dict[str, Any]:
    """All figures of a set of prompts; two sampled answers are independent, so only greedy ones are compared."""
    from headstart.inference import Stats
    from headstart.scripts.measuring.comparison import quartiles
    from headstart.train.evaluate import summary

    stats = Stats.merged(row.stats for row in compared)
    rates = [{side: row.tokens[side] / row.seconds[side] for side in SIDES} for row in compared]
    pairs = (("speculative", "generate"), ("speculative", "plain"), ("plain", "generate"))
    vs_generate, vs_plain, plain = (quartiles([rate[side] / rate[base] for rate in rates]) for side, base in pairs)
    return {
        "prompts": len(compared),
        "tokens_per_second": {
            side: sum(row.tokens[side] for row in compared) / sum(row.seconds[side] for row in compared)
            for side in SIDES
        },
        "speedup_vs_generate": vs_generate,
        "speedup_vs_plain": vs_plain,
        "plain_vs_generate": plain,
        **summary(stats),
        "coverage": coverage(compared),
        "identical": sum(row.difference is None for row in compared) if greedy else None,
        "differences": [row.difference for row in compared if row.difference is not None] if greedy else None,
        "milliseconds_per_round": {
            name: 1000 * seconds / max(stats.rounds, 1) for name, seconds in stats.seconds.items() if name != "prefill"
        },
    }


def coverage(compared: list[ComparedPrompt]) -> float | None:
    """Share of the answers' tokens that are in the draft vocabulary; None if that has all tokens."""
    covered = [row.covered for row in compared if row.covered is not None]
    return sum(covered) / sum(row.tokens["speculative"] for row in compared) if covered else None


def costs(options: dict[str, Any], tokens_per_second: dict[str, float]) -> list[str]:
    """Lines that say what a million tokens cost, without drafts and with them, if price or power was given."""
    lines = []
    for name, unit, scale in (("price_per_hour", "", 1.0), ("watts", " kWh", 1e-3)):
        if (given := options.get(name)) is not None:
            plain, fast = (scale * given * 1e6 / (3600 * tokens_per_second[side]) for side in SIDES[1:])
            asked = f"{name} = {given:g}"
            lines.append(f"a million tokens at {asked}: {plain:.3g}{unit} plain, {fast:.3g}{unit} speculative")
    return lines


def print_report(report: dict[str, Any]) -> None:
    """Print the table of a report that `benchmark` returned or wrote."""
    from rich.table import Table

    from headstart.scripts.measuring.comparison import spread

    options = report["options"]
    title = f"{options['target']}, {options['dtype']}, temperature {options['temperature']:g}, {report['nodes']} nodes"
    table = Table(title=f"{title}, {options['max_new_tokens']} new tokens\n{report['hardware']}")
    table.add_column("prompts")
    rates = (f"{side} tok/s" for side in SIDES)
    for column in (*rates, "vs generate", "vs plain", "τ", "α by depth", "covered", "identical"):
        table.add_column(column, justify="right")
    stems = [Path(path).stem for path in report["files"]]
    for path, row in {**report["files"], "total": report["total"]}.items():
        table.add_row(
            Path(path).stem if stems.count(Path(path).stem) == 1 else path,
            *(f"{row['tokens_per_second'][side]:.1f}" for side in SIDES),
            spread(row["speedup_vs_generate"]),
            spread(row["speedup_vs_plain"]),
            number(row["acceptance_length"]),
            " ".join(number(rate) for rate in row["acceptance_rate_by_depth"]),
            "-" if row["coverage"] is None else f"{row['coverage']:.1%}",
            "-" if row["identical"] is None else f"{row['identical']}/{row['prompts']}",
        )
    console.print(table)
    total = report["total"]
    parts = ", ".join(f"{name} {value:.1f}" for name, value in total["milliseconds_per_round"].items())
    log.info(f"a round in milliseconds: {parts}")
    log.info(f"{total['plain_rounds']} of {total['rounds']} rounds without drafts, to time plain steps or to be faster")
    for path, row in report["files"].items():
        if row["coverage"] is not None and row["coverage"] < WELL_COVERED:
            log.info(
                f"{Path(path).stem}: {1 - row['coverage']:.1%} of the answers' tokens are outside the draft vocabulary "
                "and are never drafted; train on such prompts, with init_from and a larger head.draft_vocab_size"
            )
    for line in costs(options, total["tokens_per_second"]):
        log.info(line)
    if found := report.get("profile"):
        log.info(
            f"of {found['round']:.1f} ms, {found['milliseconds']['mask']:.1f} build the mask (counted in the target's "
            f"part); the bare forward over {found['nodes']} nodes takes {found['floors']['forward']:.1f} "
            f"({found['of_the_round']['forward']:.0%}), reading its {found['bytes_read'] / 1e6:.0f} MB at "
            f"{found['bytes_per_second'] / 1e9:.1f} GB/s {found['floors']['bytes']:.1f} "
            f"({found['of_the_round']['bytes']:.0%})"
        )
