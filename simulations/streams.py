"""Streams: nodes that see a mini-batch at a time and are judged before they learn from it.

Which batch a node sees when is a function of the seed, the node and the round alone: a resumed run
sees what the unbroken one would have seen, and protocols are compared on the same batches. A round
here is the t of Kamp et al. 2018: one mini-batch of every node.

Concepts drift for all nodes at once (Section 5 there). The first is the data as they are; real data
drift by a permutation of labels or pixels, generated data by a new random model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.core.run import derive_seed, generator
from simulations.config import DriftConfig, StreamConfig
from simulations.data import Dataset, Examples, GeneratedDataset


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


class BatchSource:
    """The streams of all nodes.

    Parameters
    ----------
    dataset : Dataset
        Where the examples come from; a `GeneratedDataset` draws new ones for every batch.
    shares : sequence of Examples
        Every node's own training examples.
    config : StreamConfig
        ``share``: each node passes over its own examples, shuffled for each pass. ``pool``: all
        nodes together pass over all examples, each batch going to one node, as in the paper.
    batch_size : int
        Examples per batch, at least 1.
    seed : int
        The run's seed.
    """

    def __init__(
        self,
        dataset: Dataset,
        shares: Sequence[Examples],
        config: StreamConfig,
        *,
        batch_size: int,
        seed: int,
    ) -> None:
        self._dataset = dataset
        self._shares = shares
        self._pool = config.source == "pool"
        self._seed = seed
        self.drift = Drift(config.drift, derive_seed(seed, "drift"))
        self._size = batch_size

    def batch(self, node: int, number: int) -> Examples:
        """Return what a node sees in round `number`, from 1."""
        concept, size = self.drift.concept(number), self._size
        if isinstance(self._dataset, GeneratedDataset):
            return self._dataset.draw(concept, size, generator(self._seed, "draw", node, number))
        if self._pool:
            examples, owner = self._dataset.train, -1
            first = ((number - 1) * len(self._shares) + node) * size
        else:
            examples, owner = self._shares[node], node
            first = (number - 1) * size
        rows = self._rows(owner, len(examples), first, size)
        return self._under(concept, examples.features[rows], examples.labels[rows])

    def test(self, number: int) -> Examples:
        """Return the test examples under the concept of a round."""
        concept, test = self.drift.concept(number), self._dataset.test
        if concept and isinstance(self._dataset, GeneratedDataset):
            return self._dataset.draw(concept, len(test), generator(self._seed, "test", concept))
        return self._under(concept, test.features, test.labels) if concept else test

    def _under(self, concept: int, features: NDArray, labels: NDArray) -> Examples:
        return Examples(*self.drift.apply(concept, features, labels, self._dataset.classes))

    def _rows(self, owner: int, count: int, first: int, size: int) -> NDArray[np.int64]:
        """Return positions first … first + size - 1 of endless passes over `count` examples."""
        parts = []
        while size > 0:
            passed, start = divmod(first, count)
            part = self._order(owner, count, passed)[start : start + size]
            parts.append(part)
            first, size = first + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @functools.lru_cache(maxsize=2048)  # noqa: B019 - a run has one source
    def _order(self, owner: int, count: int, passed: int) -> NDArray[np.int64]:
        return generator(self._seed, "pass", owner, passed).permutation(count)
