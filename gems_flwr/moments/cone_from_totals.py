"""From totals over nodes to a cone: the server's side of `gems_flwr.moments.moment_sums`.

The covariance of a class is what was measured in the basis, and outside of it the pooled
within-class variance of each feature: ``F F^T + diag(s^2)``. Decided here, on validation data:
outside of the basis classes share one variance (one of each tells no more and costs C times the
bytes); features are standardised by what they vary within classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import SpaceError
from gems_flwr.moments.cone_building import MIN_COUNT
from gems_flwr.moments.join_components import partial_covariance
from gems_flwr.moments.moment_sums import Standard, random_columns
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import LowRankCovariance, QuantizedArray, quantize
from gems_flwr.typing import Float

# Directions whose length is a smaller part of the longest are rounding.
_NEGLIGIBLE = 1e-6
# A feature that hardly varies is not blown up to more than ten times the others.
_FLOOR = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class PooledMeans:
    """What the second sum tells of all samples.

    Parameters
    ----------
    counts : array of shape (C,)
        Samples of each class.
    means : array of shape (C, D)
        Zero for classes without samples.
    within : array of shape (D,)
        Pooled variance of each feature within classes.
    standard : Standard
        How inputs are standardised from here on.
    """

    counts: Float
    means: Float
    within: Float
    standard: Standard

    @property
    def shares(self) -> Float:
        """Each class's share of all samples."""
        return np.asarray(self.counts / self.counts.sum())

    @property
    def standardised(self) -> Float:
        """Class means as the nodes see them."""
        there = (self.counts > 0)[:, None]
        return np.where(there, (self.means - self.standard.center) / self.standard.scale, 0.0)


def pooled_means(values: Mapping[str, Float], errors: Mapping[str, float]) -> PooledMeans:
    """Return what the totals of *means* tell.

    Parameters
    ----------
    values : mapping from str to array
        Totals by section.
    errors : mapping from str to float
        By how much a total of each section may be off.

    Raises
    ------
    SpaceError
        If there are no samples.
    """
    counts = counted(values, "sums")
    total, features = float(counts.sum()), len(values["sum"])
    if total < 1:
        raise SpaceError("counts", "at least one sample", total)
    means = np.zeros((len(counts), features))
    for label in np.flatnonzero(counts > 0):
        means[label] = values[f"sums-{label}"] / counts[label]
    center = _single(values["sum"] / total)
    variance = values["squares"] / total - (values["sum"] / total) ** 2
    between = (counts / total) @ np.where((counts > 0)[:, None], means - center, 0) ** 2
    within = np.maximum(variance - between, 0)
    typical = float(np.sqrt(within.mean()))
    scale = _single(np.maximum(np.sqrt(within), _FLOOR * typical if typical > 0 else 1.0))
    off = errors["squares"] + 2 * np.abs(center) * errors["sum"]
    squares = values["squares"] - 2 * center * values["sum"] + total * center**2 + off
    standard = Standard(center, scale, total, np.maximum(squares, off) / scale**2)
    return PooledMeans(counts, means, within, standard)


def counted(values: Mapping[str, Float], section: str) -> Float:
    """Return the samples of each class; none of classes that have no such section."""
    there = np.array([f"{section}-{label}" in values for label in range(len(values["counts"]))])
    return np.where(there, np.maximum(np.rint(values["counts"]), 0), 0.0)


def mean_columns(pooled: PooledMeans) -> QuantizedArray:
    """Return directions of length 1 at most that span the class means' differences, as rows.

    In eight bits: nodes and server use the rounded ones alike.
    """
    return unit_rows(_mean_directions(pooled).T)


def unit_rows(rows: Float) -> QuantizedArray:
    """Return rows in eight bits, none longer than 1."""
    rounded = quantize(rows, axis=1)
    lengths = np.linalg.norm(rounded.dense().astype(np.float64), axis=1, keepdims=True)
    scales = rounded.scales / np.maximum(lengths, 1e-30) * (1 - 1e-6)
    return QuantizedArray(rounded.codes, scales.astype(np.float32))


def sketch_columns(rows: QuantizedArray, random: int, seed: int) -> Float:
    """Return all columns of a sketch, (D, k): directions of the means, and random ones."""
    own = rows.dense().astype(np.float64).T
    return np.concatenate([own, random_columns(len(own), random, seed)], axis=1)


