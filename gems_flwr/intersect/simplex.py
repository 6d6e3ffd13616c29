"""A concave quadratic over the simplex, exactly: ``max b.x - x.G.x``, x >= 0, sum x = 1.

The dual of intersecting K balls is such a problem (see `balls`), with a K x K matrix G
whatever the number of weights. Projected gradient with momentum finds which entries are
positive; an active-set method finishes to machine precision.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gems_flwr.typing import Float

Stop = Callable[[Float], bool]


def project_to_simplex(v: Float) -> Float:
    """Return the nearest point of the simplex (sorting; Held, Wolfe and Crowder 1974)."""
    ordered = np.sort(v)[::-1]
    sums = np.cumsum(ordered) - 1.0
    last = np.flatnonzero(ordered - sums / np.arange(1, len(v) + 1) > 0)[-1]
    return np.asarray(np.maximum(v - sums[last] / (last + 1), 0.0))


def maximise_on_simplex(
    linear: Float,
    gram: Float,
    start: Float | None = None,
    stop: Stop | None = None,
    tolerance: float = 1e-12,
) -> tuple[Float, int]:
    """Return the maximiser of ``linear . x - x . gram . x`` over the simplex.

    Parameters
    ----------
    linear : array of shape (K,)
        Linear term b.
    gram : array of shape (K, K)
        Symmetric positive semi-definite G.
    start : array of shape (K,), optional
        Point of the simplex to start from; uniform if left out.
    stop : callable, optional
        Looked at from time to time; the current point is returned once it says yes.
    tolerance : float
        Largest gain in a coordinate that is left, relative to the data's size.

    Returns
    -------
    tuple
        The point, and the number of steps.
    """
    count = len(linear)
    x = np.full(count, 1.0 / count) if start is None else project_to_simplex(start)
    scale = float(np.abs(linear).max() + np.abs(gram).max())
    if count == 1 or scale == 0 or (stop is not None and stop(x)):
        return x, 0
    x, steps, done = _momentum(linear, gram, x, scale, stop, tolerance)
    if done:
        return x, steps
    x, more = _active_set(linear, gram, x, scale, stop, tolerance)
    return x, steps + more


def _gain(linear: Float, gram: Float, x: Float) -> float:
    """Return how much more the steepest coordinate promises than the current point."""
    slope = linear - 2 * gram @ x
    return float(slope.max() - slope @ x)


def _momentum(
    linear: Float, gram: Float, x: Float, scale: float, stop: Stop | None, tolerance: float
) -> tuple[Float, int, bool]:
    """Accelerated projected gradient with restarts, at most 400 steps."""
    # A few power steps bound the largest eigenvalue from below; the factor makes it safe,
    # the row-sum norm is a bound from above.
    v = np.random.default_rng(0).random(len(x)) + 0.1
    for _ in range(20):
        image = gram @ v
        length = float(np.linalg.norm(image))
        if length == 0:
            break
        v = image / length
    bound = float(np.abs(gram).sum(axis=1).max())
    curvature = 2 * min(bound, 1.3 * float(v @ gram @ v)) + 1e-300 + 1e-15 * scale
    y, t = x, 1.0
    for step in range(1, 401):
        slope = linear - 2 * gram @ y
        fresh = project_to_simplex(y + slope / curvature)
        if slope @ (fresh - x) < 0:
            y, t = x, 1.0
            fresh = project_to_simplex(x + (linear - 2 * gram @ x) / curvature)
        following = (1 + np.sqrt(1 + 4 * t * t)) / 2
        y, x, t = fresh + (t - 1) / following * (fresh - x), fresh, following
        if step % 10 == 0:
            if stop is not None and stop(x):
                return x, step, True
            if _gain(linear, gram, x) <= tolerance * scale:
                return x, step, True
    return x, 400, False


def _active_set(
    linear: Float, gram: Float, x: Float, scale: float, stop: Stop | None, tolerance: float
) -> tuple[Float, int]:
    """Primal active-set steps: solve on the support, drop what turns negative, add the best."""
    support = np.flatnonzero(x > 1e-12)
    best, best_gain = x, _gain(linear, gram, x)
    for step in range(1, 3 * len(x) + 50):
        solved = _solve_on(linear, gram, support, scale)
        if (solved < 0).any():
            old = x[support]
            falling = solved < old
            ratio = np.where(falling & (solved < 0), old / np.where(falling, old - solved, 1), 1.0)
            share = float(ratio.min())
            moved = np.maximum(old + share * (solved - old), 0)
            x = np.zeros_like(x)
            x[support] = moved / moved.sum()
            keep = (moved > 1e-14) & (ratio > share * (1 + 1e-12))
            support = support[keep] if keep.any() else support[[int(np.argmax(moved))]]
            continue
        x = np.zeros_like(x)
        x[support] = solved / solved.sum()
        gain = _gain(linear, gram, x)
        if gain < best_gain:
            best, best_gain = x, gain
        if gain <= tolerance * scale or (stop is not None and stop(x)):
            return x, step
        slope = linear - 2 * gram @ x
        slope[support] = -np.inf
        if not np.isfinite(slope.max()):
            break
        support = np.append(support, int(np.argmax(slope)))
    return best, 3 * len(x) + 50


def _solve_on(linear: Float, gram: Float, support: NDArray[np.intp], scale: float) -> Float:
    """Solve the problem with only the sum constraint on some coordinates."""
    size = len(support)
    system = np.zeros((size + 1, size + 1))
    system[:size, :size] = 2 * gram[np.ix_(support, support)]
    # Equal centres make the block singular; a speck on the diagonal picks one solution.
    system[np.arange(size), np.arange(size)] += 1e-13 * scale
    system[:size, size] = system[size, :size] = 1.0
    right = np.append(linear[support], 1.0)
    try:
        return np.asarray(np.linalg.solve(system, right)[:size])
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.lstsq(system, right, rcond=None)[0][:size])
