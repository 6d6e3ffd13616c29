"""One linear layer from the class moments of all nodes.

Beyond the papers: instead of any point of the intersection, the point with the smallest
expected pairwise logistic loss under the nodes' moments::

    sum_c pi_c sum_{j != c} E softplus(-(m_cj + sqrt(v_cj) xi)) + ridge |W|^2,  xi ~ N(0, 1)

with m, v as in `gems_flwr.spaces.cone` and pi_c the share of the samples. The expectation is
a 9-point Gauss-Hermite sum; L-BFGS minimises it. Features are divided by their pooled
deviation first, which is where the ridge acts. The objective is smooth and convex (softplus
is convex and rising in minus the margin, and sqrt(v) is convex in the weights).

Decided here: entries of the same class with *full* moments are pooled exactly before, so the
result does not depend on how the data was split; low-rank entries and clusters of a class
stay entries of their own, weighted by count. A public sample may join with its own loss
(see `gems_flwr.tuning`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from gems_flwr.intersect.pooled import PooledMoments, pool_moments
from gems_flwr.intersect.result import Intersection, in_all, node_margins
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.layout import flatten_linear

Float = NDArray[np.float64]

RIDGE_FULL = 2e-3
RIDGE_LOW_RANK = 3e-4


ClassWeight = Literal["counts", "balanced"]


@dataclasses.dataclass(frozen=True)
class ConeOptions:
    """How the cone objective is minimised.

    Parameters
    ----------
    ridge : float
        Weight of ``|W|^2`` on scaled features, at least 0. If left out, 2e-3 with full
        moments and 3e-4 without: the inflated diagonal of a low-rank covariance already
        acts as a ridge (both were chosen on MNIST validation data).
    iterations : int
        L-BFGS steps at most.
    points : int
        Gauss-Hermite points.
    device : str
        Where the objective is evaluated.
    class_weight : {"counts", "balanced"}
        Whether a class counts by its samples, or all classes the same (for balanced accuracy
        on data with rare classes).
    """

    ridge: float | None = None
    iterations: int = 200
    points: int = 9
    device: str = "cpu"
    class_weight: ClassWeight = "counts"

    def __post_init__(self) -> None:
        if self.class_weight not in get_args(ClassWeight):
            allowed = list(get_args(ClassWeight))
            raise ValueError(f"class_weight: expected one of {allowed}, got {self.class_weight!r}")
        for name, low in (("ridge", 0), ("iterations", 1), ("points", 1)):
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ValueError(f"{name}: expected at least {low}, got {value}")


@dataclasses.dataclass(frozen=True, eq=False)
class PublicSample:
    """A public sample that joins the objective with ``weight`` times its mean loss."""

    inputs: Tensor
    labels: Tensor
    weight: float


class _SymmetricForm(torch.autograd.Function):
    """``W S_e W^T`` for symmetric S_e; the backward pass reuses ``W S_e``.

    Reading the matrices (50 MB for ten classes of MNIST) is what the objective costs, and
    this reads them once instead of three times.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, matrices: Tensor) -> Tensor:
        classes, features = weight.shape
        # One tall product: (E * D, D) times (D, C).
        tall = matrices.reshape(-1, features) @ weight.T
        images = tall.reshape(len(matrices), features, classes).transpose(1, 2)
        ctx.save_for_backward(images)
        return images @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (images,) = ctx.saved_tensors
        both = grads[0] + grads[0].transpose(1, 2)
        return (both @ images).sum(dim=0), None


