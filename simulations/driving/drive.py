"""Drivers behind the wheel: what they see decides how they steer, and that what they see next.

The speed is held for all by the same controller (A.4: "driven with a constant speed"). A drive ends
after the last lap, when the car has left the road (`simulations.driving.road`), or when it has come
no farther for five seconds: a car that circles or turns back is a crash, and its time ends where it
was farthest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simulations.driving.controller import CarState, hold_speed
from simulations.driving.loss import Drive
from simulations.driving.road import (
    Place,
    Road,
    is_off_road,
    measure_drive,
    off_road_steps,
    progress_m,
)
from simulations.driving.simulator import STEPS_PER_SECOND, Image, Simulator

STUCK_SECONDS = 5.0
Ending = Literal["all laps", "left the road", "stuck"]


@dataclass(frozen=True, eq=False)
class Moment:
    """What there is to steer by: the camera's image, and what only the controller looks at."""

    image: Image
    state: CarState
    road: Road
    place: Place


@dataclass(frozen=True, eq=False)
class Journey:
    """One drive, step by step: metres along the line, and the wheels' distances from it."""

    road: Road
    ending: Ending
    progress_m: NDArray[np.float64]
    wheel_distances_m: NDArray[np.float64]

    @property
    def laps(self) -> float:
        """Laps driven."""
        return float(self.progress_m.max()) / self.road.length_m

    def drive(self) -> Drive:
        """Return what A.4 counts of it: of a car that was stuck until it was farthest."""
        is_stuck, is_finished = self.ending == "stuck", self.ending == "all laps"
        wheels = self.wheel_distances_m[: int(np.argmax(self.progress_m)) + 1 if is_stuck else None]
        return measure_drive(wheels, self.road.half_width_m, STEPS_PER_SECOND, is_finished)


def drive_track(driver: Callable[[Moment], float], track_seed: int, *, laps: int = 2) -> Journey:
    """Let a driver drive until it ends.

    Parameters
    ----------
    driver : callable
        From what there is to see to an angle in [-1, 1], a share of full lock. Beyond, it is full
        lock; an angle that is no number is 0.
    track_seed : int
        Which track; see `simulations.driving.recording.unseen_track_seed`.
    laps : int
        At least 1.
    """
    rows: list[tuple[float, ...]] = []
    ending: Ending | None = None
    farthest, farthest_step, off_steps, total = 0.0, 0, 0, 0.0
    with Simulator(track_seed) as simulator:
        road, along_m = simulator.road, 0.0
        while ending is None:
            state, step = simulator.state, len(rows)
            place = road.locate(state.position, near_m=along_m)
            total += progress_m(along_m, place.along_m, road.length_m)
            along_m = place.along_m
            angle = driver(Moment(simulator.image, state, road, place))
            angle = min(max(float(angle), -1.0), 1.0) if np.isfinite(angle) else 0.0
            wheels = road.distances(state.wheels)
            rows.append((total, *wheels))
            off_steps = off_steps + 1 if is_off_road(wheels, road.half_width_m) else 0
            if total > farthest:
                farthest, farthest_step = total, step
            if total >= laps * road.length_m:
                ending = "all laps"
            elif off_steps >= off_road_steps(STEPS_PER_SECOND):
                ending = "left the road"
            elif step - farthest_step >= STUCK_SECONDS * STEPS_PER_SECOND:
                ending = "stuck"
            else:
                simulator.step(angle, *hold_speed(state.speed_m_per_s))
    table = np.array(rows)
    return Journey(road, ending, table[:, 0], table[:, 1:])
