"""Dividing training examples by the group that the data set says they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulations.partitions.partitioners import Indices, checked_labels, finished


@dataclass(frozen=True)
class Groups:
    """Node k holds group k, mixed with the others' as far as wanted (Guha 2018, Section 6.1).

    Each example of group g goes to node g with probability ``mixing``, the paper's γ, otherwise to
    one of the other nodes at random.

    Parameters
    ----------
    mixing : float
        In [0, 1]: 1 gives every node one group, 1 / nodes divides at random.

    Raises
    ------
    ValueError
        If ``mixing`` is out of range.
    """

    mixing: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.mixing <= 1:
            raise ValueError(f"partition.mixing must be in [0, 1], got {self.mixing}")

    def __call__(
        self,
        labels: NDArray[Any],
        *,
        nodes: int,
        classes: int,
        seed: int,
        groups: NDArray[Any] | None = None,
    ) -> list[Indices]:
        """Divide the examples; see `simulations.partitions.partitioners.Partition`.

        Parameters
        ----------
        labels, nodes, classes, seed
            As in `simulations.partitions.partitioners.Partition`.
        groups : np.ndarray or None
            The group of every example, 0 … ``nodes - 1``; None: the data set has none.

        Raises
        ------
        ValueError
            If there are no groups, or not as many as nodes.
        """
        labels = checked_labels(labels, nodes, classes, numbers=True)
        if groups is None:
            raise ValueError(
                "the data set has no groups: use mnist_permuted, digits_permuted, mnist_parity, "
                "digits_parity, tweets_by_terms or driving, or another partition"
            )
        own = np.asarray(groups, dtype=np.int64)
        if own.shape != labels.shape:
            raise ValueError(f"there must be one group per label, got {len(own)} groups")
        if nodes != (count := int(own.max()) + 1):
            raise ValueError(f"the data set has {count} groups: set nodes={count}, got {nodes}")
        rng = np.random.default_rng(seed)
        leaves = rng.random(len(own)) >= self.mixing
        # A step of 1 … nodes - 1 around the circle of nodes is a random other node.
        steps = rng.integers(1, nodes, size=len(own)) if nodes > 1 else 0
        owner = (own + leaves * steps) % nodes
        return finished(
            [np.flatnonzero(owner == node) for node in range(nodes)],
            "set another partition.mixing, or use more examples",
        )
