"""All plots of a report, as PNG files.

Accuracy (or error) against bytes and against rounds; of runs on streams cumulative loss against
bytes (Kamp et al. 2018); how the labels are divided. One that would be empty is left
out.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from simulations.report.plotting import (
    DARK,
    Mark,
    Style,
    add_grid,
    draw_marks,
    label_decades,
    legend_below,
    new_figure,
    save,
    style,
    write_heading,
)
from simulations.report.runs import Run, Setting
from simulations.report.summary import CEILING, Method, Point, SettingSummary, tick_bytes

# What is on the y axis, by what runs are judged by: in the heading, and at the axis.
SCORE_NAMES = {
    "accuracy": ("Accuracy", "test accuracy"),
    "rmse": ("Error", "test error (root mean squared)"),
}
# Styles are given out in this order, so that a strategy looks alike in most reports.
_KNOWN = (
    *("fedavg", "one_shot_average", "ensemble", "gems", "gems_layerwise", "dynamic", "periodic"),
    *("nosync", "serial", "multi_model", "public_only", "merge"),
)
_REFERENCE_NOTES = {"global": "global (pooled data)", "local": "local (mean over nodes)"}
_MARKERS_PER_CURVE = 7
# Room to the left and right of the data on a logarithmic axis, as a factor.
_LOG_MARGIN = 1.6
# More families than these cannot be told apart.
_MOST_NAMED = 4


@dataclass(frozen=True)
class Plot:
    """A plot on disk."""

    path: Path
    title: str


def draw_plots(settings: Sequence[SettingSummary], folder: Path) -> dict[Setting, tuple[Plot, ...]]:
    """Draw the plots of every setting into a folder, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    styles = _styles(settings)
    plots: dict[Setting, tuple[Plot, ...]] = {}
    stems: list[str] = []
    for summary in settings:
        stem = re.sub(r"[^a-z0-9._]+", "-", summary.setting.title.lower()).strip("-.")
        # Two titles may differ only in characters that a file name should not have.
        stems.append(stem if stem not in stems else f"{stem}-{len(stems)}")
        drawn: list[Plot] = []
        for kind, title, draw in _kinds(summary, styles):
            figure = draw(summary)
            if figure is not None:
                path = folder / f"{stems[-1]}-{kind}.png"
                save(figure, path)
                drawn.append(Plot(path, title))
        plots[summary.setting] = tuple(drawn)
    return plots


# File, title, and what draws it.
_Kind = tuple[str, str, Callable[[SettingSummary], Figure | None]]


def _kinds(summary: SettingSummary, styles: Mapping[str, Style]) -> list[_Kind]:
    metric, (name, _) = summary.metric, SCORE_NAMES[summary.metric]
    by_bytes = partial(score_figure, styles=styles, by_bytes=True)
    by_rounds = partial(score_figure, styles=styles, by_bytes=False)
    return [
        (f"{metric}-bytes", f"{name} against bytes", by_bytes),
        (f"{metric}-rounds", f"{name} against rounds", by_rounds),
        ("frontier", "Cumulative loss against bytes", frontier_figure),
        ("labels", "Labels per node", labels_figure),
    ]


def _styles(settings: Sequence[SettingSummary]) -> dict[str, Style]:
    """Give each method that is no reference one look in the whole report."""
    methods = {
        (_KNOWN.index(method.strategy) if method.strategy in _KNOWN else len(_KNOWN), method.name)
        for summary in settings
        for method in summary.methods
        if not method.is_reference
    }
    return {name: style(index) for index, (_, name) in enumerate(sorted(methods))}


# --- accuracy, or the error of numbers ------------------------------------------------------


