"""Which mini-batch a node sees when: a function of the seed, the node and the round alone.

So a node needs no memory of where it is in its stream, a resumed run sees what the unbroken one
would have seen, and protocols are compared on the same batches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.runtime.seeding import derive_seed, generator
from simulations.data.examples import Dataset, Examples
from simulations.data.graphical import GeneratedDataset
from simulations.options import StreamConfig
from simulations.streams.drift import Drift


class BatchSource:
    """The streams of all nodes.

    Parameters
    ----------
    dataset : Dataset
        Where the examples come from; a `GeneratedDataset` draws new ones for every batch.
    shares : sequence of Examples
        Every node's own training examples.
    config : StreamConfig
        ``share``: each node passes over its own examples again and again, shuffled anew each
        time. ``pool``: all nodes together pass over all examples, each batch going to one node,
        which is the paper's setting of one distribution for all.
    batch_size : int
        Examples per batch B, at least 1; with a `rate_spread` s those of the nodes are spread
        evenly from B(1 − s) to B(1 + s).
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
        spread = np.linspace(-config.rate_spread, config.rate_spread, len(shares))
        self.sizes = [max(1, round(batch_size * (1 + each))) for each in spread]

    def batch(self, node: int, number: int) -> tuple[NDArray, NDArray]:
        """Return features, as stored, and labels of a node's batch of round `number`, from 1."""
        concept, size = self.drift.concept(number), self.sizes[node]
        if isinstance(self._dataset, GeneratedDataset):
            rng = generator(self._seed, "draw", node, number)
            drawn = self._dataset.draw(concept, size, rng)
            return drawn.features, drawn.labels
        if self._pool:
            examples, owner = self._dataset.train, -1
            first = (number - 1) * sum(self.sizes) + sum(self.sizes[:node])
        else:
            examples, owner = self._shares[node], node
            first = (number - 1) * size
        rows = self._rows(owner, len(examples), first, size)
        return self.drift.apply(
            concept, examples.features[rows], examples.labels[rows], self._dataset.classes
        )

    def test(self, number: int) -> Examples:
        """Return the test examples under the concept of a round."""
        concept, test = self.drift.concept(number), self._dataset.test
        if isinstance(self._dataset, GeneratedDataset):
            if concept == 0:
                return test
            return self._dataset.draw(concept, len(test), generator(self._seed, "test", concept))
        classes = self._dataset.classes
        return Examples(*self.drift.apply(concept, test.features, test.labels, classes))

    def _rows(self, owner: int, count: int, first: int, size: int) -> NDArray[np.int64]:
        """Return positions first … first + size − 1 of endless passes over `count` examples."""
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
