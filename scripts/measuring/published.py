"""Published acceptance lengths of public heads, and how a head measured here compares with its own.

Greedy figures of chains alone: a tree accepts more, and every source draws a different one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.console import console, log, number
from headstart.heads.base import TargetInfo
from headstart.heads.checkpoints.files import CONFIG_FILE, section_of
from headstart.heads.checkpoints.hub import local_folder
from headstart.inference import SpeculativeLM
from headstart.inference.drafters.tree_policies import model_states
from headstart.inference.text.chat_template import data_origin
from headstart.scripts.command_line import SpeculativeOptions


@dataclass(frozen=True)
class Published:
    """A head's figures, as its source gives them."""

    chain: int
    """Tokens drafted a round."""
    lengths: dict[str, float]
    """Acceptance length by prompt file (its stem, letters and digits alone), the bonus token
    counted."""
    conditions: str
    """How they were measured."""
    source: str
    """Where they stand."""


def _angelslim(gsm8k: float, humaneval: float, mt_bench: float) -> Published:
    return Published(
        2,
        {"gsm8k": gsm8k, "humaneval": humaneval, "mtbench": mt_bench},
        "vLLM 0.11.2, 1,024 new tokens, one stream; the temperature is not stated",
        "Tencent/AngelSlim, docs/source/performance/speculative_decoding/benchmarks.md",
    )


PUBLISHED = {
    "smollm2-135m-eagle3": Published(
        7,
        {"gsm8k": 2.74, "humaneval": 2.26, "mtbench": 1.57},
        "the first 6 prompts of each file, 64 new tokens, float32",
        "benchmarks/heads.md",
    ),
    "AngelSlim/Qwen3-1.7B_eagle3": _angelslim(2.13, 2.20, 2.17),
    "AngelSlim/Qwen3-4B_eagle3": _angelslim(2.07, 2.08, 2.07),
    "AngelSlim/Qwen3-8B_eagle3": _angelslim(2.00, 1.97, 1.97),
    "AngelSlim/Qwen3-14B_eagle3": _angelslim(1.87, 1.76, 1.74),
    "AngelSlim/Qwen3-32B_eagle3": _angelslim(2.01, 1.86, 1.86),
    "AngelSlim/Qwen3-a3B_eagle3": _angelslim(2.10, 2.02, 2.01),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Published(
        7, {"mtbench": 3.53}, "vLLM, one stream, one H100", "vllm-project/vllm#26191"
    ),
}
"""Figures by the head's id on the Hub; the shipped head's by its folder."""


def published_figures(head: str | None) -> Published:
    """The figures of a head: by its Hub id, by what it was imported from, or by its folder's name.

    Raises:
        ValueError: none are known, with the heads that have some.
    """
    if not head:
        raise ValueError("--published compares a head with its own figures, and no --head is given")
    # 1. The names that it goes by. A folder may be that of a run, a link, or ".".
    folder = local_folder(head, files=[CONFIG_FILE])
    names = [head, folder.resolve().name]
    training = (section_of(folder) or {}).get("training")
    imported = training.get("imported") if isinstance(training, dict) else None
    if isinstance(imported, dict):
        names.append(str(imported.get("from")))
    # 2. The first that is known, with or without its owner.
    by_name = {}
    for known, figures in PUBLISHED.items():
        by_name[known.lower()] = figures
        by_name[Path(known).name.lower()] = figures
    for name in names:
        if name.lower() in by_name:
            return by_name[name.lower()]
    tried = ", ".join(dict.fromkeys(names))
    raise ValueError(
        f"no published figures are known for the head {head!r} (looked up: {tried}); there are"
        f" some for {', '.join(PUBLISHED)}"
    )


def check_comparable(config: SpeculativeOptions, prompts: list[str], figures: Published) -> None:
    """Refuse options that contradict a head's published figures.

    Raises:
        ValueError: a drafter, a tree or a temperature is given, or no file has a figure.
    """
    for name, value in (("drafter", None), ("tree", "auto"), ("temperature", 0.0)):
        if getattr(config, name) != value:
            raise ValueError(
                f"--{name} {getattr(config, name)} was given with --published, which decodes"
                f" greedily with the head alone, in the published chain of {figures.chain}"
            )
    if not any(_stem(path) in figures.lengths for path in prompts):
        raise ValueError(
            f"no published figure is known for {', '.join(prompts)}; this head has some for files"
            f" named {', '.join(f'{stem}.jsonl' for stem in figures.lengths)}"
        )


def _stem(path: str) -> str:
    """gsm8k, humaneval or mtbench, of files such as eval/MT-bench.jsonl."""
    return re.sub(r"[^a-z0-9]", "", Path(path).stem.lower())


def compared(
    figures: Published, files: dict[str, dict[str, Any]], causes: list[str]
) -> dict[str, Any]:
    """The comparison, for the report: `files` holds the measured figures of each prompt file."""
    rows = {}
    for path, measured in files.items():
        published = figures.lengths.get(_stem(path))
        # Lower than published only where the whole interval is.
        low = published is not None and measured["interval"][1] < published
        rows[path] = {
            "acceptance_length": measured["acceptance_length"],
            "interval": measured["interval"],
            "published": published,
            "lower": low,
        }
    return {
        "chain": figures.chain,
        "conditions": figures.conditions,
        "source": figures.source,
        "files": rows,
        "causes": causes,
    }


def usual_causes(fast: SpeculativeLM, config: SpeculativeOptions) -> list[str]:
    """Name what most often makes a head accept less than published, with what this head has."""
    trained = fast.provenance
    used = {
        **fast.target.provenance,
        **data_origin(fast.target.tokenizer, config.thinking, config.template_kwargs),
    }
    unknown = "unknown (the head's files do not say)"
    layers = [str(layer) for layer in model_states(fast.drafter)[0].model.feature_layers]
    info: TargetInfo = fast.target.info
    return [
        f"the chat template: {trained.get('chat_template', unknown)} in training,"
        f" {used['chat_template']} here; thinking {trained.get('thinking', unknown)} in training,"
        f" {used['thinking']} here",
        f"the layers of the features: the head reads the residual stream after blocks"
        f" {', '.join(layers)} of {info.num_layers}, counted from 0 (-1: after the final norm);"
        " other projects count differently",
        f"the dtype: trained against {trained.get('dtype', unknown)}, the target runs in"
        f" {used['dtype']}",
    ]


def print_published(comparison: dict[str, Any]) -> None:
    """Print a comparison of the report."""
    from rich.table import Table

    table = Table(
        title=f"chain of {comparison['chain']}, greedy; acceptance lengths count the bonus token\n"
        f"published: {comparison['source']}; {comparison['conditions']}"
    )
    for column in ("prompts", "τ here (95 %)", "published", ""):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    for path, row in comparison["files"].items():
        low, high = row["interval"]
        table.add_row(
            Path(path).stem,
            f"{number(row['acceptance_length'])} ({number(low)} to {number(high)})",
            "-" if row["published"] is None else f"{row['published']:.2f}",
            "lower" if row["lower"] else "",
        )
    console.print(table)
    if any(row["lower"] for row in comparison["files"].values()):
        log.info("lower than published beyond the interval; the usual causes:")
        for cause in comparison["causes"]:
            log.info(f"- {cause}")
