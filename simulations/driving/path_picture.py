"""A picture of where a car drove: its path over the road, and how far beside the middle it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from gems_flwr.disk.files import replacing
from simulations.driving.closed_loop import Journey
from simulations.driving.road import Road
from simulations.driving.sidelines import touch_begins, touches_sideline
from simulations.driving.simulator import STEPS_PER_SECOND
from simulations.report.figures import COLOURS, DARK, GRID, new_figure

_PATH, _TOUCH, _LEFT = COLOURS[0], COLOURS[4], COLOURS[1]
_ROAD = "#D0D0D0"
_INCHES_PER_TRACK = 5.0


def save_path_picture(path: Path, title: str, journeys: Sequence[Journey]) -> None:
    """Write a PNG with a column for every track.

    Parameters
    ----------
    path : Path
        The file.
    title : str
        Who drove.
    journeys : sequence of Journey
        At least one.
    """
    figure = new_figure(6.6, _INCHES_PER_TRACK * len(journeys))
    grid = figure.subplots(
        2, len(journeys), squeeze=False, gridspec_kw={"height_ratios": [3.2, 1.0]}
    )
    figure.suptitle(title, fontweight="bold")
    for number, journey in enumerate(journeys):
        begins = touch_begins(
            touches_sideline(journey.wheel_distances_m, journey.road.half_width_m)
        )
        _draw_map(grid[0, number], journey, begins, number)
        _draw_offsets(grid[1, number], journey, begins)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    for axes in grid[0, 1:]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles, labels = [*handles, handle], [*labels, label]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9
    )
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_map(axes: Axes, journey: Journey, begins: NDArray[np.intp], number: int) -> None:
    for ring in sidelines(journey.road):
        axes.plot(*ring.T, color=DARK, linewidth=0.5)
    left, right = sidelines(journey.road)
    outline = np.concatenate([left, right[::-1]])
    axes.fill(*outline.T, color=_ROAD, linewidth=0)
    axes.plot(*journey.positions.T, color=_PATH, linewidth=1.1, label="path of the car")
    ahead = journey.road.point_at(5.0) - journey.road.point_at(0.0)
    axes.plot(
        *journey.positions[0],
        # A triangle that points where the car goes.
        marker=(3, 0, float(np.degrees(np.arctan2(ahead[1], ahead[0]))) - 90),
        color="black",
        markersize=11,
        linestyle="none",
        label="start",
    )
    if len(begins):
        axes.plot(
            *journey.positions[begins].T,
            "o",
            color=_TOUCH,
            markeredgecolor="black",
            markersize=6,
            linestyle="none",
            label="touches a sideline",
        )
    if journey.ending != "all laps":
        axes.plot(
            *_end(journey),
            "X",
            color=_LEFT,
            markeredgecolor="black",
            markersize=11,
            linestyle="none",
            label="drive ends",
        )
    axes.set_aspect("equal")
    axes.set_axis_off()
    drive = journey.drive()
    axes.set_title(
        f"track {number}: {journey.ending} (laps: {journey.laps:.2f})\n"
        f"on the road {drive.on_road_seconds:.1f} s, crossings: {drive.crossings}, "
        f"on the line {drive.on_line_seconds:.1f} s",
        fontsize=10,
    )


def _draw_offsets(axes: Axes, journey: Journey, begins: NDArray[np.intp]) -> None:
    laps = journey.progress_m / journey.road.length_m
    half = journey.road.half_width_m
    axes.axhspan(-half, half, color=_ROAD, linewidth=0)
    axes.axhline(0, color="white", linewidth=0.8)
    axes.plot(laps, journey.offsets_m, color=_PATH, linewidth=1.0)
    axes.plot(laps[begins], journey.offsets_m[begins], "o", color=_TOUCH, markeredgecolor="black")
    if journey.ending != "all laps":
        last = _last_step(journey)
        axes.plot(laps[last], journey.offsets_m[last], "X", color=_LEFT, markeredgecolor="black")
    axes.set_ylim(half * 1.5, -half * 1.5)
    axes.set_xlim(0, 1.03 * max(float(laps.max()), 0.1))
    axes.set_xlabel("laps")
    axes.set_ylabel("left · right\nof the centre, m")
    axes.grid(color=GRID, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def sidelines(road: Road) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the left and the right sideline as closed rings of points, each shaped (n, 2)."""
    ahead = np.roll(road.points, -1, axis=0) - np.roll(road.points, 1, axis=0)
    ahead /= np.hypot(ahead[:, 0], ahead[:, 1])[:, None]
    right = np.stack([ahead[:, 1], -ahead[:, 0]], axis=1) * road.half_width_m
    rings = [
        np.concatenate([ring, ring[:1]]) for ring in (road.points - right, road.points + right)
    ]
    return rings[0], rings[1]


def _last_step(journey: Journey) -> int:
    """Return the step at which the counted time ends."""
    seconds = journey.drive().on_road_seconds
    return min(round(seconds * STEPS_PER_SECOND), len(journey.angles) - 1)


def _end(journey: Journey) -> NDArray[np.float64]:
    return np.asarray(journey.positions[_last_step(journey)])
