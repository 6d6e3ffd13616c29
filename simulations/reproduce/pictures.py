"""Pictures of findings: methods beside the paper's numbers, curves over x, loss against bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from simulations.report.plotting import (
    COLOURS,
    SOFT,
    Mark,
    add_grid,
    draw_marks,
    hide_frame,
    legend_below,
    new_figure,
    style,
    write_heading,
)
from simulations.reproduce.comparison import Line, compare
from simulations.reproduce.findings import Finding, Findings, Published
from simulations.reproduce.measures import BYTES, LOSS

_MOST_COLUMNS = 3
_WHOSE = ("ours ± sd over seeds", "the paper's")
# Protocols without messages to speak of, and what they are.
_QUIET = {"nosync": "without messages", "serial": "one learner with all data"}


def _grid(panels: Sequence[str], height: float) -> tuple[Figure, list[Axes]]:
    """Return axes for panels with their titles, at most three side by side."""
    columns = min(_MOST_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(0.9 + height * rows, 2.6 + 3.0 * columns)
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axes, title in zip(grid, panels, strict=False):
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.tick_params(labelsize=8.5)
        add_grid(axes)
        hide_frame(axes)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure, grid


def draw_methods(found: Findings, quantities: Sequence[str] = ()) -> Figure:
    """Draw a panel per setting: methods from top to bottom, ours and the paper's number.

    Of several quantities the first of each setting is drawn, or the first of `quantities`.
    """
    panels: dict[str, list[Line]] = {}
    for line in compare(found):
        own = panels.setdefault(line.finding.setting, [])
        wanted = {own[0].finding.quantity} if own else {*quantities} or {line.finding.quantity}
        if line.finding.quantity in wanted:
            own.append(line)
    panels = {name: own for name, own in panels.items() if any(x.finding.values for x in own)}
    methods = list(dict.fromkeys(x.finding.method for own in panels.values() for x in own))
    places = {method: -index for index, method in enumerate(methods)}
    figure, grid = _grid([*panels], 0.5 + 0.24 * len(methods))
    for axes, own in zip(grid, panels.values(), strict=False):
        ours = [line.finding for line in own if line.finding.values]
        theirs: list[tuple[Finding, Finding | Published]] = [
            (line.finding, line.published) for line in own if line.published is not None
        ]
        looks: list[tuple[list[tuple[Finding, Finding | Published]], float, dict[str, Any]]] = [
            ([(f, f) for f in ours], 0.0, {"color": COLOURS[0], "marker": "o", "ms": 5}),
            (theirs, -0.22, {"color": SOFT, "marker": "D", "ms": 4}),
        ]
        for label, (values, shift, look) in zip(_WHOSE, looks, strict=True):
            if values:
                axes.errorbar(
                    [number.mean for _, number in values],
                    [places[each.method] + shift for each, _ in values],
                    xerr=[number.sd or 0.0 for _, number in values],
                    **{**look, "ls": "none", "capsize": 2, "label": label},
                )
        axes.set_yticks([*places.values()], [*places])
        axes.set_xlabel(own[0].finding.quantity, fontsize=9)
    legend_below(figure, 2)
    return figure


def draw_curves(found: Findings, quantity: str, *, log: bool = False) -> Figure:
    """Draw what ends in a quantity against x: a panel per setting, a line per method."""
    panels: dict[str, dict[str, list[Finding]]] = {}
    for each in found.findings:
        if each.quantity.endswith(quantity) and each.x is not None and each.values:
            # The setting without its x: ``γ = …``.
            title = f"{each.setting.rpartition(f'{each.x:g}')[0]}…"
            title += each.setting.rpartition(f"{each.x:g}")[2]
            panels.setdefault(title, {}).setdefault(each.method, []).append(each)
    methods = list(dict.fromkeys(method for own in panels.values() for method in own))
    figure, grid = _grid([*panels], 2.8)
    for axes, (title, lines) in zip(grid, panels.items(), strict=False):
        for method, own in lines.items():
            look, own = style(methods.index(method)), sorted(own, key=lambda each: each.x or 0.0)
            axes.errorbar(
                [each.x or 0.0 for each in own],
                [each.mean for each in own],
                yerr=[each.sd or 0.0 for each in own],
                color=look.colour,
                marker=look.marker,
                ls=look.line,
                ms=4,
                capsize=2,
                lw=1.4,
                label=method,
            )
        if log:
            axes.set_xscale("log")
            shown = sorted({each.x or 0.0 for own in lines.values() for each in own})
            axes.set_xticks(shown, [f"{x:g}" for x in shown])
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(title.split(", ")[-1], fontsize=9)
    grid[0].set_ylabel(quantity)
    legend_below(figure, 3, fontsize=9)
    return figure


def family_of(method: str) -> tuple[str, str]:
    """Return ``dynamic, total`` and ``Δ = 0.3`` of ``total, Δ = 0.3``."""
    rest, _, option = method.rpartition(", ")
    kind = {"b": "periodic", "Δ": "dynamic"}.get(option.partition(" = ")[0], "")
    return ", ".join(filter(None, [kind, rest])) or option, option


def draw_frontier(found: Findings) -> Figure:
    """Draw loss against bytes, a line per family of protocols and a panel per setting."""
    settings = [s for s in found.settings() if any(e.setting == s for e in found.of(LOSS))]
    figure = new_figure(0.6 + 4.2 * len(settings), 7.2)
    panels = figure.subplots(len(settings), 1, squeeze=False).flat
    pairs = zip(panels, settings, strict=True)
    for write_names in [_draw_families(axes, found, setting) for axes, setting in pairs]:
        write_names()
    return figure


def _draw_families(axes: Axes, found: Findings, setting: str) -> Callable[[], None]:
    lines: dict[str, list[Mark]] = {}
    beside = [setting]
    for loss in found.of(LOSS):
        sent = found.get(setting, loss.method, BYTES)
        if loss.setting != setting or not loss.values:
            continue
        if loss.method in _QUIET:
            beside.append(f"{_QUIET[loss.method]}: {loss.mean:.3g}")
        elif sent is not None:
            family, option = family_of(loss.method)
            lines.setdefault(family, []).append(Mark(sent.mean, loss.mean, option))
    axes.set_xlabel("MB in all, up + down")
    axes.set_ylabel("cumulative loss per learner")
    write_heading(axes, "Loss against bytes", "; ".join(beside))
    looks = [(name, style(index), marks) for index, (name, marks) in enumerate(lines.items())]
    write_names = draw_marks(axes, looks, lambda value: f"{value:,g}")
    axes.legend(fontsize=8.5, frameon=False)
    return write_names
