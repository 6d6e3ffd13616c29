"""How the training data are divided: a heat map of classes, or ranges of numbers, by nodes."""

import itertools
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from simulations.report.figures import GRID, new_figure, write_heading
from simulations.report.runs import Partition

# From light to dark blue; without the palest part, so that one example differs from none.
COLOUR_MAP = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0.15, 1.0, 256)))

# Beyond these, numbers in cells, names on the axes and lines between cells run into each other.
_MOST_NODES_WITH_NUMBERS = 12
_MOST_CLASSES_WITH_NUMBERS = 30
_MOST_NODE_NAMES = 20
_MOST_CLASS_NAMES = 30
_MOST_NODES_WITH_LINES = 60
# Characters of 9 points that fit side by side below the heat map.
_CHARACTERS_ALONG_AXIS = 60


def labels_figure(setting_title: str, seed: int, division: Partition) -> Figure:
    """Draw training examples by class and node, with the nodes' totals on top.

    Parameters
    ----------
    setting_title : str
        What the division belongs to.
    seed : int
        The seed of the run that the division was read from.
    division : Partition
        Counts of examples.

    Returns
    -------
    Figure
        The plot.
    """
    counts = np.array(division.train, dtype=float).T
    classes, nodes = counts.shape
    map_height = float(np.clip(0.3 * classes, 1.2, 9.0))
    figure = new_figure(map_height + 2.1)
    grid = figure.add_gridspec(2, 1, height_ratios=[0.7, map_height])
    total_axes = figure.add_subplot(grid[0])
    axes = figure.add_subplot(grid[1], sharex=total_axes)

    total_axes.bar(range(nodes), counts.sum(axis=0), color="#7A7A7A", width=0.8)
    total_axes.set_ylabel("total")
    total_axes.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
    write_heading(total_axes, "Labels per node", f"{setting_title}, training examples, seed {seed}")
    total_axes.tick_params(axis="x", which="both", bottom=False, labelbottom=False)

    largest = max(float(counts.max()), 1.0)
    image = axes.imshow(
        # Masked, so that "none" is white and cannot be taken for "few".
        np.ma.masked_equal(counts, 0),
        cmap=COLOUR_MAP,
        norm=Normalize(0, largest),
        aspect="auto",
        interpolation="nearest",
    )
    colour_bar = figure.colorbar(image, ax=[total_axes, axes], pad=0.02, fraction=0.05)
    each = "range" if division.edges else "class"
    colour_bar.set_label(f"training examples per {each}", fontsize=10)
    colour_bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    colour_bar.ax.tick_params(labelsize=9)
    if nodes <= _MOST_NODES_WITH_NUMBERS and classes <= _MOST_CLASSES_WITH_NUMBERS:
        _write_counts(axes, counts, largest)
    _label_axes(axes, division.names, classes)
    if division.edges:
        ranges = [f"{low:.2g} … {high:.2g}" for low, high in itertools.pairwise(division.edges)]
        shown = range(0, classes, -(-classes // _MOST_CLASS_NAMES))
        axes.set_yticks(shown, [ranges[index] for index in shown])
        axes.set_ylabel("label", fontsize=11)
        axes.invert_yaxis()  # larger numbers are higher up
    figure.align_ylabels([total_axes, axes])
    return figure


def _label_axes(axes: Axes, names: tuple[str, ...], classes: int) -> None:
    nodes = len(names)
    shown = range(0, nodes, -(-nodes // _MOST_NODE_NAMES))
    axes.set_xticks(shown, [names[index] for index in shown])
    if sum(len(names[index]) + 1 for index in shown) > _CHARACTERS_ALONG_AXIS:
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_yticks(range(0, classes, -(-classes // _MOST_CLASS_NAMES)))
    if nodes <= _MOST_NODES_WITH_LINES:
        axes.set_xticks(np.arange(-0.5, nodes), minor=True)
        axes.set_yticks(np.arange(-0.5, classes), minor=True)
        axes.grid(True, which="minor", color=GRID, linewidth=0.7)
    axes.tick_params(which="both", length=0, labelsize=9)
    axes.set_xlabel("node", fontsize=11)
    axes.set_ylabel("class", fontsize=11)


def _write_counts(axes: Axes, counts: NDArray[Any], largest: float) -> None:
    for row, column in np.argwhere(counts > 0):
        count = counts[row, column]
        axes.text(
            column,
            row,
            f"{count:.0f}",
            ha="center",
            va="center",
            fontsize=8.5,
            color="white" if count > 0.55 * largest else "black",
        )
