"""The road as a closed line of points, and what of a drive counts: when a car touches or leaves it.

Metres are the simulator's unit of length. Offsets count to the right of the direction of travel.

A.4 counts how often the car "has touched the sideline", for how long it is on it, and the time
"before going off road". It does not say what of the car must be where. Here:

- it touches a sideline while the tread of at least one wheel reaches or passes it;
- it is off the road while the middles of all four wheels lie beyond;
- it has left the road when it is off for half a second without a break (ten metres at our speed);
  its time ends where that began. A shorter trip over the grass is time on the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulations.driving.loss import Drive

Points = NDArray[np.float64]
WHEEL_HALF_WIDTH_M = 0.28
OFF_ROAD_SECONDS = 0.5


@dataclass(frozen=True)
class Place:
    """Where something is on the road.

    Parameters
    ----------
    along_m : float
        How far along the centre line, from its first point, in [0, length).
    offset_m : float
        How far to the right of it; negative: to the left.
    """

    along_m: float
    offset_m: float


@dataclass(frozen=True, eq=False)
class Road:
    """A closed road of constant width.

    Parameters
    ----------
    points : array of shape (n, 2)
        The centre line in the direction of travel; the last point is joined to the first.
    half_width_m : float
        From the centre line to a sideline, above 0.
    """

    points: Points
    half_width_m: float

    @cached_property
    def _steps(self) -> Points:
        return np.roll(self.points, -1, axis=0) - self.points

    @cached_property
    def _lengths(self) -> Points:
        return np.asarray(np.hypot(self._steps[:, 0], self._steps[:, 1]))

    @cached_property
    def _starts(self) -> Points:
        """How far along the line each point lies."""
        return np.concatenate([[0.0], np.cumsum(self._lengths)[:-1]])

    @cached_property
    def length_m(self) -> float:
        """Length of a lap."""
        return float(self._lengths.sum())

    def reversed(self) -> Road:
        """Return the road in the other direction, from the same first point."""
        return Road(np.roll(self.points[::-1], 1, axis=0), self.half_width_m)

    def point_at(self, along_m: float) -> Points:
        """Return a point of the centre line; any number of laps may be in `along_m`."""
        along = along_m % self.length_m
        index = int(np.searchsorted(self._starts, along, side="right")) - 1
        share = (along - self._starts[index]) / self._lengths[index]
        return np.asarray(self.points[index] + share * self._steps[index])

    def locate(
        self, position: ArrayLike, *, near_m: float | None = None, reach_m: float = 20.0
    ) -> Place:
        """Return the place on the centre line that is nearest to a point.

        With `near_m`, where it was shortly before, only the road within `reach_m` of that is looked
        at, so that another stretch of road close by does not pass for progress.
        """
        away = np.asarray(position, dtype=np.float64) - self.points
        shares = np.clip((away * self._steps).sum(axis=1) / self._lengths**2, 0.0, 1.0)
        squared = ((away - shares[:, None] * self._steps) ** 2).sum(axis=1)
        alongs = self._starts + shares * self._lengths
        if near_m is not None:
            half = self.length_m / 2
            apart = np.abs((alongs - near_m + half) % self.length_m - half)
            squared = np.where(apart <= reach_m, squared, np.inf)
        index = int(np.argmin(squared))
        step, rest = self._steps[index], away[index]
        # Right of the direction of travel: the cross product turns clockwise.
        right = rest[0] * step[1] - rest[1] * step[0]
        offset = float(np.sqrt(squared[index])) * (1.0 if right >= 0 else -1.0)
        return Place(float(alongs[index]) % self.length_m, offset)

    def distances(self, positions: Sequence[Any] | NDArray[Any]) -> Points:
        """Return how far points, shaped (n, 2), are from the nearest stretch of the line."""
        away = np.asarray(positions, dtype=np.float64)[:, None] - self.points
        shares = np.clip((away * self._steps).sum(axis=2) / self._lengths**2, 0.0, 1.0)
        rest = away - shares[:, :, None] * self._steps
        return np.asarray(np.sqrt((rest**2).sum(axis=2).min(axis=1)))


def progress_m(before: float, now: float, length_m: float) -> float:
    """Return how far a car came between two places along a closed road, by the shorter way."""
    half = length_m / 2
    return (now - before + half) % length_m - half


# --- what A.4 measures, from the wheels' distances at every step ------------------------------


def touches_sideline(wheel_distances_m: ArrayLike, half_width_m: float) -> NDArray[np.bool_]:
    """Return at which steps the tread of a wheel, (..., 4), reaches a sideline or lies beyond."""
    return np.asarray(np.max(wheel_distances_m, axis=-1) + WHEEL_HALF_WIDTH_M >= half_width_m)


def is_off_road(wheel_distances_m: ArrayLike, half_width_m: float) -> NDArray[np.bool_]:
    """Return at which steps all wheels, (..., 4), are beyond the sidelines."""
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


def measure_drive(
    wheel_distances_m: NDArray[Any],
    half_width_m: float,
    steps_per_second: float,
    is_finished: bool = False,
) -> Drive:
    """Return what A.4 measures, from distances shaped (steps, 4)."""
    off = is_off_road(wheel_distances_m, half_width_m)
    left = first_lasting(off, off_road_steps(steps_per_second))
    counted = touches_sideline(wheel_distances_m, half_width_m)[:left]
    return Drive(
        on_road_seconds=len(counted) / steps_per_second,
        crossings=len(touch_begins(counted)),
        on_line_seconds=int(counted.sum()) / steps_per_second,
        is_finished=is_finished,
    )
