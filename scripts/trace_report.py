"""The report of `headstart trace --report`: tables on the console, and a page with them and their plots."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from typing import Any

from headstart.console import console
from headstart.inference.tracing.plots import plotted
from headstart.inference.tracing.report import TraceReport

Rows = Sequence[Sequence[Any]]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: 0.2em 0.8em; border-bottom: 1px solid #8884; text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; white-space: pre-wrap; }
img { max-width: 100%; background: white; }
"""


def tables(report: TraceReport) -> dict[str, tuple[Sequence[str], Rows]]:
    """Columns and rows of each table, by title."""
    pays = "" if math.isnan(report.plain_ms) else f" (plain decoding: {1 / report.plain_ms:.3f})"
    return {
        "Rejected by kind of token": (
            ("kind", "positions", "rejected"),
            [(each.name, each.positions, f"{each.rejection_rate:.0%}") for each in report.kinds],
        ),
        "Most often rejected": (
            ("token", "positions", "rejected", "mostly drafted instead"),
            [(repr(each.name), each.positions, each.misses, repr(each.instead)) for each in report.tokens],
        ),
        "By depth": (
            ("depth", "acceptance rate", "accepted a round", "nodes a round", "draft ms", f"accepted per ms{pays}"),
            [
                (
                    each.depth,
                    number(each.acceptance_rate),
                    number(each.gained),
                    f"{each.nodes:.1f}",
                    f"{each.draft_ms:.2f}",
                    number(each.gained_per_ms),
                )
                for each in report.depths
            ],
        ),
        f"Calibration of the draft, expected error {number(report.calibration_error)}": (
            ("mean draft probability", "mean target probability", "accepted", "drafts"),
            [
                (number(each.draft_prob), number(each.target_prob), number(each.accepted), each.drafts)
                for each in report.calibration
            ],
        ),
        "By prompt": (
            ("prompt", "tokens", "rounds", "acceptance length", "rejected", "tokens/s", "plain tokens/s"),
            [
                (
                    " ".join(each.prompt.split())[-60:],
                    each.tokens,
                    each.rounds,
                    number(each.acceptance_length),
                    number(each.rejection_rate),
                    f"{each.tokens_per_second:.1f}",
                    f"{each.plain_tokens_per_second:.1f}",
                )
                for each in report.prompts
            ],
        ),
    }


def print_report(report: TraceReport) -> None:
    """Print the tables."""
    from rich.table import Table
    from rich.text import Text

    for title, (columns, rows) in tables(report).items():
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))  # no markup: a token may be [/]
        console.print(table)


def report_page(report: TraceReport, drafter: str) -> str:
    """The tables and plots as one page, without any network."""
    stats = report.stats
    lines = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(drafter)}: drafts</title>",
        f"<style>{STYLE}</style><h1>{html.escape(drafter)}</h1>",
        f"<p>{stats.tokens} tokens in {stats.rounds} rounds by the rule {report.rule}, acceptance length "
        f"{stats.acceptance_length:.2f}.</p>",
    ]
    for title, (columns, rows) in tables(report).items():
        lines.append(f"<h2>{html.escape(title)}</h2><table><tr>{cells(columns, 'th')}</tr>")
        lines += [f"<tr>{cells(row, 'td')}</tr>" for row in rows]
        lines.append("</table>")
    kinds = {each.depth: each for each in report.depths}
    lines.append(
        plot(
            "depth",
            "acceptance rate, accepted tokens a round",
            {
                "acceptance rate": [(depth, each.acceptance_rate) for depth, each in kinds.items()],
                "accepted a round": [(depth, each.gained) for depth, each in kinds.items()],
            },
        )
    )
    if report.calibration:
        lines.append(
            plot(
                "draft probability",
                "share",
                {
                    "accepted": [(each.draft_prob, each.accepted) for each in report.calibration],
                    "target probability": [(each.draft_prob, each.target_prob) for each in report.calibration],
                    "calibrated": [(0.0, 0.0), (1.0, 1.0)],
                },
            )
        )
    return "\n".join([*lines, "</html>"])


def cells(row: Sequence[Any], name: str) -> str:
    """A row's cells."""
    return "".join(f"<{name}>{html.escape(str(cell))}</{name}>" for cell in row)


def plot(x_title: str, y_title: str, curves: dict[str, list[tuple[float, float | None]]]) -> str:
    """A plot as an image within the page."""
    image = io.BytesIO()
    plotted(x_title, y_title, curves).savefig(image, format="png", dpi=110)
    encoded = base64.b64encode(image.getvalue()).decode("ascii")
    return f'<p><img alt="{html.escape(y_title)} by {html.escape(x_title)}" src="data:image/png;base64,{encoded}">'


def number(value: float) -> str:
    """Two decimals, or - where nothing was measured."""
    return "-" if math.isnan(value) else f"{value:.2f}"
