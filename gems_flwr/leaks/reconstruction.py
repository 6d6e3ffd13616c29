"""An attacker at the server who rebuilds samples from class moments.

The mean m and the covariance of n samples in D > n dimensions leave nothing open but a rotation:
the samples are the rows of ``m + Q A``, where A has the covariance's directions, scaled, as rows,
and Q has orthonormal columns. Of all such tables the attacker looks for one whose values are in the
range that features have, by reflecting alternately on both sets (Douglas and Rachford): no other
knowledge of the data is used. Where fewer directions were sent than there are samples, the same
search finds some table with these directions, and the distances tell what that is worth.
"""

from __future__ import annotations

import numpy as np

from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.covariance import LowRankCovariance
from gems_flwr.spaces.partial_covariance import Covariance, PartialCovariance
from gems_flwr.typing import Float

STEP = 0.9


def sent_directions(cone: ClassMomentCone, entry: int) -> Float:
    """Return the directions of an entry's covariance as rows, as long as their deviations.

    None, an array of shape (0, D), where the entry is a mean alone or shows variances only.
    """
    covariance: Covariance | None = cone.covariance
    place: int | None = entry
    if isinstance(covariance, PartialCovariance):
        place, covariance = covariance.place(entry), covariance.own
    if place is None or covariance is None:
        return np.zeros((0, cone.num_features))
    if isinstance(covariance, LowRankCovariance):
        return covariance.factor(place).astype(np.float64).T
    values, vectors = np.linalg.eigh(covariance.dense_matrix(place))
    # No more than n - 1 of them can come from n samples; the rest is rounding, or noise.
    most = min(int(cone.counts[entry]) - 1, len(values))
    if most == 0:
        return np.zeros((0, len(values)))
    return np.asarray((vectors[:, -most:] * np.sqrt(np.maximum(values[-most:], 0))).T)


def rebuild(
    cone: ClassMomentCone, entry: int, low: float, high: float, *, iterations: int, seed: int = 0
) -> Float:
    """Return the attacker's guess at the samples behind an entry, a row each.

    Parameters
    ----------
    cone : ClassMomentCone
        What the server received.
    entry : int
        Which entry.
    low, high : float
        Range of the features, which the attacker knows.
    iterations : int
        How long to search, at least 0; see `rebuild_table`.
    seed : int
        Where to begin.
    """
    mean, count = mean_values(cone)[entry], int(cone.counts[entry])
    directions = sent_directions(cone, entry)
    return rebuild_table(mean, directions, count, low, high, iterations=iterations, seed=seed)


def rebuild_table(
    mean: Float,
    directions: Float,
    count: int,
    low: float,
    high: float,
    *,
    iterations: int,
    seed: int = 0,
) -> Float:
    """Return a table of samples in a range that has a mean and a covariance.

    Parameters
    ----------
    mean : array of shape (D,)
        Mean of the samples.
    directions : array of shape (r, D)
        Directions of their covariance, as long as the deviations; `sent_directions`.
    count : int
        How many samples, at least 1.
    low, high : float
        Range of the features.
    iterations : int
        How long to search, at least 0: with 0 it is any table with these moments, which is what
        guessing without a search comes to.
    seed : int
        Where to begin.
    """
    directions = directions * np.sqrt(count)
    if not len(directions):
        return np.asarray(np.clip(mean, low, high)[None])

    def with_moments(table: Float) -> Float:
        """Return the nearest table with the moments that were sent."""
        seen = (table - mean) @ directions.T
        left, _, right = np.linalg.svd(seen - seen.mean(axis=0), full_matrices=False)
        return np.asarray(mean + left @ right @ directions)

    generator = np.random.default_rng(seed)
    table = with_moments(mean + generator.normal(size=(count, len(directions))) @ directions)
    for _ in range(iterations):
        inside = np.clip(table, low, high)
        table = table + STEP * (with_moments(2 * inside - table) - inside)
    return np.asarray(np.clip(with_moments(np.clip(table, low, high)), low, high))


def nearest_distances(guesses: Float, samples: Float) -> Float:
    """Return for each sample how far the nearest guess is: root mean square per feature."""
    squares = (samples**2).sum(1)[:, None] + (guesses**2).sum(1) - 2 * samples @ guesses.T
    return np.asarray(np.sqrt(np.maximum(squares.min(axis=1), 0) / samples.shape[1]))
