"""Cutting a class into clusters, so that one class is not one Gaussian.

k-means with k-means++ starts, seeded. Decided here: no cluster may have fewer than
``min_count`` samples (their moments would give the samples away); such a cluster is
dissolved, smallest first, and its samples go to the nearest centre that is left.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k_means(
    points: Tensor, clusters: int, seed: int, rounds: int = 25, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return labels (n,) and centres (k, D) of a seeded k-means.

    Parameters
    ----------
    points : tensor of shape (n, D)
        What to cut.
    clusters : int
        Wanted clusters; fewer come back if there are fewer distinct points.
    seed : int
        Seed of the k-means++ start.
    rounds : int
        At most so many of Lloyd's steps.
    weights : tensor of shape (n,), optional
        How much each point counts, more than 0; all the same if left out.
    """
    generator = torch.Generator().manual_seed(seed)
    squares = (points**2).sum(dim=1)
    first = torch.randint(len(points), (1,), generator=generator)
    centers = points[first.to(points.device)]
    nearest = _squared_distances(points, squares, centers)[:, 0]
    while len(centers) < min(clusters, len(points)) and float(nearest.max()) > 0:
        chance = nearest if weights is None else nearest * weights
        pick = torch.multinomial(chance.double().cpu(), 1, generator=generator)
        centers = torch.cat([centers, points[pick.to(points.device)]])
        fresh = _squared_distances(points, squares, centers[-1:])[:, 0]
        nearest = torch.minimum(nearest, fresh)
    labels = _squared_distances(points, squares, centers).argmin(dim=1)
    weighted = points if weights is None else points * weights[:, None]
    for _ in range(rounds):
        totals = torch.zeros_like(centers).index_add_(0, labels, weighted)
        counts = torch.bincount(labels, weights, minlength=len(centers)).to(points)
        full = counts > 0
        means = totals / torch.where(full, counts, torch.ones_like(counts))[:, None]
        centers = torch.where(full[:, None], means, centers)
        fresh = _squared_distances(points, squares, centers).argmin(dim=1)
        if bool((fresh == labels).all()):
            break
        labels = fresh
    return labels, centers


def _squared_distances(points: Tensor, squares: Tensor, centers: Tensor) -> Tensor:
    # As torch.cdist does it, less the copy of all points that it makes on every call.
    if len(points) <= 25:
        return torch.cdist(points, centers) ** 2
    apart = squares[:, None] + (centers**2).sum(dim=1)
    return torch.addmm(apart, points, centers.T, alpha=-2).clamp_min_(0)


def dissolve_small(points: Tensor, labels: Tensor, centers: Tensor, min_count: int) -> Tensor:
    """Return labels in which every cluster has at least ``min_count`` samples, if any can."""
    alive = list(range(len(centers)))
    while True:
        counts = torch.bincount(labels, minlength=len(centers))
        smallest = min(alive, key=lambda k: int(counts[k]))
        if int(counts[smallest]) >= min_count or len(alive) == 1:
            break
        alive.remove(smallest)
        moved = labels == smallest
        left = torch.tensor(alive, device=labels.device)
        labels = labels.clone()
        labels[moved] = left[torch.cdist(points[moved], centers[left]).argmin(dim=1)]
    return torch.searchsorted(torch.tensor(alive, device=labels.device), labels)


def cluster_classes(
    inputs: Tensor,
    labels: Tensor,
    clusters: int,
    min_count: int,
    seed: int,
    device: torch.device | None = None,
) -> Tensor:
    """Return for each sample its cluster within its class; the samples of a class move at once."""
    groups = torch.zeros_like(labels)
    for label in torch.unique(labels).tolist():
        mine = labels == label
        points = inputs[mine].float().to(inputs.device if device is None else device)
        found, centers = k_means(points, clusters, seed + label)
        groups[mine] = dissolve_small(points, found, centers, min_count).to(groups)
    return groups
