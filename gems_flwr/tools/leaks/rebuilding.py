"""An attacker at the server who rebuilds samples from class moments, and how far that goes.

The mean m and the covariance of n samples in D > n dimensions leave nothing open but a rotation:
the samples are the rows of ``m + Q A``, where A has the covariance's directions, scaled, as rows,
and Q has orthonormal columns. Of all such tables the attacker looks for one whose values are in the
range that features have, by reflecting alternately on both sets (Douglas and Rachford): no other
knowledge of the data is used. Where fewer directions were sent than there are samples, the same
search finds some table with these directions, and the distances tell what that is worth.

`rebuilt_samples` holds the guesses against the samples. One counts as rebuilt if a guess is within
a tenth of the features' range of it (root mean square over features) *and* at most half as far as
anything that is known without the space: another sample of the class, or its mean. In few
dimensions some guess is near some sample by chance, so guesses that have the moments, but were not
searched for, are counted as well: what is above them came from the attack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist

from gems_flwr.spaces.cone import (
    ClassMomentCone,
    CommonCovariance,
    LowRankCovariance,
)
from gems_flwr.tools.leaks.exposure import own_covariance
from gems_flwr.typing import Float

STEP = 0.9
# In units of the features' range, per feature; a guess must be so much nearer than what is known.
NEAR, MUCH_NEARER = 0.1, 0.5
# More samples than this are not searched for: it takes long, and finds nothing unless as many
# directions as samples were sent, which shows without a search.
MOST_SAMPLES = 300


def sent_directions(cone: ClassMomentCone, entry: int) -> Float:
    """Return the directions of an entry's covariance as rows, as long as their deviations.

    No row where the entry is a mean alone or shows variances only.
    """
    covariance, place = own_covariance(cone, entry)
    if covariance is None:
        return np.zeros((0, cone.num_features))
    if isinstance(covariance, CommonCovariance):
        own = covariance.own(place)
        return np.zeros((0, cone.num_features)) if own is None else own[0]
    if isinstance(covariance, LowRankCovariance):
        return covariance.factor(place).astype(np.float64).T
    return main_directions(covariance.dense_matrix(place), int(cone.counts[entry]))


def main_directions(covariance: Float, count: int) -> Float:
    """Return the directions of a covariance that `count` samples can have, as long as deviations.

    No more than n - 1 of them can come from n samples; the rest is rounding, or noise.
    """
    values, vectors = np.linalg.eigh(covariance)
    first = len(values) - min(count - 1, len(values))
    return np.asarray((vectors[:, first:] * np.sqrt(np.maximum(values[first:], 0))).T)


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
    """Return a table of samples in a range that has a mean (D,) and a covariance.

    `directions` (r, D) are those of `sent_directions`. With 0 `iterations` it is any table with
    these moments, which is what guessing without a search comes to.
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
    return np.asarray(cdist(samples, guesses).min(axis=1) / np.sqrt(samples.shape[1]))


@dataclass(frozen=True)
class Rebuilt:
    """What came of rebuilding a class; distances are per feature, in units of their range."""

    samples: int
    rebuilt: int
    by_chance: int  # how many guesses without a search come as near
    nearest: float  # of the best guess from a sample

    @property
    def is_attack(self) -> bool:
        """Whether more were rebuilt than chance explains (two deviations)."""
        return self.rebuilt > self.by_chance + 2 * math.sqrt(self.by_chance)


def rebuilt_samples(
    mean: Float,
    directions: Float,
    samples: Float,
    everything: Float,
    *,
    iterations: int | None = None,
    seed: int = 0,
) -> Rebuilt | None:
    """Try to rebuild the samples (n, D) of a class from what was sent; see `sent_directions`.

    The range of features is known by `everything` that the node has. None if there are too many
    samples, or fewer than two, to try it.
    """
    count = len(samples)
    if not 2 <= count <= MOST_SAMPLES:
        return None
    # The attacker knows the range of all features together; where features differ by orders of
    # magnitude, that of each order.
    ranges = np.ptp(everything, axis=0)
    units = np.where(ranges > 0, 10.0 ** np.rint(np.log10(np.maximum(ranges, 1e-300))), 1.0)
    scaled, known = samples / units, everything / units
    low, high = float(known.min()), float(known.max())
    width = (high - low) or 1.0
    if iterations is None:
        iterations = int(np.clip(20_000 // count, 100, 600))
    sent = (mean / units, directions / units, count, low, high)
    guesses = rebuild_table(*sent, iterations=iterations, seed=seed)
    chance = rebuild_table(*sent, iterations=0, seed=seed + 1)
    anyway = _known_anyway(scaled) / width
    found, lucky = (nearest_distances(each, scaled) / width for each in (guesses, chance))
    near = np.minimum(NEAR, MUCH_NEARER * anyway)
    return Rebuilt(
        samples=count,
        rebuilt=int((found <= near).sum()),
        by_chance=int((lucky <= near).sum()),
        nearest=float(found.min()),
    )


def _known_anyway(samples: Float) -> Float:
    """Return how far each sample is from another one, or from the mean of the others."""
    distances = cdist(samples, samples)
    np.fill_diagonal(distances, np.inf)
    count = len(samples)
    # The mean without the sample is n / (n - 1) times as far as the mean with it.
    apart = np.linalg.norm(samples - samples.mean(axis=0), axis=1) * (count / (count - 1))
    return np.asarray(np.minimum(distances.min(axis=1), apart) / np.sqrt(samples.shape[1]))
