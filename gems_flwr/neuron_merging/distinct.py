"""The neurons of all nodes in one list, without repeats and in one order.

2019, Section 3.2 merges neurons and says nothing of their order. A node may number its neurons
as it likes (the paper's "model isomorphisms"), so the numbering must not decide who merges.

Decided here: equal centres are one neuron before anything else happens. It has the smallest
radius and the sum of the importance, and more than one member, be they of one node or of many:
keeping a feature twice keeps nothing apart. What is left is sorted by falling importance,
then by the bytes of the centre. Every way of merging works on that list.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.typing import Float

Members = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Distinct:
    """n different neurons, most important first.

    Parameters
    ----------
    centers : array of shape (n, d)
        No two rows are equal.
    radii : array of shape (n,)
        The smallest of the members'.
    importance : array of shape (n,)
        The sum of the members'.
    members : tuple of n tuples
        Node index and neuron index of all that have this centre.
    nodes : bool array of shape (n, K)
        Which nodes the members belong to.
    """

    centers: NDArray[np.float32]
    radii: Float
    importance: Float
    members: tuple[Members, ...]
    nodes: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.centers)


def distinct_neurons(layers: Sequence[NeuronBalls]) -> Distinct:
    """Return the different neurons of all nodes in an order that no numbering changes."""
    centers = np.concatenate([layer.centers for layer in layers])
    centers += np.float32(0)  # -0.0 and 0.0 are equal, but not their bytes.
    radii = np.concatenate([layer.radii for layer in layers]).astype(np.float64)
    importance = np.concatenate([_importance(layer) for layer in layers])
    node = np.repeat(np.arange(len(layers)), [len(layer) for layer in layers])
    neuron = np.concatenate([np.arange(len(layer)) for layer in layers])

    rows = centers.view(np.dtype((np.void, centers.itemsize * centers.shape[1]))).ravel()
    _, first, label = np.unique(rows, return_index=True, return_inverse=True)
    starts = np.concatenate([[0], np.cumsum(np.bincount(label))[:-1]])
    # Summed by size, so that the last digit does not depend on the numbering either.
    total = np.add.reduceat(importance[np.lexsort((importance, label))], starts)
    smallest = np.minimum.reduceat(radii[np.argsort(label, kind="stable")], starts)
    held = np.zeros((len(first), len(layers)), dtype=np.bool_)
    held[label, node] = True

    order = np.argsort(-total, kind="stable")
    members = _members(label, node, neuron, starts)
    return Distinct(
        centers=centers[first[order]],
        radii=smallest[order],
        importance=total[order],
        members=tuple(members[i] for i in order),
        nodes=held[order],
    )


def _importance(layer: NeuronBalls) -> Float:
    assert layer.importance is not None
    return layer.importance.astype(np.float64)


def _members(
    label: NDArray[np.intp],
    node: NDArray[np.intp],
    neuron: NDArray[np.intp],
    starts: NDArray[np.intp],
) -> list[Members]:
    order = np.lexsort((neuron, node, label))
    pairs = list(zip(node[order].tolist(), neuron[order].tolist(), strict=True))
    bounds = [*starts.tolist(), len(pairs)]
    return [tuple(pairs[a:b]) for a, b in itertools.pairwise(bounds)]
