"""Differentially private counts of right answers, for several models at once.

One sample changes the number of samples of its class by 1 and the number of right answers of each
of k models by at most 1: together at most sqrt(k + 1), whatever the number of classes. Gaussian
noise as in `gems_flwr.moments.private_release`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from gems_flwr.moments.private_release import gaussian_noise, normal_source
from gems_flwr.typing import Float


@dataclasses.dataclass(frozen=True)
class PrivateChoice:
    """Parameters of a private judgement of several models.

    Parameters
    ----------
    epsilon, delta : float
        As in `gems_flwr.moments.private_release.PrivateRelease`.
    candidates : int
        Models that are judged, at least 1.
    """

    epsilon: float
    delta: float
    candidates: int

    def __post_init__(self) -> None:
        _ = self.noise

    @property
    def noise(self) -> float:
        """Standard deviation of the noise of every number."""
        return gaussian_noise(self.epsilon, self.delta, math.sqrt(self.candidates + 1))

    @property
    def squared_mu(self) -> float:
        """What a release adds to the privacy spent."""
        return (self.candidates + 1) / self.noise**2

    def noised(self, seen: Float, right: Float, seed: int | None = None) -> tuple[Float, Float]:
        """Return noisy counts, none negative and no right answers beyond what was seen.

        Parameters
        ----------
        seen : array of shape (K,)
            Samples of each class.
        right : array of shape (candidates, K)
            Right answers.
        seed : int, optional
            Of the noise, for simulations.
        """
        normal = normal_source(seed)
        total = np.maximum(0.0, seen + self.noise * normal(seen.shape))
        return total, np.clip(right + self.noise * normal(right.shape), 0.0, total)
