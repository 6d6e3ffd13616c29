"""The 2018 paper's merge: every pair of neurons whose balls meet becomes a neuron.

Guha 2018, Algorithm 2: for all pairs of neurons of two learners with intersecting spaces the
intersection ``(c1 r2 + c2 r1) / (r1 + r2)`` is inserted; neurons that meet none are inserted as
they are. A neuron may be in many pairs, so the layer may become wider than all layers together.

Decided here: among more than two nodes, neurons of any two different nodes make pairs. Balls
that a node makes very large meet everything, so at most `MAX_PAIRS` are taken: those whose balls
reach farthest into each other. A neuron that all of them left out is inserted as it is.
"""

from __future__ import annotations

import numpy as np

from gems_flwr.neuron_merging.distinct import Distinct
from gems_flwr.neuron_merging.may_meet import pairs_that_may_meet
from gems_flwr.typing import Float

# A layer of so many neurons is more than any network here has, and still a moderate message.
MAX_PAIRS = 10_000
BLOCK = 2**16


def merge_all_pairs(items: Distinct, max_pairs: int = MAX_PAIRS) -> tuple[Float, list[list[int]]]:
    """Return the inserted neurons, and the items of each.

    Parameters
    ----------
    items : Distinct
        All neurons; one that several nodes have is inserted whatever else it meets.
    max_pairs : int
        Most pairs to insert, at least 0.
    """
    centers = items.centers.astype(np.float64)
    left, right, ratio = _meeting(items, centers)
    if len(left) > max_pairs:
        best = np.sort(np.argsort(ratio, kind="stable")[:max_pairs])
        left, right = left[best], right[best]
    paired = np.zeros(len(items), dtype=np.bool_)
    paired[left], paired[right] = True, True
    shared = items.nodes.sum(axis=1) > 1
    alone = np.flatnonzero(~paired | shared)
    r_left, r_right = items.radii[left, None], items.radii[right, None]
    points = (centers[left] * r_right + centers[right] * r_left) / (r_left + r_right)
    pairs = [[i, j] for i, j in zip(left.tolist(), right.tolist(), strict=True)]
    return np.concatenate([centers[alone], points]), [[i] for i in alone.tolist()] + pairs


def _meeting(items: Distinct, centers: Float) -> tuple[np.ndarray, np.ndarray, Float]:
    """Return pairs of neurons of two nodes whose balls meet, and distance over summed radii."""
    may = np.triu(pairs_that_may_meet(centers, items.radii), k=1)
    # Neurons of one and the same node are no pair, whatever they meet.
    one = items.nodes.sum(axis=1) == 1
    owner = items.nodes.argmax(axis=1)
    may &= ~(one[:, None] & one[None] & (owner[:, None] == owner[None]))
    left, right = np.nonzero(may)
    reach = items.radii[left] + items.radii[right]
    apart = np.empty(len(left))
    for start in range(0, len(left), BLOCK):
        some = slice(start, start + BLOCK)
        apart[some] = np.linalg.norm(centers[left[some]] - centers[right[some]], axis=1)
    # Different centres, so what meets has radii that are not both zero.
    meets = apart <= reach
    return left[meets], right[meets], apart[meets] / reach[meets]
