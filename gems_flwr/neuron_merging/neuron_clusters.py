"""The papers' merge: k-means over all neurons, then intersections inside each cluster.

2019, Section 3.2: only neurons of one cluster are tried, as those far apart hardly meet; the
number of clusters is m_epsilon. At a large epsilon the result is the k-means centroids.

Decided here, against the released code: k-means is seeded; every cluster is looked at (there one
is lost); a group's point is verified in each member's ball (there a quarter fails at a small
epsilon). A cluster without a common point is split greedily: a group starts from the most
important neuron left and takes the nearest one that leaves it a common point, until none does.
Neurons of one node may merge, as there.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gems_flwr.devices import exact_device
from gems_flwr.moments.class_clusters import k_means
from gems_flwr.neuron_merging.common_point import common_point, inner_ball, inside, mean_if_common
from gems_flwr.neuron_merging.distinct import Distinct
from gems_flwr.neuron_merging.may_meet import pairs_that_may_meet
from gems_flwr.typing import Float

Grown = list[tuple[Float, list[int]]]


def merge_in_clusters(
    items: Distinct, clusters: int, within_node: bool, seed: int, device: str = "cpu"
) -> tuple[Float, list[list[int]]]:
    """Return the merged neurons and which items each stands for.

    Parameters
    ----------
    items : Distinct
        All neurons.
    clusters : int
        Wanted clusters, m_epsilon; with as many as items, each is its own.
    within_node : bool
        Whether neurons of one node may merge.
    seed : int
        Seed of k-means.
    device : str
        Where k-means runs.
    """
    found: Grown = []
    for cluster in _clusters(items, clusters, seed, device):
        found += _merge_cluster(items, cluster, within_node)
    return np.stack([point for point, _ in found]), [group for _, group in found]


def _clusters(items: Distinct, clusters: int, seed: int, device: str) -> list[NDArray[np.intp]]:
    if len(items) <= clusters:
        return [np.array([i]) for i in range(len(items))]
    points = items.centers.astype(np.float64)
    points -= points.mean(axis=0)
    # A centre that many neurons share pulls as often.
    counts = torch.tensor([len(m) for m in items.members], dtype=torch.float64)
    where = exact_device(device)
    there = (torch.from_numpy(points).to(where), clusters, seed)
    labels = k_means(*there, weights=counts.to(where))[0].cpu().numpy()
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def _merge_cluster(items: Distinct, cluster: NDArray[np.intp], within_node: bool) -> Grown:
    centers = items.centers[cluster].astype(np.float64)
    radii, nodes = items.radii[cluster], items.nodes[cluster]
    counts = np.array([len(items.members[i]) for i in cluster], dtype=np.float64)
    everyone = cluster.tolist()
    if within_node or int(nodes.sum(axis=0).max()) <= 1:
        mean = mean_if_common(centers, radii, counts)
        if mean is not None:
            return [(mean, everyone)]
    may = pairs_that_may_meet(centers, radii)
    if not within_node:
        may &= ~(nodes.astype(np.float32) @ nodes.T.astype(np.float32) > 0)
    # Two that do not meet prove that all of them have no common point.
    point = common_point(centers, radii) if may.all() else None
    if point is not None:
        return [(point, everyone)]
    found = []
    for point, group in split_greedily(centers, radii, may):
        mean = mean_if_common(centers[group], radii[group], counts[group])
        found.append((point if mean is None else mean, cluster[group].tolist()))
    return found


def split_greedily(centers: Float, radii: Float, may: NDArray[np.bool_]) -> Grown:
    """Return groups of balls, each with a point in all its balls.

    Parameters
    ----------
    centers : array of shape (n, d)
        Centres, most important first.
    radii : array of shape (n,)
        Radii.
    may : bool array of shape (n, n)
        Which pairs may be in one group; need not be sharp.
    """
    left = np.ones(len(centers), dtype=np.bool_)
    found: Grown = []
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
