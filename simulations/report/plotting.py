"""What all pictures share: canvas, styles, headings, lines with names beside their points.

Drawn through matplotlib's object interface on the Agg canvas, so that a report touches no global
state, needs no display and can be made from any thread. Colours are those of Okabe and Ito, which
stay apart under the common forms of colour blindness; markers and line styles repeat the
distinction for print and for more methods than colours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

LineStyle = str | tuple[int, tuple[float, ...]]

# Okabe and Ito's palette without yellow, which is not readable on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GRID = "#E5E5E5"
# What frames a comparison: references, the paper's numbers, lines at drifts.
SOFT, DARK = "#8A8A8A", "#5F5F5F"
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*", "h")
LINES: tuple[LineStyle, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
# Narrow enough that the text is still readable when a phone shows the image at its own width.
_WIDTH_INCHES = 6.4
_DOTS_PER_INCH = 160


@dataclass(frozen=True)
class Style:
    """How one method is drawn."""

    colour: str
    marker: str
    line: LineStyle = "-"


def style(index: int) -> Style:
    """Return the look of the method with this number: colours first, then lines."""
    return Style(
        COLOURS[index % len(COLOURS)],
        MARKERS[index % len(MARKERS)],
        LINES[index // len(COLOURS) % len(LINES)],
    )


def new_figure(height_inches: float, width: float = _WIDTH_INCHES) -> Figure:
    """Return an empty figure whose layout keeps labels and legends apart."""
    size = (width, height_inches)
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_heading(axes: Axes, title: str, subtitle: str) -> None:
    """Write a heading in two lines, so that a plot cut out of the report still says what it is."""
    axes.set_title(subtitle, loc="left", fontsize=9.5, color="#444444")
    axes.annotate(
        title,
        xy=(0, 1),
        xycoords="axes fraction",
        xytext=(0, 21),
        textcoords="offset points",
        fontsize=13,
        fontweight="bold",
        annotation_clip=False,
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(11)
    axes.tick_params(labelsize=10)
    hide_frame(axes)


def hide_frame(axes: Axes) -> None:
    """Take away the lines at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)


def add_grid(axes: Axes, axis: Literal["both", "x", "y"] = "both") -> None:
    """Draw a faint grid behind everything else."""
    axes.grid(True, which="major", axis=axis, color=GRID)
    axes.set_axisbelow(True)


def label_decades(axis: Axis, text: Callable[[float], str], subs: Sequence[float] = (1,)) -> None:
    """Label a logarithmic axis at the decades and their multiples by `subs`, in plain words."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


def legend_below(
    figure: Figure, columns: int = 3, *, first: Sequence[str] = (), **look: Any
) -> None:
    """Put one legend of all panels below them; labels of `first` come first."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) | handles
    names = [name for name in first if name in handles]
    names += [name for name in handles if name not in names]
    shown = [handles[name] for name in names]
    look = {"frameon": False, "fontsize": 10, **look}
    figure.legend(shown, names, loc="outside lower center", ncols=columns, **look)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; without matplotlib's version the same runs give the same bytes."""
    figure.savefig(path, format="png", facecolor="white", metadata={"Software": None})


# --- lines of runs, each run with its name beside it ----------------------------------------


class Mark(NamedTuple):
    """A run: where it stands, and what it is called."""

    x: float
    y: float
    name: str = ""


def draw_marks(
    axes: Axes,
    lines: Sequence[tuple[str, Style, Sequence[Mark]]],
    tick: Callable[[float], str],
) -> Callable[..., None]:
    """Draw a line through the marks of each family on a logarithmic x axis.

    Runs of a family, from the cheapest to the dearest, are a frontier that can be compared with
    another one. `tick` writes a number at the x axis. To be called when all else is on the figure:
    what is returned writes the names beside the marks, clear of given texts and points.
    """
    shown, clear = [], []
    for label, look, marks in lines:
        ordered = sorted(marks)
        xs, ys = [mark.x for mark in ordered], [mark.y for mark in ordered]
        size = 6.5 if len(marks) == 1 else 4.5
        edge = {"mec": "white", "mew": 0.6, "ms": size, "lw": 1.4}
        axes.plot(xs, ys, color=look.colour, marker=look.marker, ls=look.line, label=label, **edge)  # type: ignore[arg-type]
        shown += [Label(mark.name, mark.x, mark.y, look.colour) for mark in ordered if mark.name]
        clear += list(zip(xs, ys, strict=True))
        for (x0, y0, _), (x1, y1, _) in pairwise(ordered):
            steps = np.linspace(0, 1, 20)[1:-1]
            clear += [(float(x0 * (x1 / x0) ** t), float(y0 + t * (y1 - y0))) for t in steps]
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.16)
    label_decades(axes.xaxis, tick, subs=(1, 2, 5))
    add_grid(axes)

    def write_names(texts: Sequence[Text] = (), points: Sequence[tuple[float, float]] = ()) -> None:
        place_labels(axes, shown, [*clear, *points], texts)

    return write_names


