"""Measure speed: `headstart bench --target MODEL --head HEAD --prompts FILE.jsonl`.

Stock `model.generate`, plain decoding by this package and speculation answer the same prompts in
one process, one prompt after the other, in another order each time, so that a machine whose speed
drifts treats them alike. Ratios are taken prompt by prompt. A table row for each file, and with
`--output FILE.json` every figure with versions and hardware. A speedup over `generate` alone
flatters: it includes the gain of the plain engine.
"""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headstart.console import ProgressBar, console, log, number
from headstart.options import limited
from headstart.scripts.command_line import PromptFiles, SpeculativeOptions, options

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.inference import SpeculativeLM, Stats, Target

SIDES = ("generate", "plain", "speculative")
WELL_COVERED = 0.95
"""Share of the answers' tokens in the draft vocabulary below which the command says what to do."""


@dataclass(frozen=True)
class BenchConfig(PromptFiles, SpeculativeOptions):
    """Stock `model.generate`, plain decoding and speculation, interleaved on the same prompts."""

    required = ("target", "prompts")
    most_used = ("target", "head", "prompts", "limit", "max_new_tokens")
    takes_encoder_decoders: ClassVar[bool] = True

    output: str | None = None
    """JSON file for all figures."""
    profile: bool = False
    """Compare a round's parts with the target's bare forward and with the time to read its bytes
    from memory."""
    price_per_hour: float | None = limited(None, minimum=0)
    """Price of an hour of this machine; prints the cost of a million tokens."""
    watts: float | None = limited(None, minimum=0)
    """Power that this machine draws; prints the energy of a million tokens."""
    published: bool = False
    """Decode greedily in the chain of the head's published figures, and compare with them; for
    files named gsm8k.jsonl, humaneval.jsonl and mt_bench.jsonl."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head and not self.drafter:
            raise ValueError("a head or a drafter is required and neither was given")
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens must be at least 2, not {self.max_new_tokens}: the first is the"
                " prefill's"
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
    """New tokens of the speculative side that are in the draft vocabulary; None if all tokens
    are."""


Answer = Callable[[str, "Tensor"], "tuple[Tensor, Stats | None]"]
"""Answers a prompt [1, time] on a side: the whole sequence and, of this package's sides, the
statistics."""


def main(arguments: list[str]) -> None:
    """Run `headstart bench` with these command-line arguments."""
    # What was measured so far is reported, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    benchmark(options(BenchConfig, "bench", __doc__, arguments, first="head"))


def benchmark(config: BenchConfig, show: bool = True) -> dict[str, Any]:
    """Compare the three sides on the prompts; print the report, write it, and return it.

    With `show=False` it is not printed.

    After Ctrl-C the report is about the prompts that were answered.
    """
    from headstart.heads.checkpoints.files import json_ready
    from headstart.inference import Stats
    from headstart.inference.targets.provenance import provenance
    from headstart.scripts.measuring import published
    from headstart.scripts.measuring.bandwidth import profile
    from headstart.scripts.measuring.comparison import load_with_prompts, read_prompt_files

    # 1. Decode as the published figures were measured, if they are to be compared.
    card = None
    if config.published:
        card = published.published_figures(config.head)
        published.check_comparable(config, config.prompts, card)
        config = dataclasses.replace(config, tree=f"chain:{card.chain}", adaptive=False)

    # 2. Answer the prompts. An interruption keeps those that are answered.
    fast, _, encoded = load_with_prompts(config, read_prompt_files(config.prompts, config.limit))
    config = config.as_loaded(fast)
    greedy = config.temperature == 0
    compared: dict[str, list[ComparedPrompt]] = {path: [] for path in encoded}
    stopped = False
    try:
        _compare(fast, encoded, _answering(fast, config), compared)
    except KeyboardInterrupt:
        if not any(compared.values()):
            raise
        stopped = True

    # 3. Figures by file, and over all prompts.
    every = [row for rows in compared.values() for row in rows]
    report = {
        "options": dataclasses.asdict(config),
        "nodes": fast.drafter.max_nodes,
        "complete": not stopped,
        "stopped": stopped,
        "files": {path: figures(rows, greedy) for path, rows in compared.items() if rows},
        "total": figures(every, greedy),
        **provenance(),
    }
    if config.profile:
        prompts = [ids_1T for rows in encoded.values() for ids_1T in rows]
        longest = max(prompts, key=lambda ids_1T: ids_1T.shape[1])
        report["profile"] = profile(fast, Stats.merged(row.stats for row in every), longest)

    if card is not None:
        causes = published.usual_causes(fast, config)
        report["published"] = published.compared(card, report["files"], causes)

    # 4. Print and write them.
    report = json_ready(report)
    if show:
        print_report(report)
    if config.output:
        Path(config.output).parent.mkdir(parents=True, exist_ok=True)
        Path(config.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if stopped:
        log.info(f"stopped after {len(every)} prompts; the same command starts over")
    return report


def _answering(fast: SpeculativeLM, config: BenchConfig) -> Answer:
    """Return what answers a prompt on a side; all three share the target's weights."""
    import torch

    from headstart.inference import SpeculativeLM
    from headstart.scripts.measuring.comparison import answer_settings, stock_settings

    target = fast.target
    plain = SpeculativeLM.from_pretrained(target, compile=config.compile)
    settings = answer_settings(config.max_new_tokens, config.temperature)
    more = stock_settings(target)
    generator = torch.Generator(target.device).manual_seed(config.seed)
    torch.manual_seed(config.seed)  # stock generate samples with the global generator

    def answer(side: str, input_ids: Tensor) -> tuple[Tensor, Stats | None]:
        mask = torch.ones_like(input_ids)
        if side == "generate":
            return target.model.generate(input_ids, attention_mask=mask, **settings, **more), None
        lm = fast if side == "speculative" else plain
        output = lm.generate(input_ids, attention_mask=mask, generator=generator, **settings)
        return output.sequences, output.stats

    return answer


