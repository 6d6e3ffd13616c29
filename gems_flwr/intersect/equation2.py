"""Gradient descent on Eq. 2, as the papers do it: the reference.

2019, Section 3.1: minimise ``sum_k max(0, |c_k - w| - r_k)`` from the parameter average and
stop at the first point in all spaces. It works for any space with a distance. If it does not
arrive, nothing is known: the answer is ``undecided``, never ``empty``.

Decided here: for balls the step is Polyak's, ``value / |gradient|^2`` (the target value is 0),
which needs no rate; the papers give none. For ellipsoids it is the released code's: levels in
place of distances, ``sum_k max(0, |(w - c_k) / r_k| - 1)``, and a fixed rate. Kept for comparison;
`balls` and `mixed` are faster and give a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from gems_flwr.intersect.result import Intersection, in_all, node_margins
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace


def descend_equation2(balls: Sequence[BallSpace], steps: int = 20_000) -> Intersection:
    """Return the first point in all balls that descent on Eq. 2 meets, if it does.

    Parameters
    ----------
    balls : sequence of BallSpace
        One per node.
    steps : int
        Steps at most.
    """
    began = time.perf_counter()
    centers = np.stack([ball.center for ball in balls]).astype(np.float64)
    radii = np.array([ball.radius.value for ball in balls])
    average = centers.mean(axis=0)
    w, best, best_value, step = average, average, np.inf, 0
    for step in range(steps + 1):  # noqa: B007
        offsets = w - centers
        lengths = np.linalg.norm(offsets, axis=1)
        excess = np.maximum(lengths - radii, 0)
        value = float(excess.sum())
        if value < best_value:
            best, best_value = w, value
        outside = excess > 0
        if not outside.any():
            break
        gradient = (offsets[outside] / lengths[outside, None]).sum(axis=0)
        squared = float(gradient @ gradient)
        if squared < 1e-24:
            break
        w = w - value / squared * gradient
    feasible = in_all(balls, best)
    return Intersection(
        status="feasible" if feasible else "undecided",
        point=best,
        margins=node_margins(balls, best),
        lower_bound=-np.inf,
        upper_bound=best_value,
        is_average=step == 0,
        method="Eq. 2: subgradient descent",
        iterations=step,
        seconds=time.perf_counter() - began,
        choice=(0,) * len(balls),
    )


def descend_levels(
    ellipsoids: Sequence[EllipsoidSpace], rate: float = 0.001, steps: int = 100_000
) -> Intersection:
    """Return where the released code's descent for ellipsoids ends.

    Parameters
    ----------
    ellipsoids : sequence of EllipsoidSpace
        One per node.
    rate : float
        Factor of the gradient, above 0; the released code's by default.
    steps : int
        Steps at most, as in the released code; it stops at the first point in all ellipsoids.
    """
    began = time.perf_counter()
    centers = np.stack([each.center for each in ellipsoids]).astype(np.float64)
    squares = np.stack([each.radii for each in ellipsoids]).astype(np.float64) ** 2
    w, step = centers.mean(axis=0), 0
    while True:
        slopes = (w - centers) / squares
        levels = np.sqrt(np.einsum("kd,kd->k", slopes, w - centers))
        outside = levels > 1
        if step == steps or not outside.any():
            break
        w = w - rate * (slopes[outside] / levels[outside, None]).sum(axis=0)
        step += 1
    return Intersection(
        status="feasible" if in_all(ellipsoids, w) else "undecided",
        point=w,
        margins=node_margins(ellipsoids, w),
        lower_bound=-np.inf,
        upper_bound=float(np.maximum(levels - 1, 0).sum()),
        is_average=step == 0,
        method="Eq. 2: gradient descent on levels",
        iterations=step,
        seconds=time.perf_counter() - began,
        choice=(0,) * len(ellipsoids),
    )
