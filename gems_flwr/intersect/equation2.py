"""Gradient descent on Eq. 2, as the papers do it: the reference.

2019, Section 3.1: minimise ``sum_k max(0, |c_k - w| - r_k)`` from the parameter average and
stop at the first point in all spaces. It works for any space with a distance. If it does not
arrive, nothing is known: the answer is ``undecided``, never ``empty``.

Decided here: the step is Polyak's, ``value / |gradient|^2`` (the target value is 0), which
needs no rate; the papers give none. Kept for comparison; `balls` and `mixed` are
faster and give a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from gems_flwr.intersect.result import Intersection, in_all, node_margins
from gems_flwr.spaces.ball import BallSpace


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
