"""The intersection of balls: a point, or a proof that there is none.

2019, Eq. 2 minimises ``sum_k max(0, |c_k - w| - r_k)`` by gradient descent, which gives no
verdict if it does not reach zero. Instead, by duality::

    min_w max_k |w - c_k|^2 - r_k^2
      = max over the simplex of  sum_k x_k (|c_k|^2 - r_k^2) - |sum_k x_k c_k|^2

with ``w = sum_k x_k c_k``. It needs only the K x K Gram matrix of the centres. Any x with a
positive value proves that the intersection is empty; any w with no positive constraint is
in it. A pairwise test of distances is not sufficient (three balls can meet in pairs only).

2018, Algorithm 1, line 7, for two balls; the printed formula has a slip (``c1 r2 + c2 c1``),
it is ``(c1 r2 + c2 r1) / (r1 + r2)``.

Decided here: ``select="margin"`` maximises the smallest ``r_k - |w - c_k|``. All radii are
changed by the same t until the intersection is a single point; for fixed multipliers the dual
is a quadratic in t whose root bounds t from one side, so a few solves find it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from gems_flwr.intersect.result import Intersection, Select, Status, in_all, node_margins, walk_from
from gems_flwr.intersect.simplex import maximise_on_simplex
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.typing import Float


def intersect_balls(
    balls: Sequence[BallSpace], select: Select = "first", tolerance: float = 1e-10
) -> Intersection:
    """Return a point in all balls, or a proof that there is none.

    Parameters
    ----------
    balls : sequence of BallSpace
        One per node, of one dimension.
    select : {"first", "margin"}
        First feasible point on the way from the average (as in the papers), or the point
        deepest inside all balls. If the intersection is empty, both return the point
        whose largest distance to a ball is smallest.
    tolerance : float
        Relative to the squared size of the problem, what counts as zero.

    Raises
    ------
    ValueError
        If there is no ball or the dimensions differ.
    """
    began = time.perf_counter()
    problem = _Problem(balls, tolerance)
    average = problem.average
    if select == "first" and in_all(balls, average):
        upper = problem.upper(problem.uniform, 0.0)
        lower = problem.dual(problem.uniform, 0.0)
        return problem.result("feasible", average, min(upper, 0.0), lower, began)
    x, steps = problem.solve(0.0, None, early=select == "first")
    lower, upper = problem.dual(x, 0.0), problem.upper(x, 0.0)
    point = problem.point(x)
    status: Status = "undecided"
    if lower > problem.noise:
        status = "empty"
    elif in_all(balls, point):
        status, upper = "feasible", min(upper, 0.0)
    if status == "feasible" and select == "first":
        point = walk_from(balls, average, point)
    elif select == "margin" or status != "feasible":
        x, more = problem.deepest(x)
        steps += more
        deepest = problem.point(x)
        if min(node_margins(balls, deepest)) >= min(node_margins(balls, point)):
            point = deepest
        if status == "undecided" and in_all(balls, point):
            status, upper = "feasible", min(upper, 0.0)
    return problem.result(status, point, upper, lower, began, steps)


class _Problem:
    """The dual of K balls: Gram matrix of the centres around their mean, and radii."""

    def __init__(self, balls: Sequence[BallSpace], tolerance: float) -> None:
        if not balls:
            raise ValueError("balls: expected at least one, got none")
        dimensions = sorted({ball.dimension for ball in balls})
        if len(dimensions) > 1:
            raise ValueError(f"balls: expected one dimension, got {dimensions}")
        self.balls = balls
        centers = np.stack([ball.center for ball in balls]).astype(np.float64)
        self.average = centers.mean(axis=0)
        # Around the mean, so that a common offset of all models costs no digits.
        self.centers = centers - self.average
        self.gram = self.centers @ self.centers.T
        self.radii = np.array([ball.radius.value for ball in balls])
        self.uniform = np.full(len(balls), 1.0 / len(balls))
        self.noise = tolerance * float(np.diag(self.gram).max() + (self.radii**2).max())

    def linear(self, t: float) -> Float:
        return np.asarray(np.diag(self.gram) - (self.radii + t) ** 2)

    def dual(self, x: Float, t: float) -> float:
        return float(x @ self.linear(t) - x @ self.gram @ x)

    def values(self, x: Float, t: float) -> Float:
        """Return ``|w - c_k|^2 - (r_k + t)^2`` at ``w = sum x_k c_k``."""
        return np.asarray(self.linear(t) - 2 * self.gram @ x + x @ self.gram @ x)

    def upper(self, x: Float, t: float) -> float:
        return float(self.values(x, t).max())

    def point(self, x: Float) -> Float:
        return np.asarray(self.average + x @ self.centers)

    def solve(self, t: float, start: Float | None, early: bool) -> tuple[Float, int]:
        def stop(x: Float) -> bool:
            return self.dual(x, t) > self.noise or self.upper(x, t) <= -self.noise

        return maximise_on_simplex(self.linear(t), self.gram, start, stop if early else None)

    def deepest(self, x: Float) -> tuple[Float, int]:
        """Return the multipliers of the point with the largest smallest margin."""
        # No margin exceeds the smallest radius; at that t the smallest ball is a point.
        t = -float(self.radii.min())
        x, steps = self.solve(t, x, early=False)
        for _ in range(30):
            # For these multipliers the dual is zero at the larger root of a quadratic in t.
            mean = float(x @ self.radii)
            rest = float(x @ (np.diag(self.gram) - self.radii**2) - x @ self.gram @ x)
            root = -mean + float(np.sqrt(max(mean * mean + rest, 0.0)))
            if root <= t + 1e-12 * (abs(t) + 1e-12):
                break
            t = root
            x, more = self.solve(t, x, early=False)
            steps += more
        return x, steps

    def result(
        self, status: Status, point: Float, upper: float, lower: float, began: float, steps: int = 0
    ) -> Intersection:
        span = float(np.linalg.norm(self.average)) + float(np.sqrt(np.diag(self.gram).max()))
        near = float(np.linalg.norm(point - self.average)) <= 1e-9 * span
        return Intersection(
            status=status,
            point=point,
            margins=node_margins(self.balls, point),
            lower_bound=lower,
            upper_bound=upper,
            is_average=near,
            method="balls: dual over the simplex",
            iterations=steps,
            seconds=time.perf_counter() - began,
            choice=(0,) * len(self.balls),
        )