class Label(NamedTuple):
    """A text, where it belongs in data coordinates, and its colour."""

    text: str
    x: float
    y: float
    colour: str


# Where a label may stand, in points from what it names: nearest first, right before left.
_SIDES = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
_DISTANCES = (7, 12, 18, 25, 33, 42)
# Beyond this distance a label has a line to what it names.
_FAR = 14


def place_labels(
    axes: Axes,
    labels: Sequence[Label],
    keep_clear: Sequence[tuple[float, float]],
    texts: Sequence[Text] = (),
    size: float = 8,
) -> None:
    """Write labels beside their points, each where it covers least, the first ones first.

    The axes must have their final limits. `keep_clear` are points in data coordinates that no
    label should cover, `texts` what is written already.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    scale = figure.dpi / 72
    points = axes.transData.transform(np.reshape(list(keep_clear), (-1, 2)))
    frame = axes.get_window_extent(renderer)
    taken: list[Bbox] = [text.get_window_extent(renderer) for text in texts]
    for label in labels:
        probe = axes.text(0, 0, label.text, fontsize=size)
        extent = probe.get_window_extent(renderer)
        probe.remove()
        width, height = extent.width, extent.height
        at = np.asarray(axes.transData.transform((label.x, label.y)))

        def box_at(dx: int, dy: int, distance: float) -> Bbox:
            shift = np.array([dx, dy * 0.9]) * distance * scale
            left = at[0] + shift[0] - width * (1 - dx) / 2  # noqa: B023 - used at once
            low = at[1] + shift[1] - height / 2  # noqa: B023
            return Bbox.from_bounds(left, low, width, height)  # noqa: B023

        def cost(box: Bbox, distance: float) -> float:
            beyond = (frame.x0 - box.x0, frame.y0 - box.y0, box.x1 - frame.x1, box.y1 - frame.y1)
            outside = max(0.0, *beyond)
            covered = int(_inside(box.padded(4.5 * scale), points).sum())  # noqa: B023
            crossed = sum(bool(_inside(other, _line_to(box, at)).any()) for other in taken)  # noqa: B023
            clashes = sum(box.padded(2).overlaps(other) for other in taken)
            return float(1e4 * clashes + 1e3 * outside + 400 * crossed + 60 * covered + distance)

        tried = [(box_at(*side, d), d) for d in _DISTANCES for side in _SIDES]
        box, _ = min(tried, key=lambda each: cost(*each))
        taken.append(box)
        points = np.vstack([points, _line_to(box, at)])
        gap = np.linalg.norm(np.clip(at, box.min, box.max) - at)
        axes.annotate(
            label.text,
            xy=(label.x, label.y),
            xytext=tuple((np.array([box.x0 + box.x1, box.y0 + box.y1]) / 2 - at) / scale),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            color=label.colour,
            annotation_clip=False,
            zorder=6,
            # Readable over a line of another family.
            path_effects=[withStroke(linewidth=2.2, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": label.colour, "linewidth": 0.6}
            if gap > _FAR * scale
            else None,
        )


def _inside(box: Bbox, points: np.ndarray) -> np.ndarray:
    return np.asarray(np.all((points >= box.min) & (points <= box.max), axis=1))


def _line_to(box: Bbox, at: np.ndarray) -> np.ndarray:
    """Return points of the line from a mark to its label, the ends left out."""
    near = np.clip(at, box.min, box.max)
    return np.asarray(at + np.linspace(0.2, 0.9, 6)[:, None] * (near - at))
