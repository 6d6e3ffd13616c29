"""The ball (c, r) of good-enough models, and a node's set of balls.

Model Aggregation via Good-Enough Model Spaces (2019), Section 3.1:
``H_k = {w : |c_k - w| <= r_k}``, one centre and one radius per node. Decided here: a radius of zero
is allowed (the centre alone is good enough), a negative or NaN one is not; membership is tested in
double precision with a relative tolerance of 1e-9.

Knowledge Aggregation via Good-Enough Model Spaces (2018), Section 4.1 and Algorithm 1: when
the balls of the learners do not intersect, every learner retrains from new initial weights
and adds the new ball to its set, round after round; the set is their union. Decided here: the
printed algorithm empties the sets in every pass of the loop (line 2 stands inside the ``while``),
which contradicts the text. We follow the text: sets only grow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gems_flwr.errors import SpaceError
from gems_flwr.spaces.checks import check_array, check_keys, take
from gems_flwr.spaces.radius import Radius

TOLERANCE = 1e-9
AnySpace = TypeVar("AnySpace")


def as_point(w: ArrayLike, dimension: int) -> NDArray[np.float64]:
    """Return ``w`` as a flat double vector of the wanted dimension."""
    point = np.asarray(w, dtype=np.float64).reshape(-1)
    if point.size != dimension:
        raise SpaceError("w", f"{dimension} values", f"{point.size}")
    return point


@dataclasses.dataclass(frozen=True, eq=False)
class BallSpace:
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
    def from_arrays(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> BallSpace:
        """Build a ball from what `to_arrays` returned, checking everything again."""
        check_keys(arrays, ["center"], "a ball")
        radius = Radius.from_meta(take(meta, "radius", "the ball's meta"))
        return cls(take(arrays, "center", "a ball"), radius)


@dataclasses.dataclass(frozen=True, eq=False)
class BallSet:
    """The union of one node's balls.

    Parameters
    ----------
    balls : tuple of BallSpace
        At least one, all of the same dimension, oldest first.

    Raises
    ------
    SpaceError
        If there is no ball or the dimensions differ.
    """

    kind: ClassVar[str] = "ball_set"
    balls: tuple[BallSpace, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "balls", tuple(self.balls))
        if not self.balls or not all(isinstance(ball, BallSpace) for ball in self.balls):
            raise SpaceError("balls", "one ball or more", repr(self.balls)[:80])
        dimensions = sorted({ball.dimension for ball in self.balls})
        if len(dimensions) > 1:
            raise SpaceError("balls", "balls of one dimension", f"dimensions {dimensions}")

    @property
    def dimension(self) -> int:
        """Number of weights of a model."""
        return self.balls[0].dimension

    @property
    def size_bytes(self) -> int:
        """Bytes of all balls on the wire."""
        return sum(ball.size_bytes for ball in self.balls)

    def add(self, ball: BallSpace) -> BallSet:
        """Return the set with one more ball."""
        return BallSet((*self.balls, ball))

    def margin(self, w: ArrayLike) -> float:
        """Return the largest margin of ``w`` in any of the balls."""
        return max(ball.margin(w) for ball in self.balls)

    def distance(self, w: ArrayLike) -> float:
        """Return the distance from ``w`` to the nearest ball; 0 inside one."""
        return min(ball.distance(w) for ball in self.balls)

    def contains(self, w: ArrayLike) -> bool:
        """Return whether ``w`` lies in at least one ball."""
        return any(ball.contains(w) for ball in self.balls)

    def to_arrays(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the arrays and the plain values that describe the set."""
        centers = np.stack([ball.center for ball in self.balls])
        return {"centers": centers}, {
            "kind": self.kind,
            "radii": [ball.radius.to_meta() for ball in self.balls],
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> BallSet:
        """Build a set from what `to_arrays` returned, checking everything again."""
        check_keys(arrays, ["centers"], "a set of balls")
        radii = take(meta, "radii", "the set's meta")
        if not isinstance(radii, list):
            raise SpaceError("radii", "a list of radii", repr(radii)[:80])
        centers = check_array(
            "centers", take(arrays, "centers", "a set of balls"), (len(radii), None)
        )
        return cls(
            tuple(BallSpace(c, Radius.from_meta(r)) for c, r in zip(centers, radii, strict=True))
        )


def with_new_ball(old: object, new: AnySpace) -> AnySpace | BallSet:
    """Return the balls that a node has sent before with a new one (2018); else what is new."""
    if not isinstance(new, BallSpace) or not isinstance(old, BallSpace | BallSet):
        return new
    before = old.balls if isinstance(old, BallSet) else (old,)
    return BallSet((*before, new))
