"""What all plots share: the canvas, the headings, and how a method looks.

Drawn through matplotlib's object interface on the Agg canvas, so that a report touches no global
state, needs no display and can be made from any thread. Colours are those of Okabe and Ito, which
stay apart under the common forms of colour blindness; markers and line styles repeat the
distinction for print and for more methods than colours.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

LineStyle = str | tuple[int, tuple[float, ...]]

# Okabe and Ito's palette without yellow, which is not readable on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GRID = "#E5E5E5"
# What frames a comparison: references, the paper's numbers, lines at drifts.
SOFT = "#8A8A8A"
DARK = "#5F5F5F"
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*", "h")
_LINES: tuple[LineStyle, ...] = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)))

# Narrow enough that the text is still readable when a phone shows the image at its own width.
_WIDTH_INCHES = 6.4
_DOTS_PER_INCH = 160


@dataclass(frozen=True)
class Style:
    """How one method is drawn."""

    colour: str
    marker: str
    line: LineStyle


def style(index: int) -> Style:
    """Return the look of the method with this number: colours first, then lines."""
    return Style(
        COLOURS[index % len(COLOURS)],
        MARKERS[index % len(MARKERS)],
        _LINES[index // len(COLOURS) % len(_LINES)],
    )


def new_figure(height_inches: float, width: float = _WIDTH_INCHES) -> Figure:
    """Make an empty figure, by default of the report's common width.

    Parameters
    ----------
    height_inches : float
        Its height.
    width : float
        Its width in inches, where panels stand side by side.

    Returns
    -------
    Figure
        On the Agg canvas, with a layout that keeps labels and legends apart.
    """
    size = (width, height_inches)
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_heading(axes: Axes, title: str, subtitle: str) -> None:
    """Write a heading in two lines, so that a plot cut out of the report still says what it is.

    Parameters
    ----------
    axes : Axes
        The topmost axes of the figure.
    title, subtitle : str
        What is shown, and for which runs.
    """
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
    axes.xaxis.label.set_fontsize(11)
    axes.yaxis.label.set_fontsize(11)
    axes.tick_params(labelsize=10)
    hide_frame(axes)


def add_grid(axes: Axes, axis: Literal["both", "x", "y"] = "both") -> None:
    """Draw a faint grid behind everything else."""
    axes.grid(True, which="major", axis=axis, color=GRID)
    axes.set_axisbelow(True)


def draw_means(
    axes: Axes,
    xs: Sequence[float],
    ys: Sequence[float],
    sds: Sequence[float] | None,
    *,
    colour: str,
    marker: str,
    label: str,
    line: LineStyle = "-",
    size: float = 5,
    cap: float = 2,
    along_x: bool = False,
    **look: Any,
) -> None:
    """Draw means with their standard deviations as error bars.

    Parameters
    ----------
    axes : Axes
        Where to draw.
    xs, ys, sds : sequence of float
        Points, and a deviation for each, or none at all.
    colour, marker, label, line, size, cap
        How they look, and what the legend says; sizes of markers and caps in points.
    along_x : bool
        Whether the deviations are those of x.
    **look
        Anything else that matplotlib's `errorbar` takes.
    """
    axes.errorbar(
        xs,
        ys,
        xerr=sds if along_x else None,
        yerr=None if along_x else sds,
        color=colour,
        marker=marker,
        markersize=size,
        linestyle=line,
        capsize=cap,
        label=label,
        **look,
    )


def mark_drifts(axes: Axes, drifts: Iterable[int]) -> None:
    """Draw a dashed line at every round in which the concept changed."""
    for drift in sorted(set(drifts)):
        axes.axvline(drift, color=DARK, linestyle=(0, (4, 2)), linewidth=1.0, zorder=0)


def label_decades(axis: Axis, text: Callable[[float], str], subs: Sequence[float] = (1,)) -> None:
    """Label a logarithmic axis at the decades and their multiples by `subs`, in plain words."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, axes: Axes | None = None, columns: int = 3, **look: Any) -> None:
    """Put one legend below all panels: that of the whole figure, or of one of them."""
    handles = () if axes is None else axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=columns, frameon=False, **look)


def hide_frame(axes: Axes) -> None:
    """Take away the lines at the top and on the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG.

    Parameters
    ----------
    figure : Figure
        What to write.
    path : Path
        The file; overwritten.
    """
    # Without matplotlib's version in it, the same runs give the same bytes.
    figure.savefig(path, format="png", facecolor="white", metadata={"Software": None})
