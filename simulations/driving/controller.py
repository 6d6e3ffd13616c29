"""The driver to imitate: a controller that sees the track, and keeps the speed for all drivers.

Steering is pure pursuit: the arc from the rear axle to a point of the centre line some metres
ahead, as the angle of the front wheels that drives it. The paper's driver is a human; a human looks
ahead, too. All angles are shares of full lock, -1 (left) to 1 (right), as in the paper's simulator,
where 1 is 25 degrees; here it is 0.4 radians (22.9 degrees).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulations.driving.road import Place, Road

FULL_LOCK_RADIANS = 0.4
WHEELBASE_M = 3.24
REAR_AXLE_M = 1.64
"""From the middle of the car back to the rear axle."""
LOOK_AHEAD_M = 9.0
SPEED_M_PER_S = 20.0
"""Of recordings and drives; the sharpest turn of a track has a radius of 11 metres."""


@dataclass(frozen=True, eq=False)
class CarState:
    """Where the car and its four wheels are, and how it moves.

    The heading counts counterclockwise from the y axis, as the simulator has it.
    """

    position: NDArray[np.float64]
    heading_radians: float
    speed_m_per_s: float
    wheels: NDArray[np.float64]


def pursue(state: CarState, road: Road, place: Place, look_ahead_m: float = LOOK_AHEAD_M) -> float:
    """Return the angle that leads back to the centre line ahead, a share of full lock."""
    nose = np.array([-math.sin(state.heading_radians), math.cos(state.heading_radians)])
    right = np.array([nose[1], -nose[0]])
    away = road.point_at(place.along_m + look_ahead_m) - (state.position - REAR_AXLE_M * nose)
    ahead_m, aside_m = float(away @ nose), float(away @ right)
    if ahead_m <= 0:
        # The point is behind: turn round as sharply as can be.
        return 1.0 if aside_m >= 0 else -1.0
    # The circle that touches the car's axis at the rear axle and goes through the point.
    curvature = 2 * aside_m / (ahead_m**2 + aside_m**2)
    angle = math.atan(WHEELBASE_M * curvature) / FULL_LOCK_RADIANS
    return min(max(angle, -1.0), 1.0)


def hold_speed(speed_m_per_s: float) -> tuple[float, float]:
    """Return gas and brake, both in [0, 1], that keep the car at `SPEED_M_PER_S`."""
    lacking = SPEED_M_PER_S - speed_m_per_s
    if lacking >= 0:
        return min(0.05 * lacking, 0.3), 0.0
    return 0.0, min(-0.02 * lacking, 0.2) if lacking < -1.0 else 0.0
