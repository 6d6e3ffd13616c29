"""The car, the road and the camera: `CarRacing-v3` of gymnasium, without a screen.

The camera's picture is cut out of the simulator's 96 by 96 top view, pixel for pixel:

- the bottom 12 rows are an instrument panel that shows the steering itself, and the front wheels
  are drawn turned; a network would learn to read the angle off them. So the picture ends before
  the nose of the car, as that of a camera behind the windscreen does, and reaches 33 metres beyond;
- of the columns the middle two thirds are left, 20 metres to either side;
- grey is the green channel: road and grass differ in no other.

That makes 64 by 64 pixels, the least on which the paper's five convolutions fit (61) and a bit, so
that two cores can train on it.
"""

from __future__ import annotations

import importlib.util
import os
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from simulations.config import ConfigError
from simulations.driving.controller import FULL_LOCK_RADIANS, CarState
from simulations.driving.road import Road

Image = NDArray[np.uint8]

HEIGHT = WIDTH = 64
STEPS_PER_SECOND = 50
_ROWS = slice(2, 66)
_COLUMNS = slice(16, 80)
_GREEN = 1
# What the extra `driving` brings, by the names under which it is imported.
_NEEDED = ("gymnasium", "Box2D", "pygame")


def require_simulator() -> None:
    """Raise a ConfigError that says what to install, unless it is there."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "pip install 'gems-flwr[driving]' (in a checkout '.[driving]'): driving needs "
            f"{', '.join(missing)}"
        )


def camera_image(view: NDArray[np.uint8]) -> Image:
    """Return the camera's picture out of the simulator's (96, 96, 3) top view."""
    return np.ascontiguousarray(view[_ROWS, _COLUMNS, _GREEN])


class Simulator:
    """A car on a track, standing at its start; a ConfigError without the extra ``driving``."""

    def __init__(self, track_seed: int, *, is_backwards: bool = False) -> None:
        require_simulator()
        # Pygame takes it from there when it is imported.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        import gymnasium
        from gymnasium.envs.box2d.car_racing import TRACK_WIDTH

        # Beneath the wrappers, which end an episode after one lap. Any: it has no types of its own.
        self._env: Any = cast(Any, gymnasium.make("CarRacing-v3")).unwrapped
        self._env.reset(seed=track_seed)
        road = Road(np.array([(x, y) for _, _, x, y in self._env.track]), float(TRACK_WIDTH))
        self.road = road.reversed() if is_backwards else road
        if is_backwards:
            self._turn_round()
        # The first second of an episode is a zoom from far above, which no later picture is like.
        self._env.t = 1.0
        self._view: NDArray[np.uint8] = self._env.step(None)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._env.close()

    @property
    def image(self) -> Image:
        """What the camera sees, shaped (HEIGHT, WIDTH)."""
        return camera_image(self._view)

    @property
    def state(self) -> CarState:
        """Where the car is and how it moves."""
        car = self._env.car
        speed = car.hull.linearVelocity
        return CarState(
            position=np.array([car.hull.position[0], car.hull.position[1]]),
            heading_radians=float(car.hull.angle),
            speed_m_per_s=float(np.hypot(speed[0], speed[1])),
            wheels=np.array([(w.position[0], w.position[1]) for w in car.wheels]),
        )

    def step(self, angle: float, gas: float, brake: float) -> None:
        """Go on by 1 / STEPS_PER_SECOND of a second; `angle` is a share of full lock."""
        lock = min(max(angle, -1.0), 1.0) * FULL_LOCK_RADIANS
        self._view = self._env.step(np.array([lock, gas, brake]))[0]

    def _turn_round(self) -> None:
        """Turn the car by half a circle where it stands, wheels and all."""
        car = self._env.car
        middle = np.array([car.hull.position[0], car.hull.position[1]])
        for body in (car.hull, *car.wheels):
            x, y = 2 * middle - np.array([body.position[0], body.position[1]])
            body.transform = ((float(x), float(y)), float(body.angle) + np.pi)
