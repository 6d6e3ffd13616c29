"""When a car is on the road, on a sideline, or has left: from the distances of its wheels.

A.4 counts how often the car "has touched the sideline", for how long it is on it, and the time
"before going off road". It does not say what of the car must be where. Here:

- it touches a sideline while the tread of at least one wheel reaches or passes it;
- it is off the road while the middles of all four wheels lie beyond;
- it has left the road when it is off for half a second without a break (ten metres at our speed);
  its time ends where that began. A shorter trip over the grass is time on the line.

Any road counts, also another stretch of the same track that lies close by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

WHEEL_HALF_WIDTH_M = 0.28
OFF_ROAD_SECONDS = 0.5


@dataclass(frozen=True)
class RoadTimes:
    """What A.4 measures of one drive.

    Parameters
    ----------
    on_road_seconds : float
        Until the car left the road, or the drive ended.
    crossings : int
        How often it began to touch a sideline in that time.
    on_line_seconds : float
        For how long it touched one in that time.
    left_at_step : int or None
        The first step off the road, if it left.
    """

    on_road_seconds: float
    crossings: int
    on_line_seconds: float
    left_at_step: int | None


def touches_sideline(wheel_distances_m: ArrayLike, half_width_m: float) -> NDArray[np.bool_]:
    """Return at which steps the tread of a wheel reaches a sideline or lies beyond.

    Parameters
    ----------
    wheel_distances_m : array_like of shape (..., 4)
        Of the middles of the wheels from the centre line, at least 0.
    half_width_m : float
        Of the road.
    """
    return np.asarray(np.max(wheel_distances_m, axis=-1) + WHEEL_HALF_WIDTH_M >= half_width_m)


def is_off_road(wheel_distances_m: ArrayLike, half_width_m: float) -> NDArray[np.bool_]:
    """Return at which steps all wheels are beyond the sidelines; see `touches_sideline`."""
    return np.asarray(np.min(wheel_distances_m, axis=-1) > half_width_m)


def touch_begins(touching: ArrayLike) -> NDArray[np.intp]:
    """Return the steps at which the car begins to touch a sideline."""
    now = np.asarray(touching, dtype=bool)
    return np.flatnonzero(now & ~np.concatenate([[False], now[:-1]]))


def first_lasting(flags: ArrayLike, steps: int) -> int | None:
    """Return where the first unbroken row of at least `steps` true flags begins; None if none."""
    lasted = 0
    for index, flag in enumerate(np.asarray(flags, dtype=bool)):
        lasted = lasted + 1 if flag else 0
        if lasted >= steps:
            return index + 1 - lasted
    return None


def off_road_steps(steps_per_second: float) -> int:
    """Return for how many steps a car has to be off the road to have left it."""
    return max(1, round(OFF_ROAD_SECONDS * steps_per_second))


def road_times(
    wheel_distances_m: NDArray[Any], half_width_m: float, steps_per_second: float
) -> RoadTimes:
    """Return what A.4 measures, from the wheels' distances at every step of a drive.

    Parameters
    ----------
    wheel_distances_m : ndarray of shape (steps, 4)
        See `touches_sideline`.
    half_width_m : float
        Of the road.
    steps_per_second : float
        Of the simulator.
    """
    off = is_off_road(wheel_distances_m, half_width_m)
    left = first_lasting(off, off_road_steps(steps_per_second))
    counted = touches_sideline(wheel_distances_m, half_width_m)[:left]
    return RoadTimes(
        on_road_seconds=len(counted) / steps_per_second,
        crossings=len(touch_begins(counted)),
        on_line_seconds=int(counted.sum()) / steps_per_second,
        left_at_step=left,
    )
