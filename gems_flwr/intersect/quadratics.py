"""The dual of axis-aligned quadratics and half-spaces, for ellipsoids and mixed spaces.

Appendix A of 2019 replaces balls by ellipsoids and descends on Eq. 2 as before, with no
verdict. Every ball or axis-aligned ellipsoid is ``q_k(w) = sum_i a_ki w_i^2 - 2 b_ki w_i + g_k``
up to a positive factor, and a half-space is the same with a = 0. For multipliers x on
the simplex the minimum over w is one division per coordinate::

    A = sum_k x_k a_k,  B = sum_k x_k b_k,  w = B / A,
    dual(x) = sum_k x_k g_k - sum_i B_i^2 / A_i

concave in x, with gradient ``q(w)`` and Hessian ``-2 J^T diag(1/A) J``,
``J_k = b_k - a_k w``. Newton steps, each a quadratic over the simplex as for balls, maximise it.
``dual(x) > 0`` proves emptiness whatever x is; ``max_k q_k(w) <= 0`` proves membership.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from gems_flwr.intersect.simplex import maximise_on_simplex
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.typing import Float


@dataclasses.dataclass(frozen=True, eq=False)
class Quadratics:
    """Constraints ``sum_i a_ki w_i^2 - 2 b_ki w_i + g_k <= 0``, one per row.

    Parameters
    ----------
    a, b : array of shape (K, d)
        Curvatures (not negative) and linear terms.
    g : array of shape (K,)
        Constants.
    """

    a: Float
    b: Float
    g: Float

    @classmethod
    def of(cls, space: BallSpace | EllipsoidSpace, origin: Float) -> Quadratics:
        """Return the constraint of one space, with weights counted from ``origin``."""
        center = space.center.astype(np.float64) - origin
        if isinstance(space, BallSpace):
            # Over r^2, so that all constraints are free of units; over 1 for a point.
            factor = 1.0 / space.radius.value**2 if space.radius.value > 0 else 1.0
            a = np.full_like(center, factor)
            constant = -1.0 if space.radius.value > 0 else 0.0
        else:
            a = 1.0 / space.radii.astype(np.float64) ** 2
            constant = -1.0
        return cls(a[None], (a * center)[None], np.array([a @ center**2 + constant]))

    @classmethod
    def planes(cls, normals: Float, offset: float = 0.0) -> Quadratics:
        """Return half-spaces ``n . w <= offset`` for the rows n."""
        constants = np.full(len(normals), -offset)
        return cls(np.zeros_like(normals), -normals / 2, constants)

    def __add__(self, other: Quadratics) -> Quadratics:
        """Return both sets of constraints, these first."""
        joined = (np.concatenate([getattr(self, n), getattr(other, n)]) for n in ("a", "b", "g"))
        return Quadratics(*joined)

    def values(self, w: Float) -> Float:
        """Return the constraints at one point; up to 0 inside."""
        return np.asarray(self.a @ (w * w) - 2 * self.b @ w + self.g)

    def minimiser(self, x: Float) -> tuple[Float, float]:
        """Return the w for multipliers x, and the dual value."""
        curvature, linear = x @ self.a, x @ self.b
        safe = np.maximum(curvature, 1e-300)
        w = linear / safe
        value = float(x @ self.g - linear @ w)
        # Without curvature a linear term is unbounded below: no bound at all.
        if (curvature <= 0).any() and np.abs(linear[curvature <= 0]).max() > 0:
            value = -np.inf
        return w, value

    def rounding(self, x: Float, w: Float) -> float:
        """Return a bound on the rounding error of the dual value at x."""
        linear = x @ self.b
        return 1e-12 * float(np.abs(x * self.g).sum() + np.abs(linear * w).sum())


def maximise_dual(
    problem: Quadratics,
    start: Float | None = None,
    stop: Callable[[Float, float], bool] | None = None,
    steps: int = 60,
    tolerance: float = 1e-9,
) -> tuple[Float, int]:
    """Return multipliers that maximise the dual.

    Parameters
    ----------
    problem : Quadratics
        Constraints; the first must have curvature everywhere.
    start : array of shape (K,), optional
        Multipliers to start from.
    stop : callable, optional
        Given w and the dual value, whether that is enough.
    steps : int
        Newton steps at most.
    tolerance : float
        Largest constraint minus dual value, relative to the larger of it and 1.
    """
    count = len(problem.g)
    curved = (problem.a > 0).all(axis=1)
    x = curved / curved.sum() if start is None else np.asarray(start, dtype=np.float64)
    w, value = problem.minimiser(x)
    for step in range(1, steps + 1):
        slopes = problem.values(w)
        gap = float(slopes.max()) - value
        if gap <= tolerance * max(1.0, abs(value)) or (stop is not None and stop(w, value)):
            return x, step
        jacobian = problem.b - problem.a * w
        curvature = np.maximum(x @ problem.a, 1e-300)
        gram = (jacobian / curvature) @ jacobian.T
        target, _ = maximise_on_simplex(slopes, gram, x)
        share, direction = 1.0, target - x
        promise = float(slopes @ direction)
        improved = False
        for _ in range(50):
            candidate = x + share * direction
            # Keep a trace of curvature, or the next minimiser is unbounded.
            if float(candidate[curved].sum()) < 1e-9:
                candidate = candidate * (1 - 1e-9) + 1e-9 * curved / curved.sum()
            w_new, fresh = problem.minimiser(candidate)
            if fresh >= value + 1e-4 * share * promise and fresh > value:
                x, w, value, improved = candidate, w_new, fresh, True
                break
            share /= 2
        if not improved:
            return x, step
    return np.asarray(x).reshape(count), steps