def score_figure(
    summary: SettingSummary, *, styles: Mapping[str, Style], by_bytes: bool
) -> Figure | None:
    """Draw how good each method is after how many bytes, or rounds.

    Methods with several evaluated rounds are curves, one-shot methods points, and references level
    lines; None if there are only level lines.
    """

    def is_level(method: Method) -> bool:
        # Zero has no place on a logarithmic axis, so what sends nothing is a level there too.
        return method.is_reference or (by_bytes and method.total_bytes == 0)

    figure = new_figure(4.1 + 0.24 * math.ceil(len(summary.methods) / 2))
    axes = figure.add_subplot()
    xs: list[float] = []
    for method in summary.methods:
        if not is_level(method):
            xs += _draw_method(axes, method, styles[method.name], by_bytes)
    if not xs:
        return None
    for method in filter(is_level, summary.methods):
        if method.score is not None:
            look = styles.get(method.name)
            note = _REFERENCE_NOTES.get(method.name, method.name)
            axes.axhline(
                method.score.mean,
                label=note if look is None else f"{method.name} (nothing sent)",
                color=DARK if look is None else look.colour,
                linestyle=(0, (6, 3)) if method.strategy == CEILING else (0, (1.5, 2)),
                linewidth=1.6,
                zorder=1.5,
            )
    _fit_axes(axes, xs, by_bytes, is_share=summary.metric == "accuracy")
    name, label = SCORE_NAMES[summary.metric]
    title = f"{name} against {'bytes sent' if by_bytes else 'rounds'}"
    has_seeds = any(method.seeds > 1 for method in summary.methods)
    note = " (mean over seeds, ± 1 sd)" if has_seeds else ""
    write_heading(axes, title, summary.setting.title + note)
    axes.set_xlabel("bytes sent so far, up + down (1 MB = 10⁶ bytes)" if by_bytes else "round")
    axes.set_ylabel(label)
    add_grid(axes)
    longest = max(len(_REFERENCE_NOTES.get(m.name, m.name)) for m in summary.methods)
    # Competitors in the order of the table, then the frame that they stand in.
    names = [method.name for method in summary.methods if not is_level(method)]
    legend_below(figure, 3 if longest <= 18 else 2 if longest <= 32 else 1, first=names)
    return figure


def _draw_method(axes: Axes, method: Method, look: Style, by_bytes: bool) -> list[float]:
    """Draw a curve with its band and single seeds, or a point; return the x values."""

    def x(point: Point) -> float:
        return point.total_bytes if by_bytes else point.round

    def visible(points: Sequence[Point]) -> list[Point]:
        return [point for point in points if not by_bytes or point.total_bytes > 0]

    if not method.mean_curve:
        point = method.end_point
        if point is None:
            return []
        axes.errorbar(
            x(point),
            point.score,
            yerr=point.sd or None,
            color=look.colour,
            marker=look.marker,
            label=method.name,
            ls="none",
            ms=9,
            capsize=3.5,
            mec="white",
            zorder=4,
        )
        return [x(point)]
    mean = visible(method.mean_curve)
    xs = [x(point) for point in mean]
    ys, sds = np.array([p.score for p in mean]), np.array([p.sd for p in mean])
    if sds.any():
        axes.fill_between(xs, ys - sds, ys + sds, color=look.colour, alpha=0.16, linewidth=0)
    # Counted from the end: the last one is the number in the table.
    marked = list(range(len(xs) - 1, -1, -max(1, math.ceil(len(xs) / _MARKERS_PER_CURVE))))
    axes.plot(
        *(xs, ys),
        label=method.name,
        color=look.colour,
        ls=look.line,
        lw=1.8,
        marker=look.marker,
        ms=5,
        markevery=marked,
    )
    if any(curve[-1].round > method.mean_curve[-1].round for curve in method.curves):
        for single in map(visible, method.curves):  # what seeds did beyond the mean
            own = [x(point) for point in single]
            axes.plot(own, [p.score for p in single], color=look.colour, lw=0.8, alpha=0.6)
            xs += own
    return xs


