"""Concept drift: from some round on, the same inputs mean something else.

Concepts are numbered; the first is the data as they are. Real data drift by a permutation of the
labels or of the pixels, another one for every concept; generated data by a new random model. All
nodes drift at once, as in Kamp et al. 2018, Section 5. A round here is the paper's t: one
mini-batch of every node.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from gems_flwr.runtime.seeding import generator
from simulations.options import DriftConfig


class Drift:
    """When the concept changes, and what a concept does to examples.

    Parameters
    ----------
    config : DriftConfig
        Given rounds, or the probability of a drift in each round, or both.
    seed : int
        Source of the random rounds and of the permutations.
    """

    def __init__(self, config: DriftConfig, seed: int) -> None:
        self._config = config
        self._seed = seed

    def rounds(self, last: int) -> list[int]:
        """Return the rounds, up to `last`, in which a new concept begins."""
        given = set(self._config.rounds)
        if self._config.probability:
            # Drawn in order of rounds: a longer run drifts as a shorter one does.
            draws = generator(self._seed, "drift").random(last)
            given |= {int(i) + 1 for i in np.flatnonzero(draws < self._config.probability)}
        # Before the first round there is nothing to drift away from.
        return sorted(r for r in given if 1 < r <= last)

    def concept(self, number: int) -> int:
        """Return the concept of a round, from 0."""
        return len(self._rounds_up_to(-(-number // 1024) * 1024, number))

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - a run has one drift
    def _rounds_up_to(self, horizon: int, number: int) -> tuple[int, ...]:
        return tuple(r for r in self.rounds(horizon) if r <= number)

    def apply(
        self, concept: int, features: NDArray, labels: NDArray, classes: int
    ) -> tuple[NDArray, NDArray]:
        """Return examples as they are under a concept."""
        if concept == 0:
            return features, labels
        if self._config.kind == "labels":
            return features, self._permutation(concept, classes)[labels]
        order = self._permutation(concept, features[0].size)
        rows = features.reshape(len(features), -1)[:, order]
        return rows.reshape(features.shape), labels

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a run has one drift
    def _permutation(self, concept: int, size: int) -> NDArray[np.int64]:
        return generator(self._seed, "concept", concept).permutation(size)
