"""The class moments of all nodes in one place.

Full moments of one class are pooled exactly (counts add, means and covariances by the law of
total variance), so that any split of the same data gives the same numbers. Low-rank
components and clusters of a class are kept as they are, in the form in which they were sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.intersect.components import LowRankComponents
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.covariance import FullCovariance
from gems_flwr.typing import Float

# In double precision where several nodes' moments were pooled; one node's alone as it sent them.
Matrix = NDArray[np.float32] | NDArray[np.float64]

_LEAST_BYTES = 2**18


@dataclasses.dataclass(frozen=True, eq=False)
class PooledMoments:
    """Components of all nodes, full ones pooled by class; the full ones come first.

    Parameters
    ----------
    num_classes : int
        Classes of the task.
    labels, shares : array of shape (components,)
        Class of each component, and its share of all samples.
    means : array of shape (full components, D)
        Mean inputs of the components with full covariances.
    matrices : tuple of arrays of shape (D, D)
        Their covariances.
    low : LowRankComponents
        The other components.
    feature_scale : array of shape (D,)
        Pooled within-class deviation of each feature, floored.
    """

    num_classes: int
    labels: NDArray[np.int64]
    shares: Float
    means: Float
    matrices: tuple[Matrix, ...]
    low: LowRankComponents
    feature_scale: Float


def pool_full(cones: Sequence[ClassMomentCone]) -> dict[int, tuple[int, Float, Matrix]]:
    """Return count, mean and covariance of each class over all full cones."""
    sums: dict[int, tuple[int, Float, Matrix]] = {}
    for cone in cones:
        means = mean_values(cone)
        for component, label in enumerate(cone.labels.tolist()):
            count, mean = int(cone.counts[component]), means[component]
            matrix = full_matrices(cone)[component]
            if label in sums:
                old_count, old_mean, old_matrix = sums[label]
                total = old_count + count
                step = mean - old_mean
                # Law of total variance, in the form that does not cancel.
                between = np.outer(step, step) * (old_count * count / total**2)
                # One matrix in double precision for a class, however many nodes have it.
                both = np.asarray(old_matrix, dtype=np.float64)
                both *= old_count
                both += np.multiply(matrix, count, dtype=np.float64)
                both /= total
                both += between
                mean, count, matrix = old_mean + step * (count / total), total, both
            sums[label] = (count, mean, matrix)
    return sums


def full_matrices(cone: ClassMomentCone) -> NDArray[np.float32]:
    """Return the covariances of a cone that has full ones."""
    assert isinstance(cone.covariance, FullCovariance)
    return cone.covariance.matrices


def pool_moments(cones: Sequence[ClassMomentCone]) -> PooledMoments:
    """Gather the moments of all nodes.

    Raises
    ------
    ValueError
        If there is no cone or they disagree about classes or features.
    """
    shapes = sorted({(cone.num_classes, cone.num_features) for cone in cones})
    if len(shapes) != 1:
        raise ValueError(f"cones: expected one number of classes and features, got {shapes}")
    num_classes, features = shapes[0]
    full = [c for c in cones if isinstance(c.covariance, FullCovariance)]
    low = LowRankComponents.of(cones)
    pooled = pool_full([c for c in full if not has_clusters(c)])
    labels = list(pooled)
    counts = [count for count, _, _ in pooled.values()]
    means = [mean for _, mean, _ in pooled.values()]
    matrices = [matrix for _, _, matrix in pooled.values()]
    for cone in filter(has_clusters, full):
        labels += cone.labels.tolist()
        counts += cone.counts.tolist()
        means += list(mean_values(cone))
        matrices += list(full_matrices(cone))
    for cone in low.cones:
        labels += cone.labels.tolist()
        counts += cone.counts.tolist()
    shares = np.array(counts, dtype=np.float64) / sum(counts)
    full_means = np.array(means).reshape(len(means), features)
    return PooledMoments(
        num_classes=num_classes,
        labels=np.array(labels, dtype=np.int64),
        shares=shares,
        means=full_means,
        matrices=tuple(matrices),
        low=low,
        feature_scale=feature_scale(total_variance(shares, full_means, matrices, low)),
    )


def has_clusters(cone: ClassMomentCone) -> bool:
    """Return whether a class has several components, which pooling would undo."""
    return len(set(cone.labels.tolist())) < len(cone.labels)


def total_variance(
    shares: Float, means: Float, matrices: Sequence[Matrix], low: LowRankComponents
) -> Float:
    """Return the variance of each feature over all samples: within the components and between."""
    features = means.shape[1]
    received = low.size_bytes + sum(matrix.nbytes for matrix in matrices)
    # Some features at a time: all means in double precision may take more than what was sent.
    at_once = max(received // 4, _LEAST_BYTES) // (32 * len(shares))
    width = max(64, at_once // 64 * 64)
    parts = []
    for first in range(0, features, width):
        columns = slice(first, first + width)
        low_rank = list(low.columns(columns))
        full_means = means[:, columns]
        diagonals = np.array([np.diag(m)[columns] for m in matrices], dtype=np.float64)
        all_means = np.concatenate([full_means, *(mean for mean, _ in low_rank)])
        spreads = [diagonals.reshape(full_means.shape), *(spread for _, spread in low_rank)]
        variance = shares @ np.concatenate(spreads)
        parts.append(variance + between_variance(shares, all_means))
    return np.concatenate(parts)


def between_variance(shares: Float, means: Float) -> Float:
    """Return the variance of the components' means, per feature."""
    center = shares @ means
    return np.asarray(shares @ (means - center) ** 2)


def feature_scale(variance: Float) -> Float:
    """Return deviations to divide features by; none below a tenth of the typical one.

    A feature that hardly varies would otherwise be blown up to the size of the others.
    """
    typical = float(np.sqrt(variance.mean()))
    return np.maximum(np.sqrt(np.maximum(variance, 0)), 0.1 * typical if typical > 0 else 1.0)
