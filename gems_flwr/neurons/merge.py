"""Merging the hidden neurons of many nodes into one layer.

Guha & Smith 2019, Section 3.2, step 3: for every node k and neuron i there is a merged neuron in
the ball of i. As in the paper k-means over all neurons finds candidates (the number of clusters is
m_epsilon), and inside each cluster a point in the intersection of the balls stands for them.
Decided here, against the released code: k-means is seeded, every cluster is looked at, and a
group's point is verified in each member's ball. A cluster without a common point is split greedily:
a group starts from the most important neuron left and takes the nearest one that leaves it a common
point, until none does.

- How a node numbers its neurons must not decide who merges. Equal centres are one neuron, with the
  smallest radius and the sum of the importance; the rest is sorted by importance, then by bytes.
- Two cheap proofs come before the dual of Eq. 2: the mean of the centres lies in all balls, or a
  ball known to lie inside all balls so far meets the new one.
- A layer of one width: groups are taken apart again where there are too few, and neurons that do
  nothing fill what is left. Where there are too many, k-means merges on, weighted by importance; a
  neuron whose ball does not hold the new one is listed as dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gems_flwr.devices import exact_device
from gems_flwr.neurons.balls import NeuronBalls
from gems_flwr.spaces.ball.intersect import BallDual
from gems_flwr.spaces.cone import k_means
from gems_flwr.typing import Float

# Node index and neuron index.
Member = tuple[int, int]
Indices = NDArray[np.intp]
Groups = list[tuple[Float, list[int]]]

# Balls and merged layers travel in single precision.
TOLERANCE = 1e-6
BLOCK = 256


@dataclass(frozen=True, eq=False)
class MergedLayer:
    """M neurons that stand for those of all nodes, most important first."""

    # One merged neuron per row, columns as in `NeuronBalls.centers`.
    weights: Float
    # Each merged neuron's members, as node index and neuron index.
    origins: tuple[tuple[Member, ...], ...]
    # Members whose balls do not hold the neuron that stands for them.
    dropped: tuple[Member, ...]
    # Sums of the members' importance.
    importance: Float

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def groups(self) -> int:
        """Merged neurons that have more than one member."""
        return sum(len(members) > 1 for members in self.origins)


def in_ball(layer: NeuronBalls, neuron: int, point: Float) -> bool:
    """Return whether a point is in a neuron's ball, up to single precision."""
    center, radius = layer.centers[neuron].astype(np.float64), float(layer.radii[neuron])
    slack = TOLERANCE * (radius + np.abs(center).max())
    return bool(np.linalg.norm(point - center) <= radius + slack)


def merge_neurons(
    layers: Sequence[NeuronBalls],
    *,
    clusters: int = 100,
    width: int | None = None,
    seed: int,
    device: str = "cpu",
) -> MergedLayer:
    """Return one layer that has a neuron in every ball of every node.

    The nodes' `layers` are sorted by name. `clusters` are those of k-means (m_epsilon), `width` is
    how many neurons the layer must have (by default as many as come out).
    """
    items = distinct_neurons(layers)
    found: Groups = []
    for cluster in _clusters(items, clusters, seed, device):
        found += _merge_cluster(items, cluster)
    if width is not None:
        found = _split(items, found, width)
    merged = _merged(items, found)
    if width is None:
        return merged
    merged = _shrunk(merged, layers, width, seed, device)
    missing = width - len(merged)
    return MergedLayer(
        np.concatenate([merged.weights, np.zeros((missing, merged.weights.shape[1]))]),
        merged.origins + ((),) * missing,
        merged.dropped,
        np.concatenate([merged.importance, np.zeros(missing)]),
    )


def _merged(items: Distinct, found: Groups) -> MergedLayer:
    importance = np.array([items.importance[group].sum() for _, group in found])
    # Equally important ones in the order of their most important item.
    order = np.lexsort((np.array([min(group) for _, group in found]), -importance))
    origins = [sorted(m for item in found[i][1] for m in items.members[item]) for i in order]
    weights = np.stack([found[i][0] for i in order])
    return MergedLayer(weights, tuple(map(tuple, origins)), (), importance[order])


# --- the neurons of all nodes ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Distinct:
    """n different neurons, most important first, and the members that have each centre."""

    centers: NDArray[np.float32]
    radii: Float
    importance: Float
    members: tuple[tuple[Member, ...], ...]

    def __len__(self) -> int:
        return len(self.centers)