class ConeObjective:
    """The smooth objective as a function of scaled weights (C, D) and bias (C,)."""

    def __init__(
        self,
        moments: PooledMoments,
        options: ConeOptions,
        public: PublicSample | None = None,
    ) -> None:
        device = torch.device(options.device)
        self.classes = moments.num_classes
        by_form = RIDGE_FULL if moments.matrices is not None else RIDGE_LOW_RANK
        self.ridge = by_form if options.ridge is None else options.ridge
        self.scale = torch.from_numpy(moments.feature_scale).to(device)
        self.labels = torch.from_numpy(moments.labels).to(device)
        shares = moments.shares
        if options.class_weight == "balanced":
            shares = balanced_shares(moments.labels, shares)
        self.shares = torch.from_numpy(shares).to(device)
        self.means = torch.from_numpy(moments.means).to(device) / self.scale
        self.matrices, self.factors, self.variances = None, None, None
        if moments.matrices is not None:
            outer = self.scale[:, None] * self.scale
            self.matrices = torch.from_numpy(moments.matrices).to(device) / outer
        if moments.factors is not None and moments.variances is not None:
            self.factors = torch.from_numpy(moments.factors).to(device) / self.scale[:, None]
            self.variances = torch.from_numpy(moments.variances).to(device) / self.scale**2
        self.full = torch.from_numpy(moments.full_entries).to(device)
        self.low = torch.from_numpy(moments.low_entries).to(device)
        nodes, weights = np.polynomial.hermite_e.hermegauss(options.points)
        self.nodes = torch.from_numpy(nodes).to(device)
        self.node_weights = torch.from_numpy(weights / weights.sum()).to(device)
        self.public = public
        if public is not None:
            self.public_inputs = public.inputs.to(device, torch.float64) / self.scale
            self.public_labels = public.labels.to(device, torch.long)

    def __call__(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the objective at scaled weights."""
        scores = self.means @ weight.T + bias
        margin = scores.gather(1, self.labels[:, None]) - scores
        deviation = (self.variance(weight) + 1e-12).sqrt()
        terms = softplus(-(margin[..., None] + deviation[..., None] * self.nodes))
        expected = terms @ self.node_weights
        # The true class against itself is no rival.
        rivals = 1.0 - torch.nn.functional.one_hot(self.labels, self.classes).to(expected)
        loss = self.shares @ (expected * rivals).sum(dim=1)
        loss = loss + self.ridge * (weight * weight).sum()
        if self.public is not None:
            logits = self.public_inputs @ weight.T + bias
            loss = loss + self.public.weight * cross_entropy(logits, self.public_labels)
        return loss

    def variance(self, weight: Tensor) -> Tensor:
        """Return the variance of every entry's margin over every class, (entries, C)."""
        out = weight.new_zeros(len(self.labels), self.classes)
        for entries, inner in self._inner_products(weight):
            diagonal = inner.diagonal(dim1=1, dim2=2)
            labels = self.labels[entries]
            own = diagonal.gather(1, labels[:, None])
            cross = inner.gather(1, labels[:, None, None].expand(-1, 1, self.classes))[:, 0]
            out = out.index_copy(0, entries, (own + diagonal - 2 * cross).clamp_min(0))
        return out

    def _inner_products(self, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return ``W Sigma_e W^T`` (C, C) for the full and for the low-rank entries."""
        parts = []
        if self.matrices is not None:
            parts.append((self.full, _SymmetricForm.apply(weight, self.matrices)))
        if self.factors is not None and self.variances is not None:
            seen = weight @ self.factors
            spread = torch.matmul(weight * self.variances[:, None, :], weight.T)
            parts.append((self.low, seen @ seen.transpose(1, 2) + spread))
        return parts


def balanced_shares(labels: NDArray[np.int64], shares: Float) -> Float:
    """Return shares in which all classes that occur weigh the same."""
    totals = np.bincount(labels, weights=shares)
    return np.asarray(shares / totals[labels] / np.count_nonzero(totals))


def solve_cones(
    cones: Sequence[ClassMomentCone],
    options: ConeOptions | None = None,
    public: PublicSample | None = None,
    start: Float | None = None,
) -> Intersection:
    """Return the linear layer that serves the class moments of all nodes best.

    Parameters
    ----------
    cones : sequence of ClassMomentCone
        One per node, or one that others were merged into.
    options : ConeOptions, optional
        Ridge, iterations and so on.
    public : PublicSample, optional
        Joins the objective.
    start : array of shape (d,), optional
        Flat layer to start from, such as the result without a late node.

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
    objective = ConeObjective(moments, options, public)
    classes, features = moments.num_classes, moments.means.shape[1]
    split, scale = classes * features, moments.feature_scale

    def value_and_gradient(flat: Float) -> tuple[float, Float]:
        w = torch.from_numpy(flat).to(options.device).requires_grad_(True)
        loss = objective(w[:split].reshape(classes, features), w[split:])
        loss.backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        return float(loss.detach()), w.grad.cpu().numpy()

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
