"""A point in several neurons' balls, and a ball around it that is in all of them.

2019, Section 3.2 applies Eq. 2 to every tuple of neurons. Here two cheaper proofs come first: the
mean of the centres lies in all balls (what the papers' descent starts from), or a ball known to lie
inside all balls so far meets the new one. Only then the dual of `gems_flwr.intersect.balls`.

Decided here: to merge, a point must be in every ball to 1e-9 of its radius (plus the
rounding of the centre's own digits if the radius is not 0). If the dual proves that there is none,
or finds none that precise, the neurons stay apart: that costs width, never validity.
"""

from __future__ import annotations

import numpy as np

from gems_flwr.intersect.simplex import maximise_on_simplex
from gems_flwr.typing import Float


def inside(point: Float, centers: Float, radii: Float) -> bool:
    """Return whether a point lies in every ball, up to double-precision rounding."""
    distances = np.linalg.norm(centers - point, axis=1)
    digits = 1e-12 * np.abs(centers).max() * (radii > 0)
    return bool((distances <= radii * (1 + 1e-9) + digits).all())


def inner_ball(z: Float, s: float, c: Float, r: float) -> tuple[Float, float] | None:
    """Return a ball inside both of two balls, or None if they do not meet.

    If one ball holds the other it is the smaller one, else the largest that fits between their
    surfaces: its centre is on the line of centres.

    Parameters
    ----------
    z, c : array of shape (d,)
        Centres.
    s, r : float
        Radii.
    """
    distance = float(np.linalg.norm(c - z))
    if distance > s + r:
        return None
    if distance + r <= s:
        return c, r
    if distance + s <= r:
        return z, s
    t = (s - r + distance) / (2 * distance)
    return z + t * (c - z), max((s + r - distance) / 2, 0.0)


def mean_if_common(centers: Float, radii: Float, counts: Float) -> Float | None:
    """Return the mean of the centres, each taken so many times, if it lies in every ball."""
    if len(centers) == 1:
        return np.asarray(centers[0])
    mean = np.asarray(np.average(centers, axis=0, weights=counts))
    return mean if inside(mean, centers, radii) else None


def common_point(centers: Float, radii: Float) -> Float | None:
    """Return a point in all balls, or None if none is found.

    Parameters
    ----------
    centers : array of shape (n, d)
        Centres of the balls.
    radii : array of shape (n,)
        Their radii.
    """
    mean = centers.mean(axis=0)
    # With a radius of 0 the smallest ball's centre is all there is to try.
    smallest = centers[int(np.argmin(radii))]
    for point in (mean, smallest):
        if inside(point, centers, radii):
            return np.asarray(point)
    shifted = centers - mean
    point = np.asarray(mean + _multipliers(shifted @ shifted.T, radii) @ shifted)
    return point if inside(point, centers, radii) else None


def _multipliers(gram: Float, radii: Float) -> Float:
    """Return weights of the centres whose mean is in all balls, or the dual's maximum."""
    linear = np.diag(gram) - radii**2
    noise = 1e-12 * float(np.diag(gram).max() + (radii**2).max())

    def decided(x: Float) -> bool:
        pull = gram @ x
        square = float(x @ pull)
        empty = float(x @ linear) - square > noise
        return empty or float((linear - 2 * pull).max()) + square <= -noise

    return maximise_on_simplex(linear, gram, None, decided)[0]
