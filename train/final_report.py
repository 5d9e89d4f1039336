"""The end of a run as a page: report.md with its curves, from log.jsonl and config.yaml alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # files only: a training machine has no screen
import matplotlib.pyplot as plt
import yaml

from .console import number


def write_report(folder: Path) -> Path:
    """Write the report of the run in a folder; return its file."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval" in row]
    plots = folder / "plots"
    plots.mkdir(exist_ok=True)
    _plot(plots / "loss.png", "loss (nats a token)", by_depth(steps, "loss"))
    _plot(plots / "accuracy.png", "accuracy", by_depth(steps, "accuracy"))
    lengths = {
        tree: [(row["step"], row["eval"][tree]["acceptance_length"]) for row in evaluations]
        for tree in evaluations[-1]["eval"]
    }
    estimated = [(row["step"], row["estimated_acceptance_length"]) for row in steps]
    _plot(plots / "acceptance.png", "acceptance length (tokens a round)", {**lengths, "estimated, chain": estimated})
    _plot(
        plots / "rate.png",
        "answer tokens a second",
        {"": [(row["step"], row["answer_tokens_per_second"]) for row in steps]},
    )
    path = folder / "report.md"
    path.write_text("\n".join(_page(folder, steps, evaluations)) + "\n", encoding="utf-8")
    return path


def by_depth(rows: list[dict[str, Any]], name: str) -> dict[str, list[tuple[int, float]]]:
    """A curve for each depth."""
    depths = max((len(row[name]) for row in rows), default=0)
    return {f"depth {k}": [(row["step"], row[name][k]) for row in rows if len(row[name]) > k] for k in range(depths)}


def _page(folder: Path, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> list[str]:
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    lines = [f"# {config['head']['type']} for {config['target']}", ""]
    trees = list(evaluations[-1]["eval"])
    lines += ["## Real acceptance length on held-out prompts", ""]
    lines += ["| step | held-out loss by depth | " + " | ".join(trees) + " |", "|---|---|" + "---|" * len(trees)]
    for row in evaluations:
        losses = " ".join(map(number, row["held_out_loss"]))
        lengths = [_length(found) for found in row["eval"].values()]
        lines.append(f"| {row['step']} | {losses} | " + " | ".join(lengths) + " |")
    lines += ["", "![acceptance length](plots/acceptance.png)", "", "## Training", ""]
    lines += ["![loss](plots/loss.png)", "", "![accuracy](plots/accuracy.png)", "", "![rate](plots/rate.png)", ""]
    if steps:
        costs = {name: value for name, value in steps[-1]["costs"].items() if isinstance(value, float)}
        lines += ["| at the last step | |", "|---|---|"]
        lines += [f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in costs.items()]
    return [*lines, "", "## Options", "", "```yaml", yaml.safe_dump(config, sort_keys=False).rstrip(), "```"]


def _length(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return f"{number(found['acceptance_length'], 3)} ({number(low)} to {number(high)})"


def _plot(path: Path, title: str, curves: dict[str, list[tuple[int, float]]]) -> None:
    curves = {name: [point for point in points if point[1] is not None] for name, points in curves.items()}
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, points in curves.items():
        axes.plot(
            [step for step, _ in points],
            [value for _, value in points],
            label=name,
            marker="." if len(points) < 20 else None,
        )
    axes.set_xlabel("step")
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
