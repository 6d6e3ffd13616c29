"""The class moments of all nodes in one place.

Full moments of one class are pooled exactly (counts add, means and covariances by the law of
total variance), so that any split of the same data gives the same numbers. Low-rank
entries and clusters of a class are kept as they are, padded to a common rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance, dense

Float = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class PooledMoments:
    """Entries of all nodes, full ones pooled by class.

    Parameters
    ----------
    num_classes : int
        Classes of the task.
    labels, shares : array of shape (entries,)
        Class of each entry, and its share of all samples.
    means : array of shape (entries, D)
        Mean inputs.
    matrices : array of shape (full entries, D, D), optional
        Covariances of the entries in ``full_entries``.
    factors, variances : arrays of shape (low entries, D, r) and (low entries, D), optional
        Low-rank covariances of the entries in ``low_entries``.
    full_entries, low_entries : int arrays
        Which entries the covariances belong to.
    feature_scale : array of shape (D,)
        Pooled within-class deviation of each feature, floored.
    """

    num_classes: int
    labels: NDArray[np.int64]
    shares: Float
    means: Float
    matrices: Float | None
    factors: Float | None
    variances: Float | None
    full_entries: NDArray[np.int64]
    low_entries: NDArray[np.int64]
    feature_scale: Float


def pool_full(cones: Sequence[ClassMomentCone]) -> dict[int, tuple[int, Float, Float]]:
    """Return count, mean and covariance of each class over all full cones."""
    sums: dict[int, tuple[int, Float, Float]] = {}
    for cone in cones:
        means = mean_values(cone)
        for entry, label in enumerate(cone.labels.tolist()):
            count, mean = int(cone.counts[entry]), means[entry]
            matrix = cone.covariance.dense_matrix(entry)
            if label in sums:
                old_count, old_mean, old_matrix = sums[label]
                total = old_count + count
                step = mean - old_mean
                # Law of total variance, in the form that does not cancel.
                between = np.outer(step, step) * (old_count * count / total**2)
                matrix = (old_count * old_matrix + count * matrix) / total + between
                mean, count = old_mean + step * (count / total), total
            sums[label] = (count, mean, matrix)
    return sums


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
    num_classes = shapes[0][0]
    full = [c for c in cones if isinstance(c.covariance, FullCovariance)]
    pooled = pool_full([c for c in full if not has_clusters(c)])
    labels = list(pooled)
    counts = [count for count, _, _ in pooled.values()]
    means = [mean for _, mean, _ in pooled.values()]
    matrices = [matrix for _, _, matrix in pooled.values()]
    for cone in filter(has_clusters, full):
        labels += cone.labels.tolist()
        counts += cone.counts.tolist()
        means += list(mean_values(cone))
        matrices += [cone.covariance.dense_matrix(e) for e in range(len(cone.labels))]
    factors: list[Float] = []
    variances: list[Float] = []
    for cone in cones:
        if isinstance(cone.covariance, LowRankCovariance):
            labels += cone.labels.tolist()
            counts += cone.counts.tolist()
            means += list(mean_values(cone))
            entries = range(len(cone.labels))
            factors += [cone.covariance.factor(e).astype(np.float64) for e in entries]
            variances += list(dense(cone.covariance.deviations).astype(np.float64) ** 2)
    shares = np.array(counts, dtype=np.float64) / sum(counts)
    rank = max((f.shape[1] for f in factors), default=0)
    padded = [np.pad(f, ((0, 0), (0, rank - f.shape[1]))) for f in factors]
    spreads = [np.diag(m) for m in matrices]
    spreads += [(f**2).sum(axis=1) + v for f, v in zip(factors, variances, strict=True)]
    all_means = np.stack(means)
    variance = shares @ np.stack(spreads)
    return PooledMoments(
        num_classes=num_classes,
        labels=np.array(labels, dtype=np.int64),
        shares=shares,
        means=all_means,
        matrices=np.stack(matrices) if matrices else None,
        factors=np.stack(padded) if padded else None,
        variances=np.stack(variances) if variances else None,
        full_entries=np.arange(len(matrices)),
        low_entries=np.arange(len(matrices), len(labels)),
        feature_scale=feature_scale(variance + between_variance(shares, all_means)),
    )


def has_clusters(cone: ClassMomentCone) -> bool:
    """Return whether a class has several entries, which pooling would undo."""
    return len(set(cone.labels.tolist())) < len(cone.labels)


def between_variance(shares: Float, means: Float) -> Float:
    """Return the variance of the entries' means, per feature."""
    center = shares @ means
    return np.asarray(shares @ (means - center) ** 2)


def feature_scale(variance: Float) -> Float:
    """Return deviations to divide features by; none below a tenth of the typical one.

    A feature that hardly varies would otherwise be blown up to the size of the others.
    """
    typical = float(np.sqrt(variance.mean()))
    return np.maximum(np.sqrt(np.maximum(variance, 0)), 0.1 * typical if typical > 0 else 1.0)