def distinct_neurons(layers: Sequence[NeuronBalls]) -> Distinct:
    """Return the different neurons of all nodes in an order that no numbering changes."""
    centers = np.concatenate([layer.centers for layer in layers])
    centers += np.float32(0)  # -0.0 and 0.0 are equal, but not their bytes.
    radii = np.concatenate([layer.radii for layer in layers]).astype(np.float64)
    importance = np.concatenate([layer.importance.astype(np.float64) for layer in layers])
    node = np.repeat(np.arange(len(layers)), [len(layer) for layer in layers])
    neuron = np.concatenate([np.arange(len(layer)) for layer in layers])

    rows = centers.view(np.dtype((np.void, centers.itemsize * centers.shape[1]))).ravel()
    _, first, label = np.unique(rows, return_index=True, return_inverse=True)
    starts = np.concatenate([[0], np.cumsum(np.bincount(label))[:-1]])
    # Summed by size, so that the last digit does not depend on the numbering either.
    total = np.add.reduceat(importance[np.lexsort((importance, label))], starts)
    smallest = np.minimum.reduceat(radii[np.argsort(label, kind="stable")], starts)
    by_label = np.lexsort((neuron, node, label))
    pairs = list(zip(node[by_label].tolist(), neuron[by_label].tolist(), strict=True))
    members = [tuple(pairs[a:b]) for a, b in itertools.pairwise([*starts.tolist(), len(pairs)])]
    order = np.argsort(-total, kind="stable")
    return Distinct(
        centers[first[order]], smallest[order], total[order], tuple(members[i] for i in order)
    )


# --- clusters and groups --------------------------------------------------------------------------


def _clusters(items: Distinct, clusters: int, seed: int, device: str) -> list[Indices]:
    if len(items) <= clusters:
        return [np.array([i]) for i in range(len(items))]
    points = items.centers.astype(np.float64)
    points -= points.mean(axis=0)
    # A centre that many neurons share pulls as often.
    counts = np.array([len(m) for m in items.members], dtype=np.float64)
    return _k_means(points, clusters, seed, counts, device)


def _k_means(points: Float, clusters: int, seed: int, shares: Float, device: str) -> list[Indices]:
    where = exact_device(device)
    there, weights = (torch.from_numpy(each).to(where) for each in (points, shares))
    labels = k_means(there, clusters, seed, weights=weights)[0].cpu().numpy()
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def _merge_cluster(items: Distinct, cluster: Indices) -> Groups:
    centers, radii = items.centers[cluster].astype(np.float64), items.radii[cluster]
    counts = np.array([len(items.members[i]) for i in cluster], dtype=np.float64)
    mean = _mean_if_common(centers, radii, counts)
    if mean is not None:
        return [(mean, cluster.tolist())]
    may = pairs_that_may_meet(centers, radii)
    # Two that do not meet prove that all of them have no common point.
    point = common_point(centers, radii) if may.all() else None
    if point is not None:
        return [(point, cluster.tolist())]
    found: Groups = []
    for point, group in split_greedily(centers, radii, may):
        mean = _mean_if_common(centers[group], radii[group], counts[group])
        found.append((point if mean is None else mean, cluster[group].tolist()))
    return found


def split_greedily(centers: Float, radii: Float, may: NDArray[np.bool_]) -> Groups:
    """Return groups of balls, each with a point in all its balls."""
    left = np.ones(len(centers), dtype=np.bool_)
    found: Groups = []
    while left.any():
        founder = int(np.argmax(left))
        group, ball = [founder], (centers[founder], float(radii[founder]))
        left[founder] = False
        open_ = may[founder] & left
        while open_.any():
            near = np.flatnonzero(open_)
            pick = int(near[np.argmin(np.linalg.norm(centers[near] - ball[0], axis=1))])
            open_[pick] = False
            grown = _extended(ball, centers, radii, group, pick)
            if grown is not None:
                ball = grown
                group.append(pick)
                left[pick] = False
                open_ &= may[pick]
        found.append((ball[0], sorted(group)))
    return found


def _extended(
    ball: tuple[Float, float], centers: Float, radii: Float, group: list[int], pick: int
) -> tuple[Float, float] | None:
    """Return a ball inside the group's balls and one more, or None if they have no common point."""
    grown = inner_ball(*ball, centers[pick], float(radii[pick]))
    members = [*group, pick]
    if grown is not None and inside(grown[0], centers[members], radii[members]):
        return grown
    point = common_point(centers[members], radii[members])
    if point is None:
        return None
    depths = radii[members] - np.linalg.norm(centers[members] - point, axis=1)
    return point, max(float(depths.min()), 0.0)


