"""The ball (c, r) of good-enough models.

Model Aggregation via Good-Enough Model Spaces (2019), Section 3.1:
``H_k = {w : |c_k - w| <= r_k}``, one centre and one radius per node.

Decided here: a radius of zero is allowed (the centre alone is good enough), a negative or
NaN one is not; membership is tested in double precision with a relative tolerance of 1e-9.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gems_flwr.spaces.errors import SpaceError, check_array, check_keys, take
from gems_flwr.spaces.radius import Radius

TOLERANCE = 1e-9


def as_point(w: ArrayLike, dimension: int) -> NDArray[np.float64]:
    """Return ``w`` as a flat double vector of the wanted dimension."""
    point = np.asarray(w, dtype=np.float64).reshape(-1)
    if point.size != dimension:
        raise SpaceError("w", f"{dimension} values", f"{point.size}")
    return point


@dataclasses.dataclass(frozen=True, eq=False)
class Ball:
    """All models within a distance of a centre.

    Parameters
    ----------
    center : array of shape (d,)
        The node's own model, flat; stored as float32.
    radius : Radius
        How far the models stay good enough, and how that was found out.

    Raises
    ------
    SpaceError
        If the centre or the radius is malformed.
    """

    kind: ClassVar[str] = "ball"
    center: NDArray[np.float32]
    radius: Radius

    def __post_init__(self) -> None:
        object.__setattr__(self, "center", check_array("center", self.center, (None,)))
        if not isinstance(self.radius, Radius):
            raise SpaceError("radius", "a Radius (value and method)", repr(self.radius))

    @property
    def dimension(self) -> int:
        """Number of weights of a model."""
        return int(self.center.size)

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays on the wire; the radius counts as one float64."""
        return int(self.center.nbytes) + 8

    def margin(self, w: ArrayLike) -> float:
        """Return ``r - |w - c|``: positive inside, in units of the weights."""
        point = as_point(w, self.dimension)
        return self.radius.value - float(np.linalg.norm(point - self.center))

    def distance(self, w: ArrayLike) -> float:
        """Return the Euclidean distance from ``w`` to the ball; 0 inside."""
        return max(0.0, -self.margin(w))

    def contains(self, w: ArrayLike) -> bool:
        """Return whether ``w`` lies in the ball."""
        scale = self.radius.value + float(np.linalg.norm(self.center))
        return self.margin(w) >= -TOLERANCE * scale

    def to_arrays(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the arrays and the plain values that describe the ball."""
        return {"center": self.center}, {"kind": self.kind, "radius": self.radius.to_meta()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> Ball:
        """Build a ball from what `to_arrays` returned, checking everything again."""
        check_keys(arrays, ["center"], "a ball")
        radius = Radius.from_meta(take(meta, "radius", "the ball's meta"))
        return cls(take(arrays, "center", "a ball"), radius)
