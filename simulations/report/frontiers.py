"""What a byte buys: loss against bytes, one line per family of protocols.

A protocol that talks less loses more, so single runs say little; a family's runs, from the quietest
to the most talkative, are a frontier that can be compared with another one.
"""

from collections.abc import Callable, Container, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from simulations.report.figures import COLOURS, MARKERS, add_grid, label_decades

# Bytes, loss, and the name of a run.
Point = tuple[float, float, str]
_LONGEST_NAME = 24  # characters
# Side and distance of the labels of a family's points: frontiers often lie on each other.
_LABELS = ((1, 4), (-1, -5), (-1, -16), (1, 15))


def draw_frontiers(
    axes: Axes,
    families: Mapping[str, Sequence[Point]],
    tick: Callable[[float], str],
    *,
    left_out: Container[str] = (),
    with_names: bool = True,
) -> None:
    """Draw every family's line on a logarithmic axis of bytes, with the runs' names at the points.

    Parameters
    ----------
    axes : Axes
        Where to draw.
    families : mapping
        Points by family; its order gives the colours.
    tick : callable
        Writes a number of bytes.
    left_out : container of str
        Families that keep their colour but are drawn otherwise, by the caller.
    with_names : bool
        Whether points have names, which many families leave no room for.
    """
    for index, (family, points) in enumerate(families.items()):
        if family in left_out:
            continue
        colour = COLOURS[index % len(COLOURS)]
        xs, ys, names = zip(*sorted(points), strict=True)
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(xs, ys, color=colour, marker=marker, markersize=5, label=family)
        side, away = _LABELS[index % len(_LABELS)]
        for x, y, name in zip(xs, ys, names if with_names else (), strict=with_names):
            axes.annotate(
                _short(name.removeprefix(family).strip(", ")),
                (x, y),
                xytext=(3 * side, away),
                ha="left" if side > 0 else "right",
                va="bottom" if away > 0 else "top",
                textcoords="offset points",
                fontsize=7,
                color=colour,
                # Readable over the line or the marker of another family.
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
                zorder=5,
            )
    axes.set_xscale("log")
    axes.margins(x=0.14, y=0.2)  # room for what stands beside the points
    label_decades(axes.xaxis, tick, subs=(1, 2, 5))
    add_grid(axes)


def _short(name: str) -> str:
    """Leave out what would run over the edge: the first option tells most."""
    return name if len(name) <= _LONGEST_NAME else name.split()[0]
