"""What a new kind of space has to be, so that a server can intersect it with any other.

A convex set is known by a ball or ellipsoid that holds it and by the half-spaces that cut off a
point outside: the cutting planes of `gems_flwr.intersect.mixed` need no more. Cones, balls and
ellipsoids have solvers of their own; whatever else there is goes this way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

from numpy.typing import ArrayLike, NDArray

from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.typing import Float


class ConvexSet(Protocol):
    """A bounded convex set of layers, each as one flat vector: weight row by row, then bias."""

    kind: ClassVar[str]

    @property
    def center(self) -> NDArray[Any]:
        """A point inside, such as the node's own layer."""

    @property
    def dimension(self) -> int:
        """Number of weights of a layer."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays on the wire."""

    def margin(self, w: ArrayLike) -> float:
        """Return how far a point is inside (at least), or minus the distance outside."""

    def contains(self, w: ArrayLike) -> bool:
        """Return whether a point lies in the set, within rounding."""

    def outer(self) -> BallSpace | EllipsoidSpace:
        """Return a ball or an ellipsoid that holds the set."""

    def cuts(self, w: Float) -> tuple[Float, Float]:
        """Return half-spaces that hold the set, but not `w`; none if `w` is inside.

        Returns
        -------
        tuple
            Unit normals as rows, and offsets: ``n . u <= offset`` for every u in the set.
        """

    def to_arrays(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the arrays and the plain values that describe the set, with its ``kind``."""

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> Self:
        """Build the set from what `to_arrays` returned.

        Raises
        ------
        SpaceError
            If anything about it is malformed: a node may have sent anything.
        """
