"""The picture beside a table of the bench: how each cost grows, both axes logarithmic.

A straight line is a power of the size; its exponent stands beside its name. What is ours has
colours and thick lines; the obvious way is dashed, the limit dotted, both in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from simulations.bench.cost_tables import CostTable, Line
from simulations.report.direct_labels import Name, place_names
from simulations.report.figures import (
    COLOURS,
    DARK,
    MARKERS,
    add_grid,
    label_decades,
    new_figure,
    save,
    write_heading,
)

# Longer headings would be wider than the picture.
_LONGEST_HEADING = 46
_HEIGHT_INCHES = 3.7
# Of the width between the first and the last point, as much again for the names.
_ROOM_FOR_NAMES = 0.62
_GREYS = {"obvious": DARK, "limit": "#757575"}
_STYLES = {"obvious": (0, (5, 2)), "limit": (0, (1, 1.5))}


def plot_growth(table: CostTable, path: Path) -> bool:
    """Draw costs against the size; return whether there was anything to draw."""
    lines = table.lines()
    if not lines:
        return False
    figure = new_figure(_HEIGHT_INCHES)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    names = _draw(axes, lines)
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    axes.set_xlim(xs[0] / 1.1, xs[-1] * (xs[-1] / xs[0]) ** _ROOM_FOR_NAMES)
    axes.set_xlabel(table.grows_label or str(table.grows_with))
    axes.set_ylabel(lines[0].unit)
    # Ticks where something was measured, as far as their labels have room.
    axes.xaxis.set_major_locator(FixedLocator(ticks := _apart(xs)))
    axes.xaxis.set_major_formatter(
        FixedFormatter([f"{x:,.4g}" if x < 1e4 else f"{x:,.0f}" for x in ticks])
    )
    axes.xaxis.set_minor_locator(NullLocator())
    few = max(ys) / min(ys) < 50
    label_decades(axes.yaxis, lambda value: f"{value:,.6g}", (1, 2, 5) if few else (1,))
    add_grid(axes)
    write_heading(axes, _cut(table.title), "how the cost grows, with the exponent of each line")
    between = [point for line in lines for point in _along(line)]
    place_names(axes, names, between, size=9)
    save(figure, path)
    return True


def described(table: CostTable) -> str:
    """Return the picture in words."""
    told = "; ".join(f"{line.name}: exponent {line.slope:.2f}" for line in table.lines())
    return f"{table.title}: cost against {table.grows_with}, logarithmic. {told}."


def _draw(axes: Axes, lines: Sequence[Line]) -> list[Name]:
    names, coloured = [], 0
    for number, line in enumerate(lines):
        xs, ys = zip(*line.points, strict=True)
        look: dict[str, Any]
        if line.role == "ours":
            colour = COLOURS[coloured % len(COLOURS)]
            look = {"marker": MARKERS[coloured % len(MARKERS)], "linewidth": 2.0}
            coloured += 1
        else:
            colour = _GREYS[line.role]
            look = {"marker": "x+12"[number % 4], "linewidth": 1.4, "linestyle": _STYLES[line.role]}
        axes.plot(xs, ys, color=colour, markersize=6, **look)
        text = f"{line.name}, {line.slope:.2f}"
        text += f" ({line.role})" if line.role != "ours" else ""
        weight = "bold" if line.role == "ours" else "normal"
        names.append(Name(text, xs[-1], ys[-1], colour, weight))
    return names


def _apart(xs: Sequence[float]) -> list[float]:
    """Return the sizes whose labels do not touch; the last one always."""
    width = np.log(xs[-1] / xs[0])
    kept = [xs[-1]]
    for x in reversed(xs[:-1]):
        if np.log(kept[-1] / x) > 0.16 * width:
            kept.append(x)
    return kept[::-1]


def _along(line: Line) -> list[tuple[float, float]]:
    """Return points all along a line, which names should not cover."""
    logs = np.log(np.array(line.points))
    steps = np.linspace(logs[0, 0], logs[-1, 0], 40)
    return [(float(np.exp(x)), float(np.exp(np.interp(x, *logs.T)))) for x in steps]


def _cut(title: str) -> str:
    if len(title) <= _LONGEST_HEADING:
        return title
    ends = [title.rfind(sign, 0, _LONGEST_HEADING) for sign in (" (", ", ", ": ")]
    return title[: max(ends)] if max(ends) > 0 else f"{title[: _LONGEST_HEADING - 2].rstrip()} …"