def _compare(
    fast: SpeculativeLM,
    encoded: dict[str, list[Tensor]],
    answer: Answer,
    compared: dict[str, list[ComparedPrompt]],
) -> None:
    """Answer the prompts and add each to `compared`.

    After an interruption `compared` holds what was done until then.
    """
    import torch

    from headstart.inference.drafters.tree_policies import model_states
    from headstart.inference.tuning.machine import turns

    # The tokens that the head can draft; None if these are all, or there is no head.
    vocabulary_D = None
    heads = [state.model for state in model_states(fast.drafter)]
    if heads and heads[0].draft_vocab_size < fast.target.info.vocab_size:
        ids_D = torch.arange(heads[0].draft_vocab_size, device=fast.target.device)
        vocabulary_D = heads[0].target_tokens(ids_D)
    log.info("each side answers the first prompt once, to be warm")
    first = next(iter(encoded.values()))[0]
    for side in SIDES:
        answer(side, first)
    fast.forget()  # its answer would be drafted from the one that it has just given
    with ProgressBar("prompts", sum(map(len, encoded.values()))) as bar:
        for path, prompts in encoded.items():
            for number, input_ids in enumerate(prompts):
                # Each side is the first, the second and the last equally often.
                order = turns(SIDES, number)
                row = _compare_one(fast.target, vocabulary_D, input_ids, answer, order)
                compared[path].append(row)
                bar.update(bar.done + 1, Path(path).name)


def _compare_one(
    target: Target,
    vocabulary_D: Tensor | None,
    input_ids: Tensor,
    answer: Answer,
    order: list[str],
) -> ComparedPrompt:
    """Answer one prompt by all sides, in some order, and compare the answers."""
    import torch

    from headstart.scripts.measuring.bandwidth import now
    from headstart.scripts.measuring.comparison import answer_begin, first_difference

    outputs: dict[str, tuple[Tensor, Stats | None]] = {}
    seconds: dict[str, float] = {}
    for name in order:
        # `now` waits for a GPU's work.
        start = now(target.device)
        outputs[name] = answer(name, input_ids)
        seconds[name] = now(target.device) - start
    prompt_length = answer_begin(target, input_ids)
    sequences, stats = outputs["speculative"]
    assert stats is not None
    covered = None
    if vocabulary_D is not None:
        covered = int(torch.isin(sequences[0, prompt_length:], vocabulary_D).sum())
    tokens: dict[str, int] = {}
    for name, (answered, _) in outputs.items():
        tokens[name] = answered.shape[1] - prompt_length
    stock = outputs["generate"][0]
    difference = first_difference(target, stock, sequences, prompt_length, input_ids)
    return ComparedPrompt(tokens, seconds, difference, stats, covered)


def figures(compared: list[ComparedPrompt], greedy: bool = True) -> dict[str, Any]:
    """Return all figures of a set of prompts.

    Only greedy answers are compared, because two sampled ones are independent.
    """
    from headstart.inference import Stats
    from headstart.inference.trees.stats import acceptance_figures

    stats = Stats.merged(row.stats for row in compared)
    # Rates over all prompts, in tokens per second; speedups are taken prompt by prompt.
    rates = {}
    for side in SIDES:
        tokens = sum(row.tokens[side] for row in compared)
        rates[side] = tokens / sum(row.seconds[side] for row in compared)
    differences = [row.difference for row in compared if row.difference is not None]
    # The share of answer tokens in the draft vocabulary; None if it has all tokens.
    covered = [row.covered for row in compared if row.covered is not None]
    coverage = None
    if covered:
        coverage = sum(covered) / sum(row.tokens["speculative"] for row in compared)
    milliseconds = {
        part: 1000 * seconds / max(stats.rounds, 1)
        for part, seconds in stats.seconds.items()
        if part != "prefill"
    }
    return {
        "prompts": len(compared),
        "tokens_per_second": rates,
        "speedup_vs_generate": _speedup(compared, "speculative", "generate"),
        "speedup_vs_plain": _speedup(compared, "speculative", "plain"),
        "plain_vs_generate": _speedup(compared, "plain", "generate"),
        **acceptance_figures(stats),
        "coverage": coverage,
        "identical": len(compared) - len(differences) if greedy else None,
        "differences": differences if greedy else None,
        "milliseconds_per_round": milliseconds,
    }


