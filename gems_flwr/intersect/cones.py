"""One linear layer from the class moments of all nodes.

Beyond the papers: instead of any point of the intersection, the point with the smallest
expected pairwise logistic loss under the nodes' moments::

    sum_c pi_c sum_{j != c} E softplus(-(m_cj + sqrt(v_cj) xi)) + ridge |W|^2,  xi ~ N(0, 1)

with m, v as in `gems_flwr.spaces.cone` and pi_c the share of the samples. The expectation is
a 9-point Gauss-Hermite sum; L-BFGS minimises it. Features are divided by their pooled
deviation first, which is where the ridge acts. The objective is smooth and convex (softplus
is convex and rising in minus the margin, and sqrt(v) is convex in the weights).

Decided here: components of the same class with *full* moments are pooled exactly before, so the
result does not depend on how the data was split; low-rank components and clusters of a class
stay components of their own, weighted by count. A public sample may join with its own loss
(see `gems_flwr.intersect.tuning`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import minimize

from gems_flwr.intersect.cone_objective import ConeObjective, ConeOptions
from gems_flwr.intersect.pooled_moments import pool_moments
from gems_flwr.intersect.result import Intersection, in_all, node_margins
from gems_flwr.samples import Samples
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.output_layer import flatten_linear
from gems_flwr.typing import Float


def solve_cones(
    cones: Sequence[ClassMomentCone],
    options: ConeOptions | None = None,
    public: Samples | None = None,
    start: Float | None = None,
    public_weight: float = 0.0,
) -> Intersection:
    """Return the linear layer that serves the class moments of all nodes best.

    Parameters
    ----------
    cones : sequence of ClassMomentCone
        One per node, or one that others were merged into.
    options : ConeOptions, optional
        Ridge, iterations and so on.
    public : Samples, optional
        Joins the objective.
    start : array of shape (d,), optional
        Flat layer to start from, such as the result without a late node.
    public_weight : float
        Of the public sample's mean loss, at least 0.

    Returns
    -------
    Intersection
        ``feasible`` if the layer lies in every node's cone, else ``undecided``; the
        bounds are minus and plus infinity, for nothing is proved. `mixed.intersect_convex`
        decides emptiness.
    """
    began = time.perf_counter()
    options = options or ConeOptions()
    moments = pool_moments(cones)
    objective = ConeObjective(moments, options, public, public_weight)
    classes, features = moments.num_classes, moments.means.shape[1]
    split, scale = classes * features, moments.feature_scale

    def value_and_gradient(flat: Float) -> tuple[float, Float]:
        w = torch.from_numpy(flat).to(objective.device)
        value, *parts = objective.value_and_gradient(
            w[:split].reshape(classes, features), w[split:]
        )
        return value, torch.cat([part.reshape(-1) for part in parts]).cpu().numpy()

    first = np.zeros(split + classes)
    if start is not None:
        first[:split] = (np.asarray(start)[:split].reshape(classes, features) * scale).reshape(-1)
        first[split:] = np.asarray(start)[split:]
    found = minimize(
        value_and_gradient,
        first,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": options.iterations, "maxcor": 20, "ftol": 1e-10, "gtol": 1e-7},
    )
    weight = found.x[:split].reshape(classes, features) / scale
    point = flatten_linear(weight, found.x[split:])
    inside = in_all(cones, point)
    return Intersection(
        status="feasible" if inside else "undecided",
        point=point,
        margins=node_margins(cones, point),
        lower_bound=-np.inf,
        upper_bound=0.0 if inside else np.inf,
        is_average=False,
        method="cones: expected pairwise logistic loss",
        iterations=int(found.nit),
        seconds=time.perf_counter() - began,
        choice=(0,) * len(cones),
    )
