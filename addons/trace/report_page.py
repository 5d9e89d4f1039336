"""The report of `headstart trace --report`: console tables, and a page with them and plots."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.addons.trace.report import TraceReport
from headstart.console import console
from headstart.plots import plotted

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; }
td, th {
  padding: 0.2em 0.8em; border-bottom: 1px solid #8884;
  text-align: right; font-variant-numeric: tabular-nums;
}
td:first-child, th:first-child { text-align: left; white-space: pre-wrap; }
img { max-width: 100%; background: white; }
"""


@dataclass(frozen=True)
class ReportTable:
    """A table of the report."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def tables(report: TraceReport) -> list[ReportTable]:
    """All tables of a report."""
    # 1. By kind of token, and by token.
    kinds = ReportTable("Rejected by kind of token", ("kind", "positions", "rejected"), [])
    for kind in report.kinds:
        kinds.rows.append((kind.name, kind.positions, f"{kind.rejection_rate:.0%}"))
    columns: tuple[str, ...] = ("token", "positions", "rejected", "mostly drafted instead")
    tokens = ReportTable("Most often rejected", columns, [])
    for token in report.tokens:
        tokens.rows.append((repr(token.name), token.positions, token.misses, repr(token.instead)))

    # 2. By depth.
    gain = "accepted per ms"
    if not math.isnan(report.plain_ms):
        gain += f" (plain decoding: {1 / report.plain_ms:.3f})"
    columns = ("depth", "acceptance rate", "accepted a round", "nodes a round", "draft ms", gain)
    depths = ReportTable("By depth", columns, [])
    for depth in report.depths:
        rate = number(depth.acceptance_rate)
        gained = number(depth.gained)
        per_ms = number(depth.gained_per_ms)
        depths.rows.append(
            (depth.depth, rate, gained, f"{depth.nodes:.1f}", f"{depth.draft_ms:.2f}", per_ms)
        )

    # 3. By the draft's probability.
    title = f"Calibration of the draft, expected error {number(report.calibration_error)}"
    columns = ("mean draft probability", "mean target probability", "accepted", "drafts")
    calibration = ReportTable(title, columns, [])
    for bucket in report.calibration:
        probabilities = (bucket.draft_prob, bucket.target_prob, bucket.accepted)
        calibration.rows.append((*map(number, probabilities), bucket.drafts))

    # 4. By prompt.
    columns = ("prompt", "tokens", "rounds", "acceptance length", "rejected")
    prompts = ReportTable("By prompt", (*columns, "tokens/s", "plain tokens/s"), [])
    for prompt in report.prompts:
        prompts.rows.append(
            (
                " ".join(prompt.prompt.split())[-60:],
                prompt.tokens,
                prompt.rounds,
                number(prompt.acceptance_length),
                number(prompt.rejection_rate),
                f"{prompt.tokens_per_second:.1f}",
                f"{prompt.plain_tokens_per_second:.1f}",
            )
        )
    return [kinds, tokens, depths, calibration, prompts]


def print_report(report: TraceReport) -> None:
    """Print the report's tables to the terminal."""
    from rich.table import Table
    from rich.text import Text

    for table in tables(report):
        printed = Table(*table.columns, title=table.title)
        for row in table.rows:
            # `Text`, since a token may look like rich's markup: [/]
            printed.add_row(*(Text(str(cell)) for cell in row))
        console.print(printed)


def report_page(report: TraceReport, drafter: str) -> str:
    """The tables and plots as one page, without any network."""
    stats = report.stats
    lines = [
        (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(drafter)}:"
            " drafts</title>"
        ),
        f"<style>{STYLE}</style><h1>{html.escape(drafter)}</h1>",
        (
            f"<p>{stats.tokens} tokens in {stats.rounds} rounds by the rule {report.rule},"
            f" acceptance length {stats.acceptance_length:.2f}.</p>"
        ),
    ]
    # Tables.
    for table in tables(report):
        lines.append(
            f"<h2>{html.escape(table.title)}</h2><table><tr>{cells(table.columns, 'th')}</tr>"
        )
        lines += [f"<tr>{cells(row, 'td')}</tr>" for row in table.rows]
        lines.append("</table>")
    # Plots: acceptance by depth, and calibration against the diagonal.
    rates = [(depth.depth, depth.acceptance_rate) for depth in report.depths]
    gained = [(depth.depth, depth.gained) for depth in report.depths]
    by_depth = {"acceptance rate": rates, "accepted a round": gained}
    lines.append(plot("depth", "acceptance rate, accepted tokens a round", by_depth))
    if report.calibration:
        accepted = [(bucket.draft_prob, bucket.accepted) for bucket in report.calibration]
        target = [(bucket.draft_prob, bucket.target_prob) for bucket in report.calibration]
        diagonal = [(0.0, 0.0), (1.0, 1.0)]
        curves = {"accepted": accepted, "target probability": target, "calibrated": diagonal}
        lines.append(plot("draft probability", "share", curves))
    return "\n".join([*lines, "</html>"])


def cells(row: Sequence[Any], name: str) -> str:
    """The cells of a row of an HTML table, as elements of this name (td, th)."""
    return "".join(f"<{name}>{html.escape(str(cell))}</{name}>" for cell in row)


def plot(
    x_title: str, y_title: str, curves: Mapping[str, Sequence[tuple[float, float | None]]]
) -> str:
    """A plot as an image inside the page, without a file of its own."""
    image = io.BytesIO()
    plotted(x_title, y_title, curves).savefig(image, format="png", dpi=110)
    encoded = base64.b64encode(image.getvalue()).decode("ascii")
    return (
        f'<p><img alt="{html.escape(y_title)} by {html.escape(x_title)}"'
        f' src="data:image/png;base64,{encoded}">'
    )


def number(value: float) -> str:
    """Two decimals, or - where nothing was measured."""
    return "-" if math.isnan(value) else f"{value:.2f}"
