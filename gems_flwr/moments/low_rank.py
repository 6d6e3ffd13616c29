"""A covariance in few numbers: the top eigen-factor, and an inflated diagonal for the rest.

``Sigma ~ F F^T + diag(d)``: F are the top-r eigenvectors times the roots of their
eigenvalues, and d is the diagonal of the residual R times ``|R|_F^2 / |diag R|_F^2``.
Leaving the off-diagonal of R away understates the spread along directions that correlated
features share; the factor makes up for it on average. With int8 the deviations are rounded
up, for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse.linalg import eigsh

from gems_flwr.errors import SpaceError
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.covariance import LowRankCovariance, quantize
from gems_flwr.typing import Float


def top_eigenpairs(covariance: Float, rank: int) -> tuple[Float, Float, float]:
    """Return the largest eigenvalues (r,), their vectors (D, r), the sum of the other squares."""
    side = len(covariance)
    if rank == 0:
        return np.zeros(0), np.zeros((side, 0)), float((covariance**2).sum())
    if 3 * rank >= side or side < 64:
        values, vectors = np.linalg.eigh(covariance)
        return values[-rank:], vectors[:, -rank:], float((values[:-rank] ** 2).sum())
    # Lanczos is some ten times faster than all eigenvalues; a fixed start keeps it
    # reproducible.
    start = np.random.default_rng(0).standard_normal(side)
    values, vectors = eigsh(covariance, k=rank, v0=start)
    return values, vectors, float((covariance**2).sum() - (values**2).sum())


def factor(covariance: Float, rank: int) -> tuple[Float, Float]:
    """Return the factor (D, r) and the residual deviations (D,) of one covariance; r from 0."""
    values, vectors, residual = top_eigenpairs(covariance, min(rank, len(covariance)))
    top = vectors * np.sqrt(np.maximum(values, 0))
    diagonal = np.maximum(np.diag(covariance) - (top**2).sum(axis=1), 0)
    # Below rounding there is no residual to speak of, and nothing to inflate.
    if residual <= 1e-20 * float((covariance**2).sum()):
        return top, np.sqrt(diagonal)
    squared = max(float((diagonal**2).sum()), 1e-300)
    return top, np.sqrt(diagonal * max(1.0, residual / squared))


def low_rank(covariances: Float, rank: int, int8: bool) -> LowRankCovariance:
    """Return covariances (components, D, D) as low rank plus diagonal."""
    if rank < 1:
        raise SpaceError("rank", "at least 1", rank)
    return stack_factors([factor(covariance, rank) for covariance in covariances], int8)


def stack_factors(pairs: Sequence[tuple[Float, Float]], int8: bool) -> LowRankCovariance:
    """Return factors (D, r) and deviations (D,) of all components as they are sent."""
    factors = np.stack([top for top, _ in pairs]).astype(np.float32)
    deviations = np.stack([rest for _, rest in pairs]).astype(np.float32)
    if int8:
        return LowRankCovariance(
            quantize(factors, axis=1), quantize(deviations, axis=1, round_up=True)
        )
    return LowRankCovariance(factors, deviations)


def compress(cone: ClassMomentCone, rank: int, int8: bool = True) -> ClassMomentCone:
    """Return a cone with its covariances in low rank, and in int8 if wanted.

    Parameters
    ----------
    cone : ClassMomentCone
        Usually with full covariances.
    rank : int
        Columns kept, at least 1.
    int8 : bool
        Store means, factors and deviations in eight bits.

    Raises
    ------
    SpaceError
        If a component has no more samples than ``rank``: it would send its data.
    """
    fewest = int(cone.counts.min())
    if fewest <= rank:
        raise SpaceError("rank", f"below the smallest count {fewest}", rank)
    matrices = np.stack([cone.covariance.dense_matrix(e) for e in range(len(cone.labels))])
    means = mean_values(cone)
    return ClassMomentCone(
        num_classes=cone.num_classes,
        labels=cone.labels,
        counts=cone.counts,
        means=quantize(means, axis=1) if int8 else means.astype(np.float32),
        covariance=low_rank(matrices, rank, int8),
        epsilon=cone.epsilon,
        total_count=cone.total_count,
        withheld=cone.withheld,
        withheld_count=cone.withheld_count,
        privacy=cone.privacy,
    )