def find_basis(
    pooled: PooledMeans, columns: Float, sketch: Float, most: int | None = None
) -> QuantizedArray:
    """Return the basis, as rows of length 1: the means' directions and the covariance's.

    Parameters
    ----------
    pooled : PooledMeans
        What is known of means.
    columns : array of shape (D, k)
        Of the sketch.
    sketch : array of shape (D, k)
        ``sum z (z . v)`` over all samples.
    most : int, optional
        How many directions there may be; those of the means come first.
    """
    means = np.sqrt(pooled.shares)[:, None] * pooled.standardised
    # What the means make of the columns is known; the rest is the covariance within classes.
    within = sketch / pooled.standard.count - means.T @ (means @ columns)
    joined = np.concatenate([_mean_directions(pooled), _spanned(within)], axis=1)[:, :most]
    return unit_rows(_spanned(joined).T)


def cone_from_totals(
    values: Mapping[str, Float],
    pooled: PooledMeans,
    basis: Float,
    *,
    min_count: int = MIN_COUNT,
    epsilon: float = 0.5,
) -> ClassMomentCone:
    """Return the cone of all nodes.

    Parameters
    ----------
    values : mapping from str to array
        Totals of *covariances*.
    pooled : PooledMeans
        Totals of *means*.
    basis : array of shape (r, D)
        As the nodes had it.
    min_count : int
        Fewest samples of a class for a covariance of its own.
    epsilon : float
        As in `ClassMomentCone`.
    """
    counts = counted(values, "second")
    rank, scale = len(basis), pooled.standard.scale
    # The basis as it was rounded is only nearly orthonormal: U^T = Q R.
    orthonormal, triangle = np.linalg.qr(basis.T)
    inverse = np.linalg.inv(triangle)
    rows, columns = np.triu_indices(rank)
    inside, factors = np.zeros((rank, rank)), {}
    for label in np.flatnonzero(counts > 0):
        mean = values[f"first-{label}"] / counts[label]
        second = np.zeros((rank, rank))
        second[rows, columns] = values[f"second-{label}"] / counts[label]
        second[columns, rows] = second[rows, columns]
        matrix = inverse.T @ (second - np.outer(mean, mean)) @ inverse
        sizes, vectors = np.linalg.eigh(matrix)
        vectors = vectors * np.sqrt(np.maximum(sizes, 0))
        inside += counts[label] / counts.sum() * (vectors @ vectors.T)
        if counts[label] >= min_count:
            factors[int(label)] = orthonormal @ vectors * scale[:, None]
    along = np.einsum("ij,jk,ik->i", orthonormal, inside, orthonormal) * scale**2
    outside = np.sqrt(np.maximum(pooled.within - along, 0))
    return _cone(pooled, factors, outside, epsilon)


def _cone(
    pooled: PooledMeans, factors: Mapping[int, Float], outside: Float, epsilon: float
) -> ClassMomentCone:
    labels = np.flatnonzero(pooled.counts > 0).astype(np.int64)
    lacking: NDArray[np.bool_] = np.array([int(label) not in factors for label in labels])
    own = None
    if factors:
        stacked = np.stack([factors[label] for label in sorted(factors)]).astype(np.float32)
        own = LowRankCovariance(stacked, np.tile(outside.astype(np.float32), (len(factors), 1)))
    return ClassMomentCone(
        num_classes=len(pooled.counts),
        labels=labels,
        counts=pooled.counts[labels].astype(np.int64),
        means=pooled.means[labels].astype(np.float32),
        covariance=partial_covariance(own, lacking, len(outside)),
        epsilon=epsilon,
        total_count=int(pooled.counts.sum()),
        withheld=(),
        withheld_count=0,
    )


def _mean_directions(pooled: PooledMeans) -> Float:
    """Return orthonormal columns in which the class means differ, at least one."""
    weighted = np.sqrt(pooled.shares)[:, None] * pooled.standardised
    # Their weighted mean is zero, up to rounding: one direction fewer than classes.
    most = max(1, int((pooled.counts > 0).sum()) - 1)
    return _spanned(weighted.T)[:, :most]


def _spanned(columns: Float) -> Float:
    """Return orthonormal columns that span what columns do, but for rounding."""
    vectors, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    if not sizes[0] > 0:
        return np.eye(len(columns), 1)
    return np.asarray(vectors[:, sizes > _NEGLIGIBLE * sizes[0]])


def _single(values: Float) -> Float:
    """Return numbers as nodes get them."""
    return values.astype(np.float32).astype(np.float64)