def _fit_axes(axes: Axes, xs: Sequence[float], by_bytes: bool, *, is_share: bool) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.02 if is_share else 0.0), min(high, 1.02) if is_share else high)
    first, last = min(xs), max(xs)
    if not by_bytes:
        end = max(last, 2)  # one-shot methods alone would stand on the right edge
        axes.set_xlim(-0.02 * end, end * 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        return
    axes.set_xscale("log")
    axes.set_xlim(first / _LOG_MARGIN, last * _LOG_MARGIN)
    decades = math.log10(last / first * _LOG_MARGIN**2)
    # Decades alone leave a short axis without a single label.
    label_decades(axes.xaxis, tick_bytes, subs=(1, 2, 5) if decades < 2.4 else (1,))


# --- streams: the loss on every batch before nodes learn from it, summed --------------------


def family_of(name: str) -> str:
    """Return a method's name without its setting: ``dynamic Δ=0.7`` is one of ``dynamic``."""
    return re.sub(r"\s+\S+=.*$", "", name)


def _complete(method: Method) -> list[Run]:
    return [run for run in method.runs if not math.isnan(run.cumulative_loss)]


def _loss_per_node(method: Method) -> float:
    runs = _complete(method)
    return sum(run.cumulative_loss / run.setting.nodes for run in runs) / len(runs)


def _families(summary: SettingSummary) -> dict[str, list[Method]]:
    families: dict[str, list[Method]] = {}
    for method in filter(_complete, summary.methods):
        families.setdefault(family_of(method.name), []).append(method)
    return {name: families[name] for name in sorted(families)}


def frontier_figure(summary: SettingSummary) -> Figure | None:
    """Draw the final loss of each protocol against its bytes; None for fewer than two."""
    lines: list[tuple[str, Style, list[Mark]]] = []
    for family, methods in _families(summary).items():
        marks = [
            Mark(m.total_bytes, _loss_per_node(m), m.name.removeprefix(family).strip())
            for m in methods
            if m.total_bytes > 0
        ]
        if marks:
            lines.append((family, style(len(lines)), marks))
    if sum(len(marks) for _, _, marks in lines) < 2:
        return None
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    axes.set_xlabel("bytes of the run, up + down (1 MB = 10⁶ bytes)")
    axes.set_ylabel("cumulative loss per node")
    write_heading(axes, "Cumulative loss against bytes", summary.setting.title)
    write_names = draw_marks(axes, lines, tick_bytes)
    legend_below(figure)
    if len(lines) <= _MOST_NAMED:
        write_names()
    return figure


# --- how the data are divided ---------------------------------------------------------------

# From light to dark blue; without the palest part, so that one example differs from none.
_COLOUR_MAP = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0.15, 1.0, 256)))
# Beyond these, names on the axes run into each other.
_MOST_NODE_NAMES, _MOST_CLASSES = 20, 30
# Characters of 9 points that fit side by side below the heat map.
_CHARACTERS_ALONG_AXIS = 60


def labels_figure(summary: SettingSummary) -> Figure | None:
    """Draw training examples by class (or range of numbers) and node."""
    if summary.division is None:
        return None
    seed, division = summary.division
    counts = np.array(division.train, dtype=float).T
    classes, nodes = counts.shape
    map_height = float(np.clip(0.3 * classes, 1.2, 9.0))
    figure = new_figure(map_height + 1.4)
    axes = figure.add_subplot()
    write_heading(
        axes, "Labels per node", f"{summary.setting.title}, training examples, seed {seed}"
    )
    largest = max(float(counts.max()), 1.0)
    # Masked, so that "none" is white and cannot be taken for "few".
    masked, norm = np.ma.masked_equal(counts, 0), Normalize(0, largest)
    image = axes.imshow(masked, cmap=_COLOUR_MAP, norm=norm, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05)
    bar.set_label(f"training examples per {'range' if division.edges else 'class'}", fontsize=10)
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    shown = range(0, nodes, -(-nodes // _MOST_NODE_NAMES))
    axes.set_xticks(shown, [division.names[index] for index in shown])
    if sum(len(division.names[index]) + 1 for index in shown) > _CHARACTERS_ALONG_AXIS:
        axes.tick_params(axis="x", labelrotation=90)
    rows = range(0, classes, -(-classes // _MOST_CLASSES))
    axes.set_yticks(rows)
    axes.tick_params(which="both", length=0, labelsize=9)
    axes.set_xlabel("node", fontsize=11)
    axes.set_ylabel("label" if division.edges else "class", fontsize=11)
    if division.edges:
        ranges = [f"{low:.2g} … {high:.2g}" for low, high in itertools.pairwise(division.edges)]
        axes.set_yticks(rows, [ranges[index] for index in rows])
        axes.invert_yaxis()  # larger numbers are higher up
    return figure
