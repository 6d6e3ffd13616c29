"""A merged hidden layer, and the proof that every node's neurons are in it.

2019, Section 3.2, step 3: for every node k and neuron i there is a merged neuron in the
ball of i. The released code does not check that; `MergedLayer.verify` does, from the balls alone.

Decided here: membership is that of `NeuronBalls.contains`, that is up to single precision, as
both balls and merged layers travel in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.typing import Float

Index = NDArray[np.intp]
Member = tuple[int, int]
MergeMethod = Literal["kmeans", "verified", "pairs", "concat"]

TOLERANCE = 1e-6
BLOCK = 256


@dataclasses.dataclass(frozen=True, eq=False)
class MergedLayer:
    """M neurons that stand for those of all nodes, most important first.

    Parameters
    ----------
    weights : array of shape (M, d)
        One merged neuron per row, columns as in `NeuronBalls.centers`.
    origins : tuple of M tuples
        Each merged neuron's members, as node index and neuron index; with ``pairs`` a neuron may
        be a member of several.
    dropped : tuple of pairs
        Members lost to the size budget.
    method : {"kmeans", "verified", "pairs", "concat"}
        How they were merged.
    importance : array of shape (M,)
        Sum of the members' importance, of those too that a merged neuron stands for
        without being in their balls.

    Raises
    ------
    ValueError
        If the shapes do not fit together.
    """

    weights: Float
    origins: tuple[tuple[Member, ...], ...]
    dropped: tuple[Member, ...]
    method: MergeMethod
    importance: Float

    def __post_init__(self) -> None:
        if self.weights.ndim != 2 or not len(self.weights):
            raise ValueError(f"weights: expected shape (any, any), got {self.weights.shape}")
        count = len(self.weights)
        if len(self.origins) != count or self.importance.shape != (count,):
            got = f"{len(self.origins)} origins and importance of shape {self.importance.shape}"
            raise ValueError(f"origins, importance: expected {count} of each, got {got}")
        self.weights.flags.writeable = False
        self.importance.flags.writeable = False

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def groups(self) -> int:
        """Merged neurons that have more than one member."""
        return sum(len(members) > 1 for members in self.origins)

    def uncovered(self, layers: Sequence[NeuronBalls]) -> list[Member]:
        """Return all neurons, dropped ones too, with no merged neuron in their ball."""
        rows, members = self._table()
        missing = [np.ones(len(layer), dtype=np.bool_) for layer in layers]
        for (node, neuron), held in zip(members, self._held(layers, rows, members), strict=True):
            missing[node][neuron] &= not held
        squares = (self.weights**2).sum(axis=1)
        found = []
        for node, layer in enumerate(layers):
            left = np.flatnonzero(missing[node])
            for start in range(0, len(left), BLOCK):
                some = left[start : start + BLOCK]
                # The nearest merged neuron decides, and only that is looked at closely.
                near = squares - 2 * layer.centers[some].astype(np.float64) @ self.weights.T
                pairs = [(node, int(i)) for i in some]
                held = self._held(layers, near.argmin(axis=1), pairs)
                found += [pair for pair, is_held in zip(pairs, held, strict=True) if not is_held]
        return found

    def verify(self, layers: Sequence[NeuronBalls]) -> None:
        """Check that every neuron that was not dropped has a merged neuron in its ball.

        Parameters
        ----------
        layers : sequence of NeuronBalls
            What was merged, in the same order.

        Raises
        ------
        ValueError
            If a merged neuron is outside the ball of one of its members, or a neuron is
            neither a member nor dropped. The message names node and neuron.
        """
        rows, members = self._table()
        for node, neuron in (*members, *self.dropped):
            if not (0 <= node < len(layers) and 0 <= neuron < len(layers[node])):
                raise ValueError(f"node {node}, neuron {neuron}: there is no such neuron")
        held = self._held(layers, rows, members)
        if not held.all():
            first = int(np.argmin(held))
            node, neuron = members[first]
            away = np.linalg.norm(self.weights[rows[first]] - layers[node].centers[neuron])
            radius = float(layers[node].radii[neuron])
            raise ValueError(
                f"node {node}, neuron {neuron}: merged neuron {rows[first]} is {away:g} away, "
                f"expected at most its radius {radius:g}"
            )
        known = {*members, *self.dropped}
        for node, layer in enumerate(layers):
            for neuron in range(len(layer)):
                if (node, neuron) not in known:
                    raise ValueError(f"node {node}, neuron {neuron}: has no merged neuron")

    def _table(self) -> tuple[Index, list[Member]]:
        """Return all members, and of each the row of its merged neuron."""
        rows = np.repeat(np.arange(len(self)), [len(members) for members in self.origins])
        return rows, [member for members in self.origins for member in members]

    def _held(
        self, layers: Sequence[NeuronBalls], rows: Index, members: Sequence[Member]
    ) -> NDArray[np.bool_]:
        return in_balls(layers, self.weights[rows], members)


def in_balls(
    layers: Sequence[NeuronBalls], points: Float, members: Sequence[Member]
) -> NDArray[np.bool_]:
    """Return for each point whether it is in its member's ball, as `NeuronBalls.contains` does."""
    held = np.zeros(len(members), dtype=np.bool_)
    pairs = np.array(members, dtype=np.intp).reshape(-1, 2)
    for node in np.unique(pairs[:, 0]).tolist():
        mine = np.flatnonzero(pairs[:, 0] == node)
        centers = layers[node].centers[pairs[mine, 1]].astype(np.float64)
        radii = layers[node].radii[pairs[mine, 1]].astype(np.float64)
        slack = TOLERANCE * (radii + np.abs(centers).max(axis=1))
        held[mine] = np.linalg.norm(points[mine] - centers, axis=1) <= radii + slack
    return held
