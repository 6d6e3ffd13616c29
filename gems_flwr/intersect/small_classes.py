"""Covariances for classes of which only count and mean were sent.

A class too small for a covariance on a node (see `gems_flwr.moments.small_means`) is lent one at
the server: that of the same class on other nodes, where any sent it, else the covariance within all
classes. Where nobody sent any covariance at all, it is estimated from the spread of the nodes'
means of the same class, as in FedCOF: the mean of n samples has covariance Sigma / n, so that::

    sum_c sum_k n_ck (mu_ck - mu_c) (mu_ck - mu_c)^T / sum_c (K_c - 1)

is Sigma on average, if the K_c groups of a class are samples of one distribution; mu_c is their
mean weighted by n_ck. One estimate serves all classes: there are few means of each.

Decided here: the small parts of a class are one component, with the mean over nodes. Without a
second mean of any class nothing is known of the spread, and a round covariance stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.moments.low_rank import factor
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance
from gems_flwr.typing import Float

# Directions of an estimate from means, which has as many as there are means.
_MOST_DIRECTIONS = 64
# Of what the means leave: a share of the mean variance in every direction.
_ROUND_SHARE = 0.1


def missing_classes(cones: Sequence[ClassMomentCone]) -> tuple[int, ...]:
    """Return the classes of the task of which no node sent anything."""
    sent = set().union(*(cone.labels.tolist() for cone in cones))
    return tuple(label for label in range(cones[0].num_classes) if label not in sent)


def lend_covariances(cones: Sequence[ClassMomentCone]) -> list[ClassMomentCone]:
    """Return cones in which every component has a covariance.

    Parameters
    ----------
    cones : sequence of ClassMomentCone
        Of all nodes; returned as they are where no component lacks one.
    """
    if not any(cone.lacking.any() for cone in cones):
        return list(cones)
    parts = [cone.without_components(cone.lacking) for cone in cones]
    regular = [part for part in parts if part is not None]
    labels, counts, means = _merged(cones)
    covariance: FullCovariance | LowRankCovariance
    if not regular:
        covariance = _repeated(_thin(covariance_from_means(cones)), len(labels))
    elif any(isinstance(cone.covariance, FullCovariance) for cone in regular):
        covariance = FullCovariance(np.stack(_donors(regular, labels)).astype(np.float32))
    else:
        rank = max(_largest_rank(cone) for cone in regular)
        pairs = [factor(matrix, rank) for matrix in _donors(regular, labels)]
        rows = np.concatenate([top.T for top, _ in pairs])
        deviations = np.stack([rest for _, rest in pairs])
        ranks = np.array([top.shape[1] for top, _ in pairs])
        covariance = LowRankCovariance(
            rows.astype(np.float32), deviations.astype(np.float32), ranks
        )
    lent = ClassMomentCone(
        num_classes=cones[0].num_classes,
        labels=labels,
        counts=counts,
        means=means.astype(np.float32),
        covariance=covariance,
    )
    return [*regular, lent]


def covariance_from_means(cones: Sequence[ClassMomentCone]) -> Float:
    """Return the covariance within classes, (D, D), estimated from counts and means alone."""
    rows, freedom = _scaled_offsets(cones)
    if not freedom:
        return np.eye(cones[0].num_features)
    return np.asarray(rows.T @ rows / freedom)


def _scaled_offsets(cones: Sequence[ClassMomentCone]) -> tuple[Float, int]:
    """Return each mean's distance from its class's, times the root of its count, and K - C."""
    labels = np.concatenate([cone.labels for cone in cones])
    counts = np.concatenate([cone.counts for cone in cones]).astype(np.float64)
    means = np.concatenate([mean_values(cone) for cone in cones])
    rows = np.empty_like(means)
    for label in np.unique(labels):
        mine = labels == label
        center = counts[mine] @ means[mine] / counts[mine].sum()
        rows[mine] = np.sqrt(counts[mine])[:, None] * (means[mine] - center)
    return rows, len(labels) - len(np.unique(labels))


def _merged(
    cones: Sequence[ClassMomentCone],
) -> tuple[NDArray[np.int64], NDArray[np.int64], Float]:
    """Return label, count and mean of each class that has small components."""
    labels = np.concatenate([cone.labels[cone.lacking] for cone in cones])
    counts = np.concatenate([cone.counts[cone.lacking] for cone in cones])
    means = np.concatenate([mean_values(cone)[cone.lacking] for cone in cones])
    classes = np.unique(labels)
    totals = np.array([counts[labels == label].sum() for label in classes], dtype=np.int64)
    sums = [counts[labels == label] @ means[labels == label] for label in classes]
    return classes, totals, np.stack(sums) / totals[:, None]


def _donors(regular: Sequence[ClassMomentCone], labels: NDArray[np.int64]) -> list[Float]:
    """Return a covariance for each class: its own on other nodes, or that within all classes."""
    # Not before: these moments are made of cones that lack none.
    from gems_flwr.intersect.head_moments import HeadMoments

    moments = HeadMoments.of(regular)
    return [
        moments.class_covariance(label) if moments.shares[label] > 0 else moments.within
        for label in labels.tolist()
    ]


def _largest_rank(cone: ClassMomentCone) -> int:
    assert isinstance(cone.covariance, LowRankCovariance)
    return max(cone.covariance.rank(entry) for entry in range(len(cone.labels)))


def _thin(covariance: Float) -> tuple[Float, Float]:
    """Return an estimate from few means as factor and deviations, with some spread everywhere."""
    top, rest = factor(covariance, min(_MOST_DIRECTIONS, len(covariance)))
    variance = float(np.trace(covariance)) / len(covariance)
    return top, np.sqrt(rest**2 + _ROUND_SHARE * variance)


def _repeated(pair: tuple[Float, Float], times: int) -> LowRankCovariance:
    top, rest = pair
    rows = np.tile(top.T, (times, 1)).astype(np.float32)
    deviations = np.tile(rest, (times, 1)).astype(np.float32)
    return LowRankCovariance(rows, deviations, np.full(times, top.shape[1]))
