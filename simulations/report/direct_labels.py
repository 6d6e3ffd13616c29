"""Names beside what they name, where they cover neither each other nor the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.transforms import Bbox

# Where a name may stand, in points from what it names: nearest first, to the right before the left.
_SIDES = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
_DISTANCES = (7, 12, 18, 25, 33, 42)
_FAR = 14
_MARKER = 4.5


class Name(NamedTuple):
    """A text, where it belongs in data coordinates, and its colour."""

    text: str
    x: float
    y: float
    colour: str
    weight: str = "normal"


def place_names(
    axes: Axes,
    names: Sequence[Name],
    keep_clear: Sequence[tuple[float, float]],
    texts: Sequence[Text] = (),
    size: float = 8.5,
) -> None:
    """Write names beside their points.

    Each goes where it covers least, the first ones first; one that must stand far off gets a line
    to its point. The axes must have their final limits, and the figure a canvas.

    Parameters
    ----------
    axes : Axes
        Where to write.
    names : sequence of Name
        In order of importance.
    keep_clear : sequence of pairs of float
        Points, in data coordinates, that no name should cover.
    texts : sequence of Text
        What is written already.
    size : float
        Of the letters, in points.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    scale = figure.dpi / 72
    points = axes.transData.transform(np.reshape(list(keep_clear), (-1, 2)))
    frame = axes.get_window_extent(renderer)
    taken: list[Bbox] = [text.get_window_extent(renderer) for text in texts]
    for name in names:
        best: tuple[float, tuple[float, float], Bbox] | None = None
        probe = axes.text(0, 0, name.text, fontsize=size, fontweight=name.weight)
        extent = probe.get_window_extent(renderer)
        probe.remove()
        width, height = extent.width, extent.height
        at = axes.transData.transform((name.x, name.y))
        for distance in _DISTANCES:
            for dx, dy in _SIDES:
                shift = np.array([dx, dy * 0.9]) * distance * scale
                left = at[0] + shift[0] - (0 if dx > 0 else width if dx < 0 else width / 2)
                low = at[1] + shift[1] - height / 2
                box = Bbox.from_bounds(left, low, width, height)
                cost = _cost(box, taken, points, frame, _MARKER * scale) + distance
                line = _line_to(box, at)
                cost += 400 * sum(_inside(other, line).any() for other in taken)
                if best is None or cost < best[0]:
                    best = (cost, (left, low), box)
        assert best is not None
        _, (left, low), box = best
        taken.append(box)
        points = np.vstack([points, _line_to(box, at)])
        middle = np.array([box.x0 + width / 2, box.y0 + height / 2])
        gap = np.hypot(
            max(box.x0 - at[0], 0, at[0] - box.x1), max(box.y0 - at[1], 0, at[1] - box.y1)
        )
        axes.annotate(
            name.text,
            xy=(name.x, name.y),
            xytext=(middle - at) / scale,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            fontweight=name.weight,
            color=name.colour,
            annotation_clip=False,
            zorder=6,
            path_effects=[withStroke(linewidth=2.2, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": name.colour, "linewidth": 0.6}
            if gap > _FAR * scale
            else None,
        )


def _cost(
    box: Bbox, taken: Sequence[Bbox], points: np.ndarray, frame: Bbox, radius: float
) -> float:
    """Return how bad a place is: over other names and beyond the frame worst, over points less."""
    cost = 1e4 * sum(box.padded(2).overlaps(other) for other in taken)
    outside = max(frame.x0 - box.x0, box.x1 - frame.x1, frame.y0 - box.y0, box.y1 - frame.y1, 0)
    cost += 1e3 * outside
    wide = box.padded(radius)
    return float(cost) + 60 * int(_inside(wide, points).sum())


def _inside(box: Bbox, points: np.ndarray) -> np.ndarray:
    """Return which points lie in a box."""
    return np.asarray(np.all((points >= box.min) & (points <= box.max), axis=1))


def _line_to(box: Bbox, at: np.ndarray) -> np.ndarray:
    """Return points of the line from a mark to its name, the ends left out."""
    near = np.clip(at, box.min, box.max)
    return np.asarray(at + np.linspace(0.2, 0.9, 6)[:, None] * (near - at))
