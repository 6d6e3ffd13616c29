"""Loss against bytes with compression: a colour per protocol, a marker per form of the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from simulations.report.direct_labels import Name, place_names
from simulations.report.figures import (
    COLOURS,
    DARK,
    MARKERS,
    add_grid,
    label_decades,
    new_figure,
    write_heading,
)
from simulations.report.frontiers import Point

# Points by protocol and form of the models.
Families = Mapping[tuple[str, str], Sequence[Point]]
_WIDTH, _HEIGHT = 7.6, 4.6
_LINES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))


def draw_compression(
    streams: Mapping[str, Families], losses: Mapping[str, str], *, subtitle: str
) -> Figure:
    """Draw a panel per stream, one below the other.

    Parameters
    ----------
    streams : mapping
        By title: bytes in MB, loss and option of every run, by protocol and form.
    losses : mapping from str to str
        What the loss of each stream is called.
    subtitle : str
        What holds for all of them.
    """
    figure = new_figure(_HEIGHT * len(streams) + 0.5, _WIDTH)
    panels = figure.subplots(len(streams), 1, squeeze=False).flat
    protocols = list(dict.fromkeys(p for each in streams.values() for p, _ in each))
    forms = list(dict.fromkeys(form for each in streams.values() for _, form in each))
    colours = {each: COLOURS[i % len(COLOURS)] for i, each in enumerate(protocols)}
    markers = {each: MARKERS[i % len(MARKERS)] for i, each in enumerate(forms)}
    lines = {each: _LINES[i % len(_LINES)] for i, each in enumerate(forms)}
    upper = [Line2D([], [], color=colours[each], lw=3, label=each) for each in protocols]
    lower = [
        Line2D([], [], color=DARK, marker=markers[each], ls=lines[each], label=each)
        for each in forms
    ]
    columns = max(len(upper), len(lower))
    nothing = Line2D([], [], lw=0, label=" ")
    rows = [row + [nothing] * (columns - len(row)) for row in (upper, lower)]
    figure.legend(
        # Legends are filled column by column.
        handles=[handle for pair in zip(*rows, strict=True) for handle in pair],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9.5,
    )
    shown = list(zip(panels, streams.items(), strict=True))
    for axes, (title, families) in shown:
        for (protocol, form), points in families.items():
            xs, ys, _ = zip(*sorted(points), strict=True)
            axes.plot(
                xs,
                ys,
                color=colours[protocol],
                marker=markers[form],
                ls=lines[form],
                lw=1.3,
                markersize=6,
                markeredgecolor="white",
                markeredgewidth=0.6,
            )
        axes.set_xscale("log")
        axes.margins(x=0.08, y=0.14)
        label_decades(axes.xaxis, lambda value: f"{value:,g}", subs=(1, 2, 5))
        add_grid(axes)
        axes.set_xlabel("MB in all, up + down")
        axes.set_ylabel(losses[title])
        write_heading(axes, f"Loss against bytes: {title}", subtitle)
    for axes, (_, families) in shown:
        _name(axes, families, colours)
    return figure


def _name(axes: Axes, families: Families, colours: Mapping[str, str]) -> None:
    """Write every run's option beside its mark; lines are kept clear, too."""
    names, clear = [], []
    for (protocol, _), points in families.items():
        ordered = sorted(points)
        names += [Name(option, x, y, colours[protocol]) for x, y, option in ordered]
        clear += [(x, y) for x, y, _ in ordered]
        for (x0, y0, _), (x1, y1, _) in pairwise(ordered):
            steps = np.linspace(0, 1, 20)[1:-1]
            clear += [(float(x0 * (x1 / x0) ** t), float(y0 + t * (y1 - y0))) for t in steps]
    place_names(axes, names, clear, size=8)
