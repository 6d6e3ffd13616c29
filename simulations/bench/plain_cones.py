"""The objective of class-moment cones as one would write it first: all components at once.

Every factor in double precision, and automatic differentiation through all of it. What
`gems_flwr.intersect.cone_objective` is measured against, in the benchmark and in tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from gems_flwr.intersect.cone_objective import POINTS, RIDGE_LOW_RANK
from gems_flwr.intersect.pooled_moments import pool_moments
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import LowRankCovariance, dense


class PlainObjective:
    """The objective of low-rank cones that weigh by their samples, at scaled weights."""

    def __init__(self, cones: Sequence[ClassMomentCone]) -> None:
        moments = pool_moments(cones)
        self.classes, self.scale = moments.num_classes, torch.from_numpy(moments.feature_scale)
        self.labels, self.shares = map(torch.from_numpy, (moments.labels, moments.shares))
        parts: list[list[NDArray]] = [[], [], []]
        for cone in cones:
            assert isinstance(cone.covariance, LowRankCovariance)
            values = (cone.means, cone.covariance.deviations, cone.covariance.factors)
            for part, value in zip(parts, values, strict=True):
                part += list(dense(value).astype(np.float64))
        rank = max(factor.shape[1] for factor in parts[2])
        parts[2] = [np.pad(f, ((0, 0), (0, rank - f.shape[1]))) for f in parts[2]]
        means, deviations, factors = (torch.from_numpy(np.stack(part)) for part in parts)
        self.means, self.variances = means / self.scale, (deviations / self.scale) ** 2
        self.factors = factors / self.scale[:, None]
        nodes, weights = np.polynomial.hermite_e.hermegauss(POINTS)
        self.nodes, self.weights = map(torch.from_numpy, (nodes, weights / weights.sum()))

    def __call__(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the objective."""
        scores = self.means @ weight.T + bias
        rows = torch.arange(len(self.labels))
        margin = scores[rows, self.labels][:, None] - scores
        # Of w_c - w_j for every component, its class c and every class j: (components, classes, D).
        differences = weight[self.labels][:, None, :] - weight
        seen = differences @ self.factors
        variance = (seen**2).sum(dim=2) + (differences**2 @ self.variances[..., None])[..., 0]
        deviation = (variance + 1e-12).sqrt()[..., None]
        terms = softplus(-(margin[..., None] + deviation * self.nodes)) @ self.weights
        rivals = 1.0 - one_hot(self.labels, self.classes).to(terms)
        loss = self.shares @ (terms * rivals).sum(dim=1)
        return loss + RIDGE_LOW_RANK * (weight**2).sum()

    def value_and_gradient(self, weight: Tensor, bias: Tensor) -> tuple[float, Tensor, Tensor]:
        """Return the objective and its gradient by automatic differentiation."""
        leaves = [tensor.detach().requires_grad_() for tensor in (weight, bias)]
        value = self(*leaves)
        by_weight, by_bias = torch.autograd.grad(value, leaves)
        return float(value.detach()), by_weight, by_bias


def solve_plainly(cones: Sequence[ClassMomentCone]) -> NDArray[np.float64]:
    """Return the layer that `gems_flwr.intersect.cones.solve_cones` finds, the plain way."""
    objective = PlainObjective(cones)
    classes, features = cones[0].num_classes, cones[0].num_features
    split = classes * features

    def function(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        w = torch.from_numpy(flat)
        value, *parts = objective.value_and_gradient(w[:split].reshape(classes, -1), w[split:])
        return value, torch.cat([part.reshape(-1) for part in parts]).numpy()

    options = {"maxiter": 200, "maxcor": 20, "ftol": 1e-10, "gtol": 1e-7}
    found = minimize(
        function, np.zeros(split + classes), jac=True, method="L-BFGS-B", options=options
    )
    weight = found.x[:split].reshape(classes, features) / objective.scale.numpy()
    return np.concatenate([weight.reshape(-1), found.x[split:]])
