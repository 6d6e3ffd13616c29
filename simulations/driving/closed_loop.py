"""A driver behind the wheel: what it sees decides how it steers, and that what it sees next.

The speed is held for everybody by the same controller (A.4: "driven with a constant speed"). A
drive ends after the last lap, when the car has left the road (`simulations.driving.sidelines`), or
when it has come no farther for five seconds: a car that circles or turns back is a crash, and its
time ends where it was farthest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulations.driving.driving_loss import Drive
from simulations.driving.expert import SPEED_M_PER_S, CarState, hold_speed, pursue
from simulations.driving.road import Place, Road, progress_m
from simulations.driving.sidelines import is_off_road, off_road_steps, road_times
from simulations.driving.simulator import STEPS_PER_SECOND, Image, Simulator

STUCK_SECONDS = 5.0
Ending = Literal["all laps", "left the road", "stuck"]
Steer = Callable[[Image], float]


@dataclass(frozen=True, eq=False)
class Moment:
    """What there is to steer by: the camera's image, and what only the controller looks at."""

    image: Image
    state: CarState
    road: Road
    place: Place


Driver = Callable[[Moment], float]


def by_image(steer: Steer) -> Driver:
    """Return the driver that sees nothing but the camera's image."""
    return lambda moment: steer(moment.image)


def expert(moment: Moment) -> float:
    """Drive as recordings are driven, without disturbances: the ceiling."""
    return pursue(moment.state, moment.road, moment.place)


def straight(moment: Moment) -> float:
    """Never steer: the floor."""
    return 0.0


@dataclass(frozen=True, eq=False)
class Journey:
    """One drive, step by step.

    Parameters
    ----------
    road : Road
        In the direction of travel.
    ending : str
        Why it ended.
    positions : ndarray of shape (steps, 2)
        The middle of the car.
    offsets_m : ndarray of shape (steps,)
        To the right of the centre line.
    progress_m : ndarray of shape (steps,)
        Along the centre line since the start, over all laps.
    wheel_distances_m : ndarray of shape (steps, 4)
        From the nearest stretch of the centre line.
    angles : ndarray of shape (steps,)
        How it was steered.
    """

    road: Road
    ending: Ending
    positions: NDArray[np.float64]
    offsets_m: NDArray[np.float64]
    progress_m: NDArray[np.float64]
    wheel_distances_m: NDArray[np.float64]
    angles: NDArray[np.float64]

    @property
    def laps(self) -> float:
        """Laps driven."""
        return float(self.progress_m.max()) / self.road.length_m

    @property
    def mean_offset_m(self) -> float:
        """How far the car was from the centre line, on average; no part of A.4's loss."""
        return float(np.abs(self.offsets_m[: self.counted_steps]).mean())

    @property
    def counted_steps(self) -> int:
        """Steps that count: until the car was farthest, if it was stuck then; else all."""
        if self.ending == "stuck":
            return int(np.argmax(self.progress_m)) + 1
        return len(self.progress_m)

    def drive(self) -> Drive:
        """Return what A.4 counts of it."""
        wheels = self.wheel_distances_m[: self.counted_steps]
        times = road_times(wheels, self.road.half_width_m, STEPS_PER_SECOND)
        return Drive(
            on_road_seconds=times.on_road_seconds,
            crossings=times.crossings,
            on_line_seconds=times.on_line_seconds,
            is_finished=self.ending == "all laps",
        )


Watcher = Callable[[Simulator, int, float, float], None]


def drive_track(
    driver: Driver,
    track_seed: int,
    *,
    laps: int = 2,
    speed_m_per_s: float = SPEED_M_PER_S,
    noise: ArrayLike = (0.0,),
    with_film: bool = False,
    watch: Watcher | None = None,
) -> Journey:
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
    speed_m_per_s : float
        What the speed is held at.
    noise : array_like of shape (n,)
        Disturbances of the steering at the steps, in turn from the start after the last.
    with_film : bool
        Whether `watch` wants pictures for humans.
    watch : callable, optional
        Called before every step with the simulator, the step, the laps so far and the angle.
    """
    rows: list[tuple[float, ...]] = []
    gusts = np.asarray(noise, dtype=np.float64)
    ending: Ending | None = None
    farthest, farthest_step, off_steps, total = 0.0, 0, 0, 0.0
    with Simulator(track_seed, with_film=with_film) as simulator:
        road, along_m = simulator.road, 0.0
        while ending is None:
            state, step = simulator.state, len(rows)
            place = road.locate(state.position, near_m=along_m)
            total += progress_m(along_m, place.along_m, road.length_m)
            along_m = place.along_m
            angle = driver(Moment(simulator.image, state, road, place))
            angle = min(max(float(angle), -1.0), 1.0) if np.isfinite(angle) else 0.0
            wheels = road.distances(state.wheels)
            rows.append((*state.position, place.offset_m, total, *wheels, angle))
            if watch is not None:
                watch(simulator, step, total / road.length_m, angle)
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
                simulator.step(
                    angle + gusts[step % len(gusts)],
                    *hold_speed(state.speed_m_per_s, speed_m_per_s),
                )
    table = np.array(rows)
    return Journey(road, ending, table[:, :2], table[:, 2], table[:, 3], table[:, 4:8], table[:, 8])
