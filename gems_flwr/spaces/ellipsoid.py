"""The axis-aligned ellipsoid of good-enough models.

Model Aggregation via Good-Enough Model Spaces (2019), Appendix A, Eq. 4:
``H_k = {w : sum_i (w_i - c_i)^2 / r_i^2 <= 1}``. The radii come from the Fisher diagonal
(Eq. 5, see `gems_flwr.radii.fisher_axes`).

Decided here: every axis must be longer than zero (Eq. 4 divides by it). The distance is the
Euclidean one, from the single root of the secular equation
``sum_i (r_i x_i / (r_i^2 + t))^2 = 1``, which is exact, not an approximation by scaling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from gems_flwr.bounds import MIN_RADIUS
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.ball import TOLERANCE, as_point
from gems_flwr.spaces.checks import check_array, check_keys, take
from gems_flwr.spaces.radius import Radius


@dataclasses.dataclass(frozen=True, eq=False)
class EllipsoidSpace:
    """All models within an axis-aligned ellipsoid.

    Parameters
    ----------
    center : array of shape (d,)
        The node's own model, flat; stored as float32.
    radii : array of shape (d,)
        Half-lengths of the axes, all at least 1e-30, in units of the weights.
    radius : Radius
        The common factor R of Eq. 5 and how it was found.

    Raises
    ------
    SpaceError
        If any of them is malformed.
    """

    kind: ClassVar[str] = "ellipsoid"
    center: NDArray[np.float32]
    radii: NDArray[np.float32]
    radius: Radius

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "center", check_array("center", self.center, (None,)))
        set_(self, "radii", check_array("radii", self.radii, (self.center.size,)))
        if not isinstance(self.radius, Radius):
            raise SpaceError("radius", "a Radius (value and method)", repr(self.radius))
        shortest = float(self.radii.min())
        if shortest < MIN_RADIUS:
            raise SpaceError("radii", f"all at least {MIN_RADIUS:g}", shortest)

    @property
    def dimension(self) -> int:
        """Number of weights of a model."""
        return int(self.center.size)

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays on the wire; the radius counts as one float64."""
        return int(self.center.nbytes) + int(self.radii.nbytes) + 8

    def level(self, w: ArrayLike) -> float:
        """Return the square root of the left side of Eq. 4: up to 1 inside."""
        offset = as_point(w, self.dimension) - self.center
        return float(np.linalg.norm(offset / self.radii.astype(np.float64)))

    def margin(self, w: ArrayLike) -> float:
        """Return how far ``w`` is inside (at least), or minus the distance outside.

        Inside it is ``(1 - level) * min_i r_i``, the radius of a ball around ``w`` that
        the ellipsoid is sure to hold.
        """
        level = self.level(w)
        if level <= 1:
            return (1 - level) * float(self.radii.min())
        return -self.distance(w)

    def distance(self, w: ArrayLike) -> float:
        """Return the Euclidean distance from ``w`` to the ellipsoid; 0 inside."""
        offset = as_point(w, self.dimension) - self.center
        radii = self.radii.astype(np.float64)
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

    def to_arrays(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the arrays and the plain values that describe the ellipsoid."""
        arrays: dict[str, NDArray[Any]] = {"center": self.center, "radii": self.radii}
        return arrays, {"kind": self.kind, "radius": self.radius.to_meta()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> EllipsoidSpace:
        """Build an ellipsoid from what `to_arrays` returned, checking everything again."""
        check_keys(arrays, ["center", "radii"], "an ellipsoid")
        radius = Radius.from_meta(take(meta, "radius", "the ellipsoid's meta"))
        center, radii = (take(arrays, key, "an ellipsoid") for key in ("center", "radii"))
        return cls(center, radii, radius)
