"""The intersection of ellipsoids, balls, cones and any other convex sets, with a certificate.

Ellipsoids and balls enter the dual of `quadratics` exactly. A class-moment cone enters by the
half-spaces that hold it: the master problem is solved with those known so far, the cones cut
off its solution, and so on. So does any other `ConvexSet`, beside a ball or ellipsoid around it.
Dropping constraints can only enlarge a set, so a positive dual of a master problem proves that
the intersection itself is empty; a point is only called feasible after every space has confirmed
it.

Decided here: cones alone always share the zero layer, which the spaces exclude (``m > 0``).
So with no ball or ellipsoid among the spaces the search is over ``|w| <= 1`` for the
deepest layer; if no layer is deeper than ``tolerance`` in units of the weights, the
intersection is reported empty *to that tolerance*.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from gems_flwr.intersect.quadratics import Quadratics, maximise_dual
from gems_flwr.intersect.result import Intersection, Select, Status, in_all, node_margins, walk_from
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.cone import ClassMomentCone, half_spaces
from gems_flwr.spaces.convex_set import ConvexSet
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.typing import Float

Convex = BallSpace | EllipsoidSpace | ClassMomentCone | ConvexSet


def intersect_convex(
    spaces: Sequence[Convex],
    select: Select = "first",
    rounds: int = 60,
    tolerance: float = 1e-7,
    limit_seconds: float = 60.0,
) -> Intersection:
    """Return a point in all spaces, or a proof that there is none.

    Parameters
    ----------
    spaces : sequence of BallSpace, EllipsoidSpace, ClassMomentCone or ConvexSet
        One per node, of one dimension.
    select : {"first", "margin"}
        First feasible point on the way from the average, or the point whose largest
        constraint value is smallest (deepest relative to each space's size).
    rounds : int
        How often cones and other sets may cut.
    tolerance : float
        Duality gap to which the deepest point is found.
    limit_seconds : float
        No new round of cuts after this time; without a verdict by then, ``undecided``.

    Raises
    ------
    ValueError
        If there is no space or the dimensions differ.
    """
    began = time.perf_counter()
    dimensions = sorted({space.dimension for space in spaces})
    if len(dimensions) != 1:
        raise ValueError(f"spaces: expected one dimension, got {dimensions}")
    centered = [space for space in spaces if not isinstance(space, ClassMomentCone)]
    cones = [space for space in spaces if isinstance(space, ClassMomentCone)]
    average = np.zeros(dimensions[0])
    if centered:
        average = np.mean([space.center for space in centered], axis=0, dtype=np.float64)
    if centered and select == "first" and in_all(spaces, average):
        return _result(spaces, "feasible", average, average, (-np.inf, 0.0), 0, began)
    solver = _CuttingPlanes(centered, cones, average, tolerance)
    deadline = began + limit_seconds
    status = solver.run(spaces, rounds, deadline, early=select == "first")
    point = solver.best
    if status == "feasible" and select == "first" and centered:
        point = walk_from(spaces, average, point)
    bounds = (solver.lower, min(solver.upper, 0.0) if status == "feasible" else solver.upper)
    return _result(spaces, status, point, average, bounds, solver.steps, began)


class _CuttingPlanes:
    """Master problem over quadratics and the half-spaces that cones have added."""

    def __init__(
        self,
        centered: Sequence[BallSpace | EllipsoidSpace | ConvexSet],
        cones: Sequence[ClassMomentCone],
        origin: Float,
        tolerance: float,
    ) -> None:
        self.cones, self.origin, self.tolerance = cones, origin, tolerance
        self.only_cones = not centered
        exact = (BallSpace, EllipsoidSpace)
        self.others = [space for space in centered if not isinstance(space, exact)]
        rows = [
            Quadratics.of(space if isinstance(space, exact) else space.outer(), origin)
            for space in centered
        ]
        if not rows:
            ones = np.ones((1, origin.size))
            rows = [Quadratics(ones, 0 * ones, np.array([-1.0]))]
        self.problem = rows[0]
        for row in rows[1:]:
            self.problem = self.problem + row
        self.lower, self.upper, self.steps = -np.inf, np.inf, 0
        self.best = origin

    def run(self, spaces: Sequence[Convex], rounds: int, deadline: float, early: bool) -> Status:
        """Alternate master problem and cuts until there is a verdict."""
        found = False
        normals, offsets = np.zeros((0, self.origin.size)), np.zeros(0)
        if self.only_cones:
            # At the zero layer nothing is violated; the mean directions start the cuts.
            normals = np.concatenate([self._first_cuts(cone) for cone in self.cones])
            offsets = np.zeros(len(normals))
        x: Float | None = None
        for _ in range(rounds):
            problem, old = self.problem, x
            if len(normals):
                # Where weights are counted from is not the cone's tip: shift the offset.
                cuts = Quadratics.planes(normals)
                problem = problem + Quadratics(cuts.a, cuts.b, normals @ self.origin - offsets)
            if old is not None and len(problem.g) > len(old):
                x = np.append(old, np.zeros(len(problem.g) - len(old)))

            def stop(w: Float, value: float) -> bool:
                # Not at the first proof of emptiness: the least violating point is wanted.
                return early and value <= 0 and in_all(spaces, self.origin + w)

            x, steps = maximise_dual(problem, x, stop, tolerance=self.tolerance / 10)
            self.steps += steps
            w, value = problem.minimiser(x)
            rounding = problem.rounding(x, w)
            self.lower = max(self.lower, value - rounding)
            point = self.origin + w
            cuts_at, offsets_at = self._cuts(point, value)
            beyond = cuts_at @ point - offsets_at
            worst = float(max(beyond.max(initial=-np.inf), problem.values(w).max()))
            inside = in_all(spaces, point)
            if (inside and not found) or (inside == found and worst < self.upper):
                self.upper, self.best, found = worst, point, found or inside
            if not self.only_cones and self.lower > 0:
                return "empty"
            if self.only_cones and not found and self.lower > -self.tolerance:
                return "empty"
            if found and (early or self.upper - self.lower <= self.tolerance):
                return "feasible"
            if not len(cuts_at) or time.perf_counter() > deadline:
                break
            normals = np.concatenate([normals, cuts_at])
            offsets = np.concatenate([offsets, offsets_at])
        return "feasible" if found else "undecided"

    def _cuts(self, point: Float, above: float) -> tuple[Float, Float]:
        """Return the half-spaces that cut off a point: normals, and offsets, 0 for cones."""
        fresh = [half_spaces(cone, point, cone.kappa, above=above) for cone in self.cones]
        offsets = [np.zeros(len(normals)) for normals in fresh]
        for space in self.others:
            normals, own = space.cuts(point)
            fresh.append(normals)
            offsets.append(own)
        return (
            np.concatenate([*fresh, np.zeros((0, point.size))]),
            np.concatenate([*offsets, np.zeros(0)]),
        )

    def _first_cuts(self, cone: ClassMomentCone) -> Float:
        """Return the cuts at the layer whose rows are minus the class means: all violated."""
        weight = np.zeros((cone.num_classes, cone.num_features))
        np.add.at(weight, cone.labels, -np.ones((len(cone.labels), cone.num_features)))
        bias = np.zeros(cone.num_classes)
        bias[cone.labels] -= 1e3
        return half_spaces(cone, np.append(weight.reshape(-1), bias), cone.kappa)


def _result(
    spaces: Sequence[Convex],
    status: Status,
    point: Float,
    average: Float,
    bounds: tuple[float, float],
    steps: int,
    began: float,
) -> Intersection:
    has_average = not all(isinstance(space, ClassMomentCone) for space in spaces)
    near = float(np.linalg.norm(point - average)) <= 1e-9 * (1 + float(np.linalg.norm(average)))
    return Intersection(
        status=status,
        point=point,
        margins=node_margins(spaces, point),
        lower_bound=bounds[0],
        upper_bound=bounds[1],
        is_average=has_average and near,
        method="quadratics: dual with cutting planes",
        iterations=steps,
        seconds=time.perf_counter() - began,
        choice=(0,) * len(spaces),
    )
