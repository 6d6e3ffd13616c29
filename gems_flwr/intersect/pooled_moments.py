"""The class moments of all nodes in one place.

Full moments of one class are pooled exactly (counts add, means and covariances by the law of
total variance), so that any split of the same data gives the same numbers. Low-rank
components and clusters of a class are kept in the form in which they were sent: a factor in int8
takes an eighth of what it does in double precision. Of thousands of nodes the server therefore
turns a few mixture components (a node's class, or a cluster of it) at a time into numbers to
compute with.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.intersect.small_classes import lend_covariances
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance, dense
from gems_flwr.typing import Float

# A block may take a quarter of what was received; but no less than this, for a step in Python must
# be worth while, and no more, for the processor's cache holds a few megabytes.
_SMALLEST_BLOCK_BYTES, _LARGEST_BLOCK_BYTES = 2**20, 2**22


@dataclasses.dataclass(frozen=True, eq=False)
class ComponentBlock:
    """Some consecutive components in double precision.

    Parameters
    ----------
    components : slice
        Which components these are.
    means, variances : arrays of shape (n, D)
        Mean inputs, and the diagonal parts of the covariances.
    factors : array of shape (sum of ranks, D)
        Columns of the factors as rows, one component's after the other's.
    present : bool array of shape (n, largest rank)
        Which columns a component has.
    """

    components: slice
    means: Float
    variances: Float
    factors: Float
    present: NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Some consecutive components of one cone."""

    cone: ClassMomentCone
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclasses.dataclass(frozen=True, eq=False)
class LowRankComponents:
    """The components of all cones with low-rank covariances, in order.

    Parameters
    ----------
    cones : tuple of ClassMomentCone
        As received; nothing of them is copied.
    """

    cones: tuple[ClassMomentCone, ...]

    @classmethod
    def of(cls, cones: Sequence[ClassMomentCone]) -> LowRankComponents:
        """Take the cones with low-rank covariances."""
        return cls(tuple(c for c in cones if isinstance(c.covariance, LowRankCovariance)))

    def __len__(self) -> int:
        return sum(len(cone.labels) for cone in self.cones)

    @functools.cached_property
    def size_bytes(self) -> int:
        """Bytes received."""
        return sum(cone.size_bytes for cone in self.cones)

    def blocks(self) -> Iterator[ComponentBlock]:
        """Yield all components, a few at a time."""
        first = 0
        for pieces in self._plan:
            last = first + sum(map(len, pieces))
            yield _decoded(pieces, slice(first, last))
            first = last

    def columns(self, features: slice) -> Iterator[tuple[NDArray[np.float32], Float]]:
        """Yield each cone's means and variances in some features, (components, features) each."""
        for cone in self.cones:
            covariance, components = _covariance(cone), range(len(cone.labels))
            factors = (covariance.factor(e)[features].astype(np.float64) for e in components)
            squares = np.array([(factor**2).sum(axis=1) for factor in factors])
            deviations = dense(covariance.deviations, slice(None), features).astype(np.float64)
            yield dense(cone.means, slice(None), features), squares + deviations**2

    @functools.cached_property
    def _plan(self) -> list[list[_Piece]]:
        """Return which components make up which block."""
        ends = self._ends()
        plan: list[list[_Piece]] = [[] for _ in ends]
        done, block = 0, 0
        for cone in self.cones:
            start, size = 0, len(cone.labels)
            while start < size:
                stop = min(size, start + ends[block] - done)
                plan[block].append(_Piece(cone, start, stop))
                done, start = done + stop - start, stop
                block += done == ends[block]
        return plan

    def _ends(self) -> list[int]:
        """Return where each block ends.

        Digits must not depend on where that is. So blocks are such that a vector instruction, of
        up to 16 numbers, never reaches over the end of one; and none is of a single component, for
        which linear algebra takes another way.
        """
        count = len(self)
        if not count:
            return []
        features, classes = self.cones[0].num_features, self.cones[0].num_classes
        ranks = sum(_covariance(c).rank(e) for c in self.cones for e in range(len(c.labels)))
        # A step of the objective makes an array of shape (n, C, D) beside the block itself.
        each = 8 * features * (ranks // count + 2 + classes)
        budget = min(max(self.size_bytes // 4, _SMALLEST_BLOCK_BYTES), _LARGEST_BLOCK_BYTES)
        run = 16 // math.gcd(16, classes)
        size = max(1, budget // each // run) * run
        return [*range(size, count - 1, size), count]


def _covariance(cone: ClassMomentCone) -> LowRankCovariance:
    assert isinstance(cone.covariance, LowRankCovariance)
    return cone.covariance


def _decoded(pieces: Sequence[_Piece], components: slice) -> ComponentBlock:
    count, features = components.stop - components.start, pieces[0].cone.num_features
    ranks = np.array([_covariance(p.cone).rank(e) for p in pieces for e in range(p.first, p.last)])
    means, variances = np.empty((count, features)), np.empty((count, features))
    factors = np.empty((int(ranks.sum()), features))
    first, column = 0, 0
    for piece in pieces:
        rows, mine = slice(first, first + len(piece)), slice(piece.first, piece.last)
        covariance = _covariance(piece.cone)
        means[rows] = dense(piece.cone.means, mine)
        variances[rows] = dense(covariance.deviations, mine)
        for component in range(piece.first, piece.last):
            own = covariance.factor(component).T
            factors[column : column + len(own)] = own
            column += len(own)
        first = rows.stop
    present = np.arange(ranks.max()) < ranks[:, None]
    return ComponentBlock(components, means, np.square(variances, out=variances), factors, present)


# As in `torch.sum` over a leading axis.
_RUN, _LEVELS = 16, 4


class CascadeSum:
    """Sum arrays in runs of 16, the runs' sums again in runs of 16, and so on.

    Rounding then grows with the logarithm of how many there are. The order is that of
    `torch.sum`, so that it does not matter in how many parts the arrays come.
    """

    def __init__(self) -> None:
        self._count, self._parts = 0, 0
        self._levels: list[Tensor] = []

    def add(self, terms: Tensor) -> None:
        """Add arrays that are stacked along the first axis."""
        self._parts += 1
        if self._parts == 1:
            # Of what does not fill its vectors torch has another order: all of it at once is its.
            self._first = terms.sum(dim=0)
            self._levels = [torch.zeros_like(self._first) for _ in range(_LEVELS)]
        for term in terms:
            self._levels[0] += term
            self._count += 1
            self._carry()

    def _carry(self) -> None:
        """Hand on the sum of every run that is complete."""
        run = _RUN
        for level in range(1, _LEVELS):
            if self._count % run:
                return
            self._levels[level] += self._levels[level - 1]
            self._levels[level - 1].zero_()
            run *= _RUN

    def total(self) -> Tensor:
        """Return the sum of all that was added; at least one array must have been."""
        if self._parts == 1:
            return self._first
        total, *others = self._levels
        for other in others:
            total = total + other
        return total


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
    """Gather the moments of all nodes; components without a covariance are lent one.

    Raises
    ------
    ValueError
        If there is no cone or they disagree about classes or features.
    """
    cones = lend_covariances(cones)
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
