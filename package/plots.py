"""Plots of curves, by matplotlib, which only some commands need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plotted(
    x_title: str, y_title: str, curves: Mapping[str, Sequence[tuple[float, float | None]]]
) -> Figure:
    """Plot curves of points (x, y), with a legend if there are several.

    Points whose y was not measured (None) are left out.

    Raises:
        ValueError: text in the place of a number, which matplotlib would take for a date.
    """
    from matplotlib.figure import Figure  # takes a second to import, and is needed last

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        measured = [(float(x), float(y)) for x, y in points if y is not None]
        marker = "." if len(measured) < 20 else None
        axes.plot([x for x, _ in measured], [y for _, y in measured], label=name, marker=marker)
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    return figure
