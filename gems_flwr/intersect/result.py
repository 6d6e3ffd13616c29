"""What an intersection found, and how sure it is.

The released code of 2019 always reports success. Here the answer is one of three: a
verified point (``feasible``), a proof that there is none (``empty``), or neither within
the given effort (``undecided``). A point is there in every case: if not in all spaces,
then the least violating one that was met.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from gems_flwr.spaces.space_files import Space
from gems_flwr.typing import Float

Status = Literal["feasible", "empty", "undecided"]
Select = Literal["first", "margin", "objective"]


@dataclasses.dataclass(frozen=True, eq=False)
class Intersection:
    """Result of intersecting the spaces of all nodes.

    Parameters
    ----------
    status : {"feasible", "empty", "undecided"}
        Verified point, proof of emptiness, or neither.
    point : array of shape (d,)
        The chosen model.
    margins : tuple of float
        Per node how far the point is inside its space, in units of the weights for balls
        and ellipsoids and of the logits for cones; negative outside.
    lower_bound, upper_bound : float
        The smallest possible largest constraint value lies between them. A positive lower
        bound is the proof of emptiness, a non-positive upper bound that of membership.
    is_average : bool
        Whether the point is just the mean of the nodes' centres.
    method : str
        Which solver answered.
    iterations : int
        Steps it took.
    seconds : float
        Wall-clock time.
    choice : tuple of int
        Index of the ball that was used of each node's set; zeros if there are no sets.
    """

    status: Status
    point: Float
    margins: tuple[float, ...]
    lower_bound: float
    upper_bound: float
    is_average: bool
    method: str
    iterations: int
    seconds: float
    choice: tuple[int, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether the point was verified to lie in every space."""
        return self.status == "feasible"

    @property
    def empty(self) -> bool:
        """Whether it was proved that no model lies in every space."""
        return self.status == "empty"

    @property
    def gap(self) -> float:
        """Upper minus lower bound: 0 if the answer is exact."""
        return self.upper_bound - self.lower_bound


def node_margins(spaces: Sequence[Space], point: Float) -> tuple[float, ...]:
    """Return each node's margin at a point."""
    return tuple(space.margin(point) for space in spaces)


def in_all(spaces: Sequence[Space], point: Float) -> bool:
    """Return whether a point lies in every space."""
    return all(space.contains(point) for space in spaces)


def walk_from(spaces: Sequence[Space], start: Float, goal: Float) -> Float:
    """Return the first point on the way from ``start`` to ``goal`` that is in every space.

    The papers descend from the average and stop at the first feasible point. The spaces are
    convex and the goal lies in all of them, so on the straight way the feasible part is
    an interval that ends at the goal; bisection finds where it begins, and the verified
    end is returned. On the way no margin may be negative, not even within rounding.
    """
    if in_all(spaces, start):
        return start
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if min(node_margins(spaces, start + middle * (goal - start))) >= 0:
            high = middle
        else:
            low = middle
    return goal if high == 1.0 else start + high * (goal - start)
