"""Accuracy, or the error of numbers, against bytes sent and against rounds.

Methods with several evaluated rounds are curves, one-shot methods points, and the reference runs
level lines: they send nothing, and their score is true at every x.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from simulations.report.curves import MethodCurve, Point, end_point, method_curve
from simulations.report.figures import (
    DARK,
    Style,
    add_grid,
    draw_means,
    label_decades,
    new_figure,
    write_heading,
)
from simulations.report.summary import CEILING, Method, SettingSummary, tick_bytes

_REFERENCE_NOTES = {"global": "global (pooled data)", "local": "local (mean over nodes)"}
# What is on the y axis, by what runs are judged by: in the heading, and at the axis.
SCORE_NAMES = {
    "accuracy": ("Accuracy", "test accuracy"),
    "rmse": ("Error", "test error (root mean squared)"),
}
_MARKERS_PER_CURVE = 7
# Room to the left and right of the data on a logarithmic axis, as a factor.
_LOG_MARGIN = 1.6


def accuracy_figure(
    summary: SettingSummary, styles: Mapping[str, Style], by_bytes: bool
) -> Figure | None:
    """Draw how good each method is after how many bytes, or rounds.

    Parameters
    ----------
    summary : SettingSummary
        The methods to compare.
    styles : Mapping[str, Style]
        How each method that is no reference looks.
    by_bytes : bool
        Bytes (logarithmic) on the x axis; else rounds.

    Returns
    -------
    Figure | None
        None if there is nothing to draw but level lines.
    """
    levels = [method for method in summary.methods if _is_level(method, by_bytes)]
    others = [method for method in summary.methods if method not in levels]
    columns = _legend_columns(summary)
    figure = new_figure(4.1 + 0.24 * math.ceil(len(summary.methods) / columns))
    axes = figure.add_subplot()
    xs: list[float] = []
    has_spread = False
    for method in others:
        curve = method_curve(method)
        point = end_point(method)
        style = styles[method.name]
        if curve is not None:
            xs += _draw_curve(axes, method.name, curve, style, by_bytes)
            has_spread = has_spread or any(mean.sd for mean in curve.mean)
        elif point is not None:
            xs += _draw_point(axes, method.name, point, style, by_bytes)
            has_spread = has_spread or point.sd > 0
    if not xs:
        return None
    for method in levels:
        _draw_level(axes, method, styles.get(method.name))

    _fit_axes(axes, xs, by_bytes, is_share=summary.metric == "accuracy")
    name, label = SCORE_NAMES[summary.metric]
    title = f"{name} against {'bytes sent' if by_bytes else 'rounds'}"
    note = " (mean over seeds, ± 1 sd)" if has_spread else ""
    write_heading(axes, title, summary.setting.title + note)
    axes.set_xlabel("bytes sent so far, up + down (1 MB = 10⁶ bytes)" if by_bytes else "round")
    axes.set_ylabel(label)
    add_grid(axes)
    # Competitors in the order of the table, then the frame they stand in; matplotlib's own order
    # would be by kind of line.
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [method.name for method in others if method.name in handles]
    names += [name for name in handles if name not in names]
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=10,
        handlelength=2.6,
        columnspacing=1.4,
    )
    return figure


def _is_level(method: Method, by_bytes: bool) -> bool:
    # Zero has no place on a logarithmic axis, so a method that sends nothing is a level there too.
    return method.is_reference or (by_bytes and method.bytes_up + method.bytes_down == 0)


def _draw_curve(
    axes: Axes, name: str, curve: MethodCurve, style: Style, by_bytes: bool
) -> list[float]:
    """Draw mean, band and single seeds; return the x values."""
    mean = _visible(curve.mean, by_bytes)
    xs = [_x(point, by_bytes) for point in mean]
    ys = np.array([point.score for point in mean])
    sds = np.array([point.sd for point in mean])
    if sds.any():
        axes.fill_between(xs, ys - sds, ys + sds, color=style.colour, alpha=0.16, linewidth=0)
    axes.plot(
        xs,
        ys,
        label=name,
        color=style.colour,
        linestyle=style.line,
        linewidth=1.8,
        marker=style.marker,
        markersize=5,
        markevery=_marked_indices(len(xs)),
    )
    for single in curve.singles:
        points = _visible(single, by_bytes)
        single_xs = [_x(point, by_bytes) for point in points]
        scores = [point.score for point in points]
        axes.plot(single_xs, scores, color=style.colour, linewidth=0.8, alpha=0.6)
        xs += single_xs
    return xs


def _draw_point(axes: Axes, name: str, point: Point, style: Style, by_bytes: bool) -> list[float]:
    """Draw a one-shot method with its standard deviation; return the x value."""
    x = _x(point, by_bytes)
    draw_means(
        axes,
        [x],
        [point.score],
        [point.sd] if point.sd else None,
        colour=style.colour,
        marker=style.marker,
        label=name,
        line="none",
        size=9,
        cap=3.5,
        markeredgecolor="white",
        markeredgewidth=0.9,
        elinewidth=1.4,
        zorder=4,
    )
    return [x]


def _draw_level(axes: Axes, method: Method, style: Style | None) -> None:
    if method.score is None:
        return
    is_reference = style is None
    note = _REFERENCE_NOTES.get(method.name, method.name)
    axes.axhline(
        method.score.mean,
        label=note if is_reference else f"{method.name} (nothing sent)",
        color=DARK if style is None else style.colour,
        linestyle=(0, (6, 3)) if method.strategy == CEILING else (0, (1.5, 2)),
        linewidth=1.6,
        zorder=1.5,
    )


def _visible(points: Sequence[Point], by_bytes: bool) -> list[Point]:
    """Leave out what came before the first byte: a logarithmic axis has no zero."""
    return [point for point in points if not by_bytes or point.total_bytes > 0]


def _x(point: Point, by_bytes: bool) -> float:
    return point.total_bytes if by_bytes else point.round


def _marked_indices(count: int) -> list[int]:
    """Choose points to mark, counted from the end: that is the number in the table."""
    return list(range(count - 1, -1, -math.ceil(count / _MARKERS_PER_CURVE) or -1))


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


def _legend_columns(summary: SettingSummary) -> int:
    longest = max(len(_REFERENCE_NOTES.get(method.name, method.name)) for method in summary.methods)
    return 3 if longest <= 18 else 2 if longest <= 32 else 1
