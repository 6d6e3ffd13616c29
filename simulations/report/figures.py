"""What all plots share: the canvas, the headings, and how a method looks.

Drawn through matplotlib's object interface on the Agg canvas, so that a report touches no global
state, needs no display and can be made from any thread. Colours are those of Okabe and Ito, which
stay apart under the common forms of colour blindness; markers and line styles repeat the
distinction for print and for more methods than colours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from simulations.report.summary import SettingSummary

LineStyle = str | tuple[int, tuple[float, ...]]

# Okabe and Ito's palette without yellow, which is not readable on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GRID = "#E5E5E5"
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*", "h")
_LINES: tuple[LineStyle, ...] = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)))

# Styles are given out in this order, so that a strategy looks alike in most reports.
_KNOWN = (
    "fedavg",
    "one_shot_average",
    "ensemble",
    "gems",
    "gems_layerwise",
    "dynamic",
    "periodic",
    "nosync",
    "serial",
    "multi_model",
    "public_only",
    "merge",
)

# Narrow enough that the text is still readable when a phone shows the image at its own width.
_WIDTH_INCHES = 6.4
_DOTS_PER_INCH = 160


@dataclass(frozen=True)
class Style:
    """How one method is drawn."""

    colour: str
    marker: str
    line: LineStyle


def assign_styles(settings: Sequence[SettingSummary]) -> dict[str, Style]:
    """Give each method one look in the whole report.

    Parameters
    ----------
    settings : Sequence[SettingSummary]
        Everything that will be drawn.

    Returns
    -------
    dict[str, Style]
        By the method's name; reference runs have none.
    """
    methods = {
        (_KNOWN.index(method.strategy) if method.strategy in _KNOWN else len(_KNOWN), method.name)
        for summary in settings
        for method in summary.methods
        if not method.is_reference
    }
    return {
        name: Style(
            COLOURS[index % len(COLOURS)],
            MARKERS[index % len(MARKERS)],
            _LINES[index // len(COLOURS) % len(_LINES)],
        )
        for index, (_, name) in enumerate(sorted(methods))
    }


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
