"""Margins of a linear layer on class moments, and the distance to the cone they span.

Every constraint ``kappa * sqrt(v) - m <= 0`` of a class-moment cone is positively
homogeneous and convex, so its gradient at any point is a half-space through the origin that
holds the whole cone. The projection onto finitely many such half-spaces is a small
non-negative least-squares problem; adding the ones that the projection violates drives the
distance up to the true one. The same half-spaces serve `gems_flwr.intersect.mixed`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from gems_flwr.spaces.covariance import FullCovariance, dense
from gems_flwr.spaces.layout import flatten_linear, unflatten_linear

if TYPE_CHECKING:
    from gems_flwr.spaces.cone import ClassMomentCone

Float = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class ConeMargins:
    """Mean and standard deviation of margins, shape (entries, classes - 1) each.

    ``rivals[e, i]`` is the class against which ``mean[e, i]`` is taken.
    """

    mean: Float
    deviation: Float
    rivals: NDArray[np.int64]

    @classmethod
    def of(cls, cone: ClassMomentCone, weight: Float, bias: Float) -> ConeMargins:
        """Compute the margins of one layer on all entries of a cone."""
        labels = cone.labels
        rivals = np.array([np.delete(np.arange(cone.num_classes), c) for c in labels])
        scores = dense(cone.means).astype(np.float64) @ weight.T + bias
        own = np.take_along_axis(scores, labels[:, None], axis=1)
        mean = own - np.take_along_axis(scores, rivals, axis=1)
        variance = np.empty_like(mean)
        for entry, label in enumerate(labels):
            differences = weight[label] - weight[rivals[entry]]
            variance[entry] = (differences * spread(cone, entry, differences)).sum(axis=1)
        return cls(mean, np.sqrt(np.maximum(variance, 0)), rivals)

    def slack(self, kappa: float) -> Float:
        """Return ``m - kappa * sqrt(v)`` for every entry and rival."""
        return np.asarray(self.mean - kappa * self.deviation)

    def cantelli_failure(self) -> Float:
        """Return the largest share of an entry that a rival can take."""
        variance, squared_mean = self.deviation**2, self.mean**2
        share = variance / np.maximum(variance + squared_mean, 1e-300)
        return np.asarray(np.where(self.mean > 0, share, 1.0))


def spread(cone: ClassMomentCone, entry: int, rows: Float) -> Float:
    """Return ``rows @ Sigma`` for one entry, without building a low-rank Sigma."""
    if isinstance(cone.covariance, FullCovariance):
        return np.asarray(rows @ cone.covariance.matrices[entry].astype(np.float64))
    factor = cone.covariance.factor(entry).astype(np.float64)
    only = slice(entry, entry + 1)
    variances = dense(cone.covariance.deviations, only)[0].astype(np.float64) ** 2
    return np.asarray((rows @ factor) @ factor.T + rows * variances)


def half_spaces(cone: ClassMomentCone, w: Float, kappa: float, above: float = 0.0) -> Float:
    """Return unit normals ``a`` with ``a . u <= 0`` for every ``u`` in the cone.

    As rows, one per entry and rival whose constraint ``w`` violates by more than ``above``
    in units of the weights.
    """
    weight, bias = unflatten_linear(w, cone.num_classes, cone.num_features)
    margins = ConeMargins.of(cone, weight, bias)
    means = dense(cone.means).astype(np.float64)
    normals: list[Float] = []
    for entry, label in enumerate(cone.labels):
        slack = margins.slack(kappa)[entry]
        picked = np.flatnonzero(slack < 0)
        differences = weight[label] - weight[margins.rivals[entry, picked]]
        spreads = spread(cone, entry, differences)
        for row, index in enumerate(picked):
            deviation = margins.deviation[entry, index]
            pull = kappa * spreads[row] / deviation if deviation > 1e-12 else 0 * spreads[row]
            gradient, offset = np.zeros_like(weight), np.zeros_like(bias)
            gradient[label], offset[label] = pull - means[entry], -1.0
            rival = margins.rivals[entry, index]
            gradient[rival], offset[rival] = -gradient[label], 1.0
            normal = flatten_linear(gradient, offset)
            length = float(np.linalg.norm(normal))
            if float(normal @ w) > above * length:
                normals.append(normal / length)
    return np.array(normals).reshape(-1, w.size)


def distance_to_cone(cone: ClassMomentCone, w: Float, kappa: float, rounds: int = 50) -> float:
    """Return the distance from ``w`` to the closed cone, from below (see module)."""
    planes = np.zeros((0, w.size))
    point, distance, tolerance = w, 0.0, 1e-7 * (1.0 + float(np.linalg.norm(w)))
    for _ in range(rounds):
        fresh = half_spaces(cone, point, kappa, above=tolerance)
        if not len(fresh):
            break
        planes = np.concatenate([planes, fresh])
        # The projection is w - planes^T x with x >= 0 nearest to w.
        multipliers, distance_left = nnls(planes.T, w, maxiter=50 * len(planes))
        point = w - planes.T @ multipliers
        distance = float(np.linalg.norm(w - point))
        if distance_left <= tolerance:
            break
    return distance
