"""The frontier: how accurate a model is after how many bytes of a node, for all methods at once.

Bytes are logarithmic, and so are errors: from .90 to .99 is as far as from .00 to .90, because
it is where methods differ and where the last bytes go. Rounds are marks along a curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike

from simulations.report.byte_curves import ByteCurve, CurvePoint, marked_rounds
from simulations.report.direct_labels import Name, place_names
from simulations.report.figures import (
    COLOURS,
    DARK,
    SOFT,
    Style,
    add_grid,
    label_decades,
    new_figure,
    write_heading,
)
from simulations.report.summary import tick_bytes

_TICKS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
_ROOM = 1.9
_LEAST_ERROR = 1e-4
_WIDTH, _HEIGHT = 9.2, 6.2
# Ends of curves that are nearer than this, in points, are named together.
_SAME_END = 2.0


def family_styles(families: Sequence[str], rivals: Sequence[str]) -> dict[str, Style]:
    """Return a look for each family; what is compared with is grey, whatever its place.

    Parameters
    ----------
    families : sequence of str
        In the order of colours.
    rivals : sequence of str
        Those of them that are grey.
    """
    own = [family for family in families if family not in rivals]
    markers = ("o", "D", "^", "P", "s", "v", "X")
    styles = {
        family: Style(COLOURS[index % len(COLOURS)], markers[index % len(markers)], "-")
        for index, family in enumerate(own)
    }
    for index, family in enumerate(rivals):
        styles[family] = Style((DARK, SOFT)[index % 2], ("X", "s")[index % 2], "-")
    return styles


def draw_frontier(
    curves: Sequence[ByteCurve],
    ceilings: Mapping[str, float],
    styles: Mapping[str, Style],
    *,
    subtitle: str,
    title: str = "Accuracy against bytes",
) -> Figure:
    """Draw all methods.

    Parameters
    ----------
    curves : sequence of ByteCurve
        At least one.
    ceilings : mapping from str to float
        Accuracies of references that send raw data, as level lines, by what they are called.
    styles : mapping from str to Style
        A look for every family.
    title, subtitle : str
        What is shown, and for which data.
    """
    figure = new_figure(_HEIGHT, _WIDTH)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("function", functions=(_to_height, _from_height))
    for curve in curves:
        _draw(axes, curve, styles[curve.family])
    for index, level in enumerate(ceilings.values()):
        axes.axhline(
            level, color=DARK, linewidth=1.3, linestyle=((0, (6, 3)), (0, (2, 2)))[index % 2]
        )
    _fit(axes, curves, ceilings)
    add_grid(axes)
    write_heading(axes, title, subtitle)
    axes.set_xlabel("bytes that a node has sent (1 MB = 10⁶ bytes)")
    axes.set_ylabel("test accuracy")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9.5,
        handlelength=1.8,
        columnspacing=1.4,
    )
    _name_all(axes, curves, ceilings, styles)
    return figure


def _draw(axes: Axes, curve: ByteCurve, style: Style) -> None:
    known = set(axes.get_legend_handles_labels()[1])
    xs = [point.bytes_up for point in curve.points]
    ys = [point.accuracy for point in curve.points]
    is_short = len(xs) <= 10
    axes.plot(
        xs,
        ys,
        label=curve.family if curve.family not in known else "_",
        color=style.colour,
        linestyle=style.line,
        linewidth=1.7 if is_short else 1.2,
        marker=style.marker,
        markersize=6.5 if len(xs) == 1 else 4.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        markevery=marked_rounds(curve.points),
        zorder=4 if is_short else 3,
    )


def _fit(axes: Axes, curves: Sequence[ByteCurve], ceilings: Mapping[str, float]) -> None:
    xs = [point.bytes_up for curve in curves for point in curve.points]
    axes.set_xlim(min(xs) / _ROOM, max(xs) * _ROOM)
    label_decades(axes.xaxis, tick_bytes, subs=(1, 3))
    # Where curves end is of interest; where long ones begin only as far as the rest goes.
    ends = [curve.last.accuracy for curve in curves] + list(ceilings.values())
    low, high = _to_height(min(ends)), _to_height(max(ends))
    margin = 0.06 * (high - low) + 0.01
    axes.set_ylim(float(_from_height(low - margin)), float(_from_height(high + margin)))
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:.3g}".lstrip("0") or "0")
    )


def _name_all(
    axes: Axes,
    curves: Sequence[ByteCurve],
    ceilings: Mapping[str, float],
    styles: Mapping[str, Style],
) -> None:
    low, high = axes.get_ylim()
    clear = []
    for curve in curves:
        marked = set(marked_rounds(curve.points))
        step = max(1, len(curve.points) // 60)
        clear += [
            (point.bytes_up, point.accuracy)
            for index, point in enumerate(curve.points)
            if low <= point.accuracy <= high and (index in marked or index % step == 0)
        ]
    ends = np.geomspace(*axes.get_xlim(), 150)
    clear += [(x, level) for level in ceilings.values() for x in ends]
    names = [
        Name(text, last.bytes_up, last.accuracy, styles[family].colour)
        for text, family, last in _end_texts(axes, curves)
    ]
    levels = [
        axes.annotate(
            f"{text} {format_share(level)}",
            xy=(1, level),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-3, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            style="italic",
            color=DARK,
        )
        for text, level in ceilings.items()
    ]
    place_names(axes, names, clear, levels)


def _end_texts(axes: Axes, curves: Sequence[ByteCurve]) -> list[tuple[str, str, CurvePoint]]:
    """Return what is written at the ends of curves, best first; ends that coincide share a text."""
    shared: list[tuple[list[str], str, CurvePoint]] = []
    near = _SAME_END * axes.figure.dpi / 72
    for curve in sorted(curves, key=lambda curve: -curve.last.accuracy):
        at = axes.transData.transform(curve.last[1:])
        for names, family, last in shared:
            apart = np.hypot(*(axes.transData.transform(last[1:]) - at))
            if family == curve.family and apart < near:
                names.append(curve.name)
                break
        else:
            shared.append(([curve.name], curve.family, curve.last))
    return [
        (f"{', '.join(names)} {format_share(last.accuracy)}", family, last)
        for names, family, last in shared
    ]


def format_share(value: float) -> str:
    """Write an accuracy as ``.912``."""
    return f"{value:.3f}".lstrip("0")


def _to_height(accuracy: ArrayLike) -> np.ndarray:
    error = np.maximum(1 - np.asarray(accuracy, dtype=float), _LEAST_ERROR)
    return np.asarray(-np.log10(error))


def _from_height(height: ArrayLike) -> np.ndarray:
    return np.asarray(1 - 10.0 ** -np.asarray(height, dtype=float))
