"""What closed-form classifiers need of all nodes' class moments: shares, means, one covariance.

The same message serves the cone objective and every classifier that is a function of class counts,
means and covariances (see `gems_flwr.intersect.moment_heads`). Components of a class, be they
clusters or the same class on several nodes, are one class here; their means' spread belongs to its
covariance (law of total variance). Of all matrices at most two of D x D are held at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from gems_flwr.intersect.pooled_moments import PooledMoments, pool_moments
from gems_flwr.intersect.small_classes import covariance_from_means
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.typing import Float


@dataclasses.dataclass(frozen=True, eq=False)
class HeadMoments:
    """Class moments of all nodes together.

    Parameters
    ----------
    shares : array of shape (C,)
        Each class's share of all samples; 0 where nobody sent any.
    means : array of shape (C, D)
        Mean input of each class; 0 where nobody sent any.
    within : array of shape (D, D)
        Covariance within the classes, each weighted by its share.
    pooled : PooledMoments, optional
        Where the classes' own covariances are, for heads that need them.
    """

    shares: Float
    means: Float
    within: Float
    pooled: PooledMoments | None = None

    @classmethod
    def of(cls, cones: Sequence[ClassMomentCone]) -> HeadMoments:
        """Gather the moments of all nodes.

        Raises
        ------
        ValueError
            If there is no cone or they disagree about classes or features.
        """
        pooled = pool_moments(cones)
        shares, means = class_means(pooled)
        if all(cone.lacking.all() for cone in cones):
            return cls(shares, means, covariance_from_means(cones))
        everything = np.ones(len(pooled.labels), dtype=bool)
        return cls(shares, means, spread_around(pooled, means, everything), pooled)

    @property
    def present(self) -> Float:
        """Which classes somebody sent, as a bool array."""
        return np.asarray(self.shares > 0)

    def class_covariance(self, label: int) -> Float:
        """Return the covariance of one class, (D, D)."""
        if self.pooled is None:
            raise ValueError("these moments have no covariances of single classes")
        chosen = self.pooled.labels == label
        return spread_around(self.pooled, self.means, chosen) / float(self.shares[label])


def class_means(pooled: PooledMoments) -> tuple[Float, Float]:
    """Return each class's share (C,) and mean (C, D)."""
    shares = np.zeros(pooled.num_classes)
    np.add.at(shares, pooled.labels, pooled.shares)
    sums = np.zeros((pooled.num_classes, pooled.means.shape[1]))
    for components, means in _component_means(pooled):
        weighted = pooled.shares[components, None] * means
        np.add.at(sums, pooled.labels[components], weighted)
    return shares, sums / np.where(shares > 0, shares, 1.0)[:, None]


def spread_around(pooled: PooledMoments, means: Float, chosen: Float) -> Float:
    """Return the spread of some components around their classes' means, each times its share."""
    full, weights = len(pooled.matrices), np.where(chosen, pooled.shares, 0.0)
    features = pooled.means.shape[1]
    total = np.zeros((features, features))
    for component in np.flatnonzero(chosen[:full]):
        total += np.multiply(pooled.matrices[component], weights[component], dtype=np.float64)
    for components, own in _component_means(pooled):
        off = own - means[pooled.labels[components]]
        total += (off * weights[components, None]).T @ off
    diagonal = np.zeros(features)
    for block in pooled.low.blocks():
        mine = weights[full + block.components.start : full + block.components.stop]
        diagonal += mine @ block.variances
        # A factor's columns stand as rows, one component's after the other's.
        rows = block.factors * np.sqrt(np.repeat(mine, block.present.sum(axis=1)))[:, None]
        total += rows.T @ rows
    total[np.diag_indices_from(total)] += diagonal
    return (total + total.T) / 2


def _component_means(pooled: PooledMoments) -> Iterator[tuple[slice, Float]]:
    """Yield the means of all components, some at a time."""
    full = len(pooled.matrices)
    if full:
        yield slice(0, full), pooled.means
    for block in pooled.low.blocks():
        first, last = block.components.start, block.components.stop
        yield slice(full + first, full + last), block.means
