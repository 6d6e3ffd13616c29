"""How many samples of a class were rebuilt, held against the samples themselves.

The attack is that of `gems_flwr.leaks.reconstruction`. A sample counts as rebuilt if a guess is
within a tenth of the features' range of it (root mean square over features) *and* at most half as
far as anything that is known without the space: another sample of the class, or its mean. Of a
narrow class anybody's sample is near everybody's, which is nothing that the space gives away.

In few dimensions some guess is near some sample by chance. So guesses that have the moments, but
were not searched for, are counted as well: what is above them came from the attack.

Decided here: the attacker knows the range of all features together, as the study's does; where
features differ by orders of magnitude, that of each order (`automatic_rank.feature_units`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from gems_flwr.leaks.reconstruction import nearest_distances, rebuild_table
from gems_flwr.moments.automatic_rank import feature_units
from gems_flwr.typing import Float

# In units of the features' range, per feature; as in the study.
NEAR = 0.1
# A guess must be so much nearer than what is known anyway.
MUCH_NEARER = 0.5
# More samples than this are not searched for: it takes long, and finds nothing unless as many
# directions as samples were sent, which shows without a search.
MOST_SAMPLES = 300


@dataclass(frozen=True)
class Rebuilt:
    """What came of rebuilding a class.

    Parameters
    ----------
    samples : int
        Samples of the class.
    rebuilt : int
        How many of them were rebuilt.
    by_chance : int
        How many guesses without a search come as near.
    nearest : float
        Distance of the best guess from a sample, per feature, in units of the features' range.
    anyway : float
        Median distance of a sample from the nearest thing that is known without the space.
    """

    samples: int
    rebuilt: int
    by_chance: int
    nearest: float
    anyway: float

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
    """Try to rebuild the samples of a class from its moments.

    Parameters
    ----------
    mean, directions : arrays of shapes (D,) and (r, D)
        What was sent; see `reconstruction.sent_directions`.
    samples : array of shape (n, D)
        The samples of the class, n >= 2.
    everything : array of shape (m, D)
        All samples of the node, by which the range of features is known.
    iterations : int, optional
        How long to search; by default about as long for every n.
    seed : int
        Where to begin.

    Returns
    -------
    Rebuilt or None
        None if there are too many samples, or fewer than two, to try it.
    """
    count = len(samples)
    if not 2 <= count <= MOST_SAMPLES:
        return None
    units = feature_units(torch.from_numpy(everything))
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
    return Rebuilt(
        samples=count,
        rebuilt=int(_is_rebuilt(found, anyway).sum()),
        by_chance=int(_is_rebuilt(lucky, anyway).sum()),
        nearest=float(found.min()),
        anyway=float(np.median(anyway)),
    )


def _is_rebuilt(distances: Float, anyway: Float) -> Float:
    return np.asarray((distances <= NEAR) & (distances <= MUCH_NEARER * anyway))


def _known_anyway(samples: Float) -> Float:
    """Return how far each sample is from another one, or from the mean of the others."""
    squares = (samples**2).sum(axis=1)
    distances = squares[:, None] + squares - 2 * samples @ samples.T
    np.fill_diagonal(distances, np.inf)
    count = len(samples)
    # The mean without the sample is n / (n - 1) times as far as the mean with it.
    apart = (samples - samples.mean(axis=0)) * (count / (count - 1))
    nearest = np.minimum(distances.min(axis=1), (apart**2).sum(axis=1))
    return np.asarray(np.sqrt(np.maximum(nearest, 0) / samples.shape[1]))