def _speedup(compared: list[ComparedPrompt], side: str, base: str) -> dict[str, float]:
    """Return the quartiles, over prompts, of the rate of a side over that of another."""
    from headstart.scripts.measuring.comparison import quartiles

    ratios = []
    for row in compared:
        rate = row.tokens[side] / row.seconds[side]
        base_rate = row.tokens[base] / row.seconds[base]
        ratios.append(rate / base_rate)
    return quartiles(ratios)


def costs(options: dict[str, Any], tokens_per_second: dict[str, float]) -> list[str]:
    """Return lines that say what a million tokens cost, plain and speculative.

    There is one line each for `price_per_hour` and `watts`, if given.
    """
    lines = []
    for name, unit, scale in (("price_per_hour", "", 1.0), ("watts", " kWh", 1e-3)):
        per_hour = options.get(name)
        if per_hour is None:
            continue
        # A second's share of the price, or of the energy in kWh, times the seconds of 1e6 tokens.
        per_second = scale * per_hour / 3600
        plain = 1e6 * per_second / tokens_per_second["plain"]
        fast = 1e6 * per_second / tokens_per_second["speculative"]
        lines.append(
            f"a million tokens at {name} = {per_hour:g}: {plain:.3g}{unit} plain,"
            f" {fast:.3g}{unit} speculative"
        )
    return lines


def print_report(report: dict[str, Any]) -> None:
    """Print a report that `benchmark` returned or wrote."""
    from headstart.scripts.measuring.published import print_published

    console.print(_table(report))
    if "published" in report:
        print_published(report["published"])
    total = report["total"]
    parts = ", ".join(
        f"{name} {value:.1f}" for name, value in total["milliseconds_per_round"].items()
    )
    log.info(f"a round in milliseconds: {parts}")
    log.info(
        f"{total['plain_rounds']} of {total['rounds']} rounds without drafts, to time plain steps"
        " or to be faster"
    )
    for path, row in report["files"].items():
        if row["coverage"] is not None and row["coverage"] < WELL_COVERED:
            log.info(
                f"{Path(path).stem}: {1 - row['coverage']:.1%} of the answers' tokens are outside"
                " the draft vocabulary and are never drafted; train on such prompts, with"
                " init_from and a larger head.draft_vocab_size"
            )
    slower = [
        f"{Path(path).stem} ({row['speedup_vs_plain']['median']:.2f} times the speed without them)"
        for path, row in report["files"].items()
        if row["speedup_vs_plain"]["median"] < 1
    ]
    if slower:
        log.info(
            f"drafts do not pay on {', '.join(slower)}; what to do: docs/troubleshooting.md,"
            ' "Slower than without drafts"'
        )
    for line in costs(report["options"], total["tokens_per_second"]):
        log.info(line)
    # A round's time, and its lower bounds.
    if "profile" in report:
        profile = report["profile"]
        floors = profile["floors"]
        shares = profile["of_the_round"]
        log.info(
            f"of {profile['round']:.1f} ms, the bare forward over {profile['nodes']} nodes takes"
            f" {floors['forward']:.1f} ({shares['forward']:.0%}), reading its"
            f" {profile['bytes_read'] / 1e6:.0f} MB at {profile['bytes_per_second'] / 1e9:.1f} GB/s"
            f" {floors['bytes']:.1f} ({shares['bytes']:.0%})"
        )


def _table(report: dict[str, Any]) -> Any:
    """Make a table with a row for each file of prompts, and one for the total of several."""
    from rich.table import Table

    from headstart.scripts.measuring.comparison import spread

    options = report["options"]
    title = (
        f"{options['target']}, {options['dtype']}, temperature {options['temperature']:g},"
        f" {report['nodes']} nodes"
    )
    table = Table(title=f"{title}, {options['max_new_tokens']} new tokens\n{report['hardware']}")
    table.add_column("prompts")
    rates = [f"{side} tok/s" for side in SIDES]
    for column in (*rates, "vs generate", "vs plain", "τ", "α by depth", "covered", "identical"):
        table.add_column(column, justify="right")
    # A file is shown by its name alone, unless two have the same one.
    stems = [Path(path).stem for path in report["files"]]
    rows = dict(report["files"])
    if len(rows) > 1:
        rows["total"] = report["total"]
    for path, row in rows.items():
        stem = Path(path).stem
        table.add_row(
            stem if stems.count(stem) <= 1 else path,
            *(f"{row['tokens_per_second'][side]:.1f}" for side in SIDES),
            spread(row["speedup_vs_generate"]),
            spread(row["speedup_vs_plain"]),
            number(row["acceptance_length"]),
            " ".join(number(rate) for rate in row["acceptance_rate_by_depth"]),
            "-" if row["coverage"] is None else f"{row['coverage']:.1%}",
            "-" if row["identical"] is None else f"{row['identical']}/{row['prompts']}",
        )
    return table
