"""Spaces around a centre: the ball and the axis-aligned ellipsoid.

Guha and Smith 2019, Section 3.1: ``H_k = {w : |c_k - w| <= r_k}``; Appendix A, Eq. 4:
``H_k = {w : sum_i (w_i - c_i)^2 / r_i^2 <= 1}``. Decided here: a radius of zero is allowed (the
centre alone is good enough), an axis of zero is not, for Eq. 4 divides by it; membership is tested
in double precision with a relative tolerance of 1e-9.

A radius only means that the models that were looked at are good enough, so `Radius` keeps the
number with its method. With a curve, the radius for every epsilon, the server can choose epsilon.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from gems_flwr.bounds import MAX_CURVE_POINTS, MAX_DIRECTIONS, MAX_WEIGHT, MIN_RADIUS
from gems_flwr.errors import SpaceError, shown
from gems_flwr.spaces import convex
from gems_flwr.typing import Float

TOLERANCE = 1e-9
_SHORTEST_AXIS = 1e-12

Method = Literal["sampled", "certified"]
METHODS: tuple[str, ...] = get_args(Method)
CURVE = "curve"


@dataclasses.dataclass(frozen=True)
class Radius:
    """Extent of a space and where the number comes from.

    ``sampled`` is exact along random directions; ``certified`` holds in every direction.
    """

    value: float  # in units of the weights, at least 0
    method: Method
    epsilon: float = 0.0  # the accuracy that was asked for, at least 0
    directions: int = 0  # how many were looked at; 0 if all

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "value", convex.check_number("radius", self.value, 0.0, MAX_WEIGHT))
        if self.method not in METHODS:
            raise SpaceError("radius.method", f"one of {METHODS}", shown(self.method))
        set_(self, "epsilon", convex.check_number("radius.epsilon", self.epsilon, 0.0, MAX_WEIGHT))
        directions = convex.check_integer("radius.directions", self.directions, 0, MAX_DIRECTIONS)
        set_(self, "directions", directions)

    def to_meta(self) -> dict[str, Any]:
        """Return the radius as plain numbers and text."""
        return dataclasses.asdict(self)

    @classmethod
    def from_meta(cls, meta: Any) -> Radius:
        """Build a radius from what `to_meta` returned, checking it again."""
        if not isinstance(meta, Mapping):
            raise SpaceError("radius", "a mapping with value and method", shown(meta))
        value, method = (convex.take(meta, key, "radius") for key in ("value", "method"))
        return cls(value, method, meta.get("epsilon", 0.0), meta.get("directions", 0))


class CenteredSpace:
    """What balls and ellipsoids share: arrays, one of them the centre, a radius, and a curve."""

    kind: ClassVar[str]
    arrays: ClassVar[tuple[str, ...]]
    center: NDArray[np.float32]
    radius: Radius
    curve: NDArray[np.float32] | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "center", convex.check_array("center", self.center, (None,)))
        if not isinstance(self.radius, Radius):
            raise SpaceError("radius", "a Radius (value and method)", shown(self.radius))
        if self.curve is None:
            return
        curve = convex.check_array(CURVE, self.curve, (None,))
        if not 2 <= curve.size <= MAX_CURVE_POINTS:
            raise SpaceError(CURVE, f"2 to {MAX_CURVE_POINTS} points", curve.size)
        if (curve < 0).any() or (np.diff(curve) > 0).any():
            raise SpaceError(CURVE, "falling radii of at least 0", "something else")
        object.__setattr__(self, CURVE, curve)

    @property
    def dimension(self) -> int:
        """Number of weights of a model."""
        return int(self.center.size)

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays on the wire; the radius counts as one float64."""
        return sum(int(array.nbytes) for array in self.to_arrays()[0].values()) + 8

    def offset(self, w: ArrayLike) -> Float:
        """Return where a flat model lies, counted from the centre."""
        point = np.asarray(w, dtype=np.float64).reshape(-1)
        if point.size != self.dimension:
            raise SpaceError("w", f"{self.dimension} values", f"{point.size}")
        return np.asarray(point - self.center)

    def with_radius(self, radius: Radius) -> Self:
        """Return the space of the same shape with another radius, without a curve."""
        return dataclasses.replace(self, radius=radius, curve=None)  # type: ignore[type-var]

    @property
    def largest_epsilon(self) -> float:
        """The accuracy of the centre itself, by the curve."""
        assert self.curve is not None
        return float(np.flatnonzero(self.curve > 0).max(initial=0)) / (self.curve.size - 1)

    def at(self, epsilon: float) -> Self:
        """Return the space for another epsilon, by the point of the curve above it."""
        assert self.curve is not None
        last = self.curve.size - 1
        value = float(self.curve[min(int(np.ceil(epsilon * last - 1e-9)), last)])
        return self.with_radius(dataclasses.replace(self.radius, value=value, epsilon=epsilon))

    def to_arrays(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the arrays and the plain values that describe the space."""
        arrays = {name: getattr(self, name) for name in self.arrays}
        if self.curve is not None:
            arrays[CURVE] = self.curve
        return arrays, {"kind": self.kind, "radius": self.radius.to_meta()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> Self:
        """Build the space from what `to_arrays` returned, checking everything again."""
        what = f"a space of kind {cls.kind}"
        convex.check_keys(arrays, [*cls.arrays, CURVE], what)
        radius = Radius.from_meta(convex.take(meta, "radius", "the space's meta"))
        given = {name: convex.take(arrays, name, what) for name in cls.arrays}
        return cls(**given, radius=radius, curve=arrays.get(CURVE))  # type: ignore[call-arg]


@convex.register_space
@dataclasses.dataclass(frozen=True, eq=False)
class BallSpace(CenteredSpace):
    """All models within a distance of a centre, the node's own model (d,).

    With a curve, ``curve[i]`` is the radius for epsilon ``i / (points - 1)``; falling, 0 where not
    even the centre is good enough.
    """

    kind: ClassVar[str] = "ball"
    arrays: ClassVar[tuple[str, ...]] = ("center",)
    center: NDArray[np.float32]
    radius: Radius
    curve: NDArray[np.float32] | None = None

    def margin(self, w: ArrayLike) -> float:
        """Return ``r - |w - c|``: positive inside, in units of the weights."""
        return self.radius.value - float(np.linalg.norm(self.offset(w)))

    def distance(self, w: ArrayLike) -> float:
        """Return the Euclidean distance from ``w`` to the ball; 0 inside."""
        return max(0.0, -self.margin(w))

    def contains(self, w: ArrayLike) -> bool:
        """Return whether ``w`` lies in the ball."""
        scale = self.radius.value + float(np.linalg.norm(self.center))
        return self.margin(w) >= -TOLERANCE * scale


@convex.register_space
@dataclasses.dataclass(frozen=True, eq=False)
class EllipsoidSpace(CenteredSpace):
    """All models within an axis-aligned ellipsoid around the node's own model (d,).

    The radii (d,) are the half-lengths of the axes, all at least 1e-30, in units of the weights;
    the radius is the common factor R of Eq. 5. A curve is as in `BallSpace`.
    """

    kind: ClassVar[str] = "ellipsoid"
    arrays: ClassVar[tuple[str, ...]] = ("center", "radii")
    center: NDArray[np.float32]
    radii: NDArray[np.float32]
    radius: Radius
    curve: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        radii = convex.check_array("radii", self.radii, (self.center.size,))
        object.__setattr__(self, "radii", radii)
        if float(radii.min()) < MIN_RADIUS:
            raise SpaceError("radii", f"all at least {MIN_RADIUS:g}", float(radii.min()))
        if self.curve is not None and self.radius.value < MIN_RADIUS:
            # Axes are scaled by radii over this one.
            raise SpaceError("radius", f"at least {MIN_RADIUS:g} beside a curve", self.radius.value)

    def with_radius(self, radius: Radius) -> EllipsoidSpace:
        """Return the ellipsoid with all axes scaled as the radius is."""
        # Where not even the centre is good enough, hardly more than the centre is left.
        axes = self.radii.astype(np.float64) / self.radius.value * radius.value
        axes = np.clip(axes, _SHORTEST_AXIS, MAX_WEIGHT)
        return EllipsoidSpace(self.center, axes.astype(np.float32), radius)

    def level(self, w: ArrayLike) -> float:
        """Return the square root of the left side of Eq. 4: up to 1 inside."""
        return float(np.linalg.norm(self.offset(w) / self.radii.astype(np.float64)))

    def margin(self, w: ArrayLike) -> float:
        """Return how far ``w`` is inside (at least), or minus the distance outside.

        Inside it is ``(1 - level) * min_i r_i``: a ball of that radius lies in the ellipsoid.
        """
        level = self.level(w)
        return (1 - level) * float(self.radii.min()) if level <= 1 else -self.distance(w)

    def distance(self, w: ArrayLike) -> float:
        """Return the Euclidean distance from ``w`` to the ellipsoid; 0 inside.

        Exact, from the single root of the secular equation ``sum_i (r_i x_i / (r_i^2 + t))^2 = 1``.
        """
        offset, radii = self.offset(w), self.radii.astype(np.float64)
        if float(np.linalg.norm(offset / radii)) <= 1:
            return 0.0
        scaled, squared_radii = radii * offset, radii**2

        def excess(t: float) -> float:
            return float(np.linalg.norm(scaled / (squared_radii + t))) - 1.0

        # At t = |scaled| every denominator is at least t, so the sum is at most 1.
        root = brentq(excess, 0.0, float(np.linalg.norm(scaled)), xtol=1e-14, rtol=1e-13)
        return float(np.linalg.norm(offset * root / (squared_radii + root)))

    def contains(self, w: ArrayLike) -> bool:
        """Return whether ``w`` lies in the ellipsoid."""
        slack = TOLERANCE * (1 + float(np.linalg.norm(self.center / self.radii)))
        return self.level(w) <= 1 + slack


def thin_curve(radii: NDArray[Any]) -> NDArray[np.float32]:
    """Return a curve with at most `MAX_CURVE_POINTS` points, each a radius that holds.

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
