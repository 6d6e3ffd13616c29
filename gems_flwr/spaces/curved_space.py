"""A ball or ellipsoid together with its radius for every epsilon.

The exact rays of `gems_flwr.radii.rays` give the whole curve r(epsilon) in one pass. A node
that sends it along (a thousand numbers at most) lets the server choose epsilon afterwards: the
largest at which all spaces meet, without asking again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_CURVE_POINTS, MAX_WEIGHT, MIN_RADIUS
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.checks import check_array
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.radius import Radius

_SHORTEST_AXIS = 1e-12


def thin_curve(radii: NDArray[Any]) -> NDArray[np.float32]:
    """Return a curve with at most `MAX_CURVE_POINTS` points, each a radius that holds.

    Parameters
    ----------
    radii : array of shape (n + 1,)
        ``radii[k]`` is the radius at which k of n samples are still right; falling in k.
    """
    last = len(radii) - 1
    points = min(last, MAX_CURVE_POINTS - 1)
    # Share i / points needs ceil(i * last / points) samples: rounded up, so that it holds.
    needed = -(-np.arange(points + 1) * last // points)
    finite = np.minimum(radii[needed], MAX_WEIGHT)
    # Towards zero when rounded to single precision, for the same reason.
    single = finite.astype(np.float32)
    below = np.nextafter(single, np.float32(0))
    return np.asarray(np.where(single > finite, below, single), dtype=np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class CurvedSpace:
    """A space that can be had for any epsilon.

    Parameters
    ----------
    space : BallSpace or EllipsoidSpace
        The space for the epsilon that was asked for.
    curve : array of shape (points,)
        ``curve[i]`` is the radius for epsilon ``i / (points - 1)``; falling, 0 where not even
        the centre is good enough.
    """

    space: BallSpace | EllipsoidSpace
    curve: NDArray[np.float32]

    def __post_init__(self) -> None:
        curve = check_array("curve", self.curve, (None,))
        if not 2 <= curve.size <= MAX_CURVE_POINTS:
            raise SpaceError("curve", f"2 to {MAX_CURVE_POINTS} points", curve.size)
        if (curve < 0).any() or (np.diff(curve) > 0).any():
            raise SpaceError("curve", "falling radii of at least 0", "something else")
        if isinstance(self.space, EllipsoidSpace) and self.space.radius.value < MIN_RADIUS:
            # Axes are scaled by radii over this one.
            raise SpaceError(
                "radius",
                f"at least {MIN_RADIUS:g} for an ellipsoid with a curve",
                self.space.radius.value,
            )
        object.__setattr__(self, "curve", curve)

    @property
    def largest_epsilon(self) -> float:
        """The accuracy of the centre itself."""
        return float(np.flatnonzero(self.curve > 0).max(initial=0)) / (self.curve.size - 1)

    def radius(self, epsilon: float) -> float:
        """Return the radius for an accuracy, from the point of the curve above it."""
        index = int(np.ceil(epsilon * (self.curve.size - 1) - 1e-9))
        return float(self.curve[min(index, self.curve.size - 1)])

    def at(self, epsilon: float) -> BallSpace | EllipsoidSpace:
        """Return the space for another epsilon."""
        value = self.radius(epsilon)
        old = self.space.radius
        radius = Radius(value, old.method, epsilon, old.directions)
        if isinstance(self.space, BallSpace):
            return BallSpace(self.space.center, radius)
        # Where not even the centre is good enough, hardly more than the centre is left.
        axes = self.space.radii.astype(np.float64) / old.value * value
        axes = np.clip(axes, _SHORTEST_AXIS, MAX_WEIGHT)
        return EllipsoidSpace(self.space.center, axes.astype(np.float32), radius)


def without_curve(space: Any) -> Any:
    """Return a space without its curve of radii, if it has one."""
    return space.space if isinstance(space, CurvedSpace) else space
