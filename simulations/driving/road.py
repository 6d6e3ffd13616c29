"""The road as a closed line of points: where a car is along it, and how far beside it.

Metres are the simulator's unit of length. Offsets count to the right of the direction of travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gems_flwr.errors import OptionError

Points = NDArray[np.float64]


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
    points : array_like of shape (n, 2)
        The centre line in the direction of travel; the last point is joined to the first.
    half_width_m : float
        From the centre line to a sideline, above 0.

    Raises
    ------
    OptionError
        If that is no road.
    """

    points: Points
    half_width_m: float

    def __post_init__(self) -> None:
        points = np.asarray(self.points, dtype=np.float64)
        if points.ndim != 2 or points.shape[1] != 2 or len(points) < 3:
            raise OptionError(f"points: a road has at least 3 points (x, y), got {points.shape}")
        if not self.half_width_m > 0:
            raise OptionError(f"half_width_m must be above 0, got {self.half_width_m}")
        object.__setattr__(self, "points", points)

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

        Parameters
        ----------
        position : array_like of shape (2,)
            The point.
        near_m : float, optional
            Where it was shortly before. Only the road within `reach_m` of it is looked at, so that
            another stretch of road close by does not pass for progress.
        reach_m : float
            How far, along the road.
        """
        starts, lengths, steps = self._starts, self._lengths, self._steps
        away = np.asarray(position, dtype=np.float64) - self.points
        shares = np.clip((away * steps).sum(axis=1) / lengths**2, 0.0, 1.0)
        squared = ((away - shares[:, None] * steps) ** 2).sum(axis=1)
        if near_m is not None:
            half = self.length_m / 2
            apart = np.abs((starts + shares * lengths - near_m + half) % self.length_m - half)
            squared = np.where(apart <= reach_m, squared, np.inf)
        index = int(np.argmin(squared))
        step, rest = steps[index], away[index]
        # Right of the direction of travel: the cross product turns clockwise.
        right = rest[0] * step[1] - rest[1] * step[0]
        offset = float(np.sqrt(squared[index])) * (1.0 if right >= 0 else -1.0)
        along = float(starts[index] + shares[index] * lengths[index])
        return Place(along % self.length_m, offset)

    def distances(self, positions: Sequence[Any] | NDArray[Any]) -> Points:
        """Return how far points are from the nearest stretch of the centre line.

        Parameters
        ----------
        positions : array_like of shape (n, 2)
            The points.
        """
        away = np.asarray(positions, dtype=np.float64)[:, None] - self.points
        shares = np.clip((away * self._steps).sum(axis=2) / self._lengths**2, 0.0, 1.0)
        rest = away - shares[:, :, None] * self._steps
        return np.asarray(np.sqrt((rest**2).sum(axis=2).min(axis=1)))


def progress_m(before: float, now: float, length_m: float) -> float:
    """Return how far a car came between two places along a closed road, by the shorter way."""
    half = length_m / 2
    return (now - before + half) % length_m - half