# --- what balls have in common --------------------------------------------------------------------


def pairs_that_may_meet(centers: Float, radii: Float) -> NDArray[np.bool_]:
    """Return for all pairs of n balls whether they may meet: False is a proof that they do not."""
    shifted = centers - centers.mean(axis=0)
    squares = (shifted**2).sum(axis=1)
    # More than rounding takes: it is a filter, and says yes rather too often.
    noise = 1e-9 * (squares.max() + (radii**2).max())
    may = np.empty((len(centers), len(centers)), dtype=np.bool_)
    for start in range(0, len(centers), BLOCK):
        some = slice(start, start + BLOCK)
        apart = squares[some, None] + squares - 2 * shifted[some] @ shifted.T
        may[some] = apart <= (radii[some, None] + radii) ** 2 + noise
    return may


def inside(point: Float, centers: Float, radii: Float) -> bool:
    """Return whether a point lies in every ball, up to double-precision rounding."""
    distances = np.linalg.norm(centers - point, axis=1)
    digits = 1e-12 * np.abs(centers).max() * (radii > 0)
    return bool((distances <= radii * (1 + 1e-9) + digits).all())


def inner_ball(z: Float, s: float, c: Float, r: float) -> tuple[Float, float] | None:
    """Return the largest ball inside both of two balls, (z, s) and (c, r), or None without any."""
    distance = float(np.linalg.norm(c - z))
    if distance > s + r:
        return None
    if distance + r <= s:
        return c, r
    if distance + s <= r:
        return z, s
    t = (s - r + distance) / (2 * distance)
    return z + t * (c - z), max((s + r - distance) / 2, 0.0)


def _mean_if_common(centers: Float, radii: Float, counts: Float) -> Float | None:
    """Return the mean of the centres, each taken so many times, if it lies in every ball."""
    if len(centers) == 1:
        return np.asarray(centers[0])
    mean = np.asarray(np.average(centers, axis=0, weights=counts))
    return mean if inside(mean, centers, radii) else None


def common_point(centers: Float, radii: Float) -> Float | None:
    """Return a point in all balls, or None if none is found."""
    # With a radius of 0 the smallest ball's centre is all there is to try.
    for point in (centers.mean(axis=0), centers[int(np.argmin(radii))]):
        if inside(point, centers, radii):
            return np.asarray(point)
    dual = BallDual(centers, radii)
    point = dual.point(dual.solve(0.0, None, early=True))
    return point if inside(point, centers, radii) else None


# --- so many neurons and no more ------------------------------------------------------------------


def _split(items: Distinct, found: Groups, wanted: int) -> Groups:
    """Return at least `wanted` groups, where there are as many items: some stand alone again."""
    apart = [(point, list(group)) for point, group in found]
    place = {item: i for i, (_, group) in enumerate(apart) for item in group}
    alone: Groups = []
    for item in range(len(items)):
        if len(apart) + len(alone) >= wanted:
            break
        group = apart[place[item]][1]
        if len(group) > 1:
            group.remove(item)
            alone.append((items.centers[item].astype(np.float64), [item]))
    return apart + alone


def _shrunk(
    merged: MergedLayer, layers: Sequence[NeuronBalls], width: int, seed: int, device: str
) -> MergedLayer:
    """Return at most so many neurons, each the weighted mean of a cluster of merged ones."""
    if len(merged) <= width:
        return merged
    # A neuron that adds nothing still has to go somewhere.
    weights = np.maximum(merged.importance, 1e-12 * merged.importance.max())
    if not weights.any():
        weights = np.ones(len(merged))
    points = merged.weights - merged.weights.mean(axis=0)
    found = []
    for mine in _k_means(points, width, seed, weights, device):
        point = merged.weights[mine[0]]
        if len(mine) > 1:
            point = np.average(merged.weights[mine], axis=0, weights=weights[mine])
        members = sorted({member for i in mine for member in merged.origins[i]})
        found.append((float(merged.importance[mine].sum()), point, members))
    found.sort(key=lambda entry: -entry[0])
    origins, lost = [], list(merged.dropped)
    for _, point, members in found:
        held = {(k, i): in_ball(layers[k], i, point) for k, i in members}
        origins.append(tuple(member for member in members if held[member]))
        lost += [member for member in members if not held[member]]
    return MergedLayer(
        np.stack([point for _, point, _ in found]),
        tuple(origins),
        tuple(sorted(lost)),
        np.array([total for total, _, _ in found]),
    )
