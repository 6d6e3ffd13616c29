"""The expected pairwise logistic loss of a linear layer under class moments, and its gradient.

The formula stands in `gems_flwr.intersect.cones`. It is a sum over components, evaluated a block of
components at a time (see `pooled_moments`), so that what it takes beside the moments as
they were received does not grow with the number of nodes. Automatic differentiation would keep
every block until the end. So the products with large arrays are differentiated by hand, in the
block where they are made; what has a few numbers per component and class is left to torch.

Decided here: sums over components are taken in the order in which automatic differentiation of the
whole formula would. With linear algebra that adds up term by term (MKL, where it was tried) the
digits then do not depend on the blocks, or only the last one of a few weights.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, softplus

from gems_flwr.devices import exact_device
from gems_flwr.errors import OptionError
from gems_flwr.intersect.pooled_moments import CascadeSum, ComponentBlock, PooledMoments
from gems_flwr.samples import Samples
from gems_flwr.typing import Float

RIDGE_FULL = 2e-3
RIDGE_LOW_RANK = 3e-4
# Of the Gauss-Hermite sum that stands for an expectation.
POINTS = 9

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
    device : str or torch.device
        Where the objective is evaluated; see `gems_flwr.devices.exact_device`.
    class_weight : {"counts", "balanced"}
        Whether a class counts by its samples, or all classes the same (for balanced accuracy
        on data with rare classes).
    """

    ridge: float | None = None
    iterations: int = 200
    device: str | torch.device = "cpu"
    class_weight: ClassWeight = "counts"

    def __post_init__(self) -> None:
        if self.class_weight not in get_args(ClassWeight):
            allowed = list(get_args(ClassWeight))
            raise OptionError(f"class_weight: expected one of {allowed}, got {self.class_weight!r}")
        for name, low in (("ridge", 0), ("iterations", 1)):
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise OptionError(f"{name}: expected at least {low}, got {value}")


# Of a full covariance in double precision at a time.
_ROWS_BYTES = 2**20


class ConeObjective:
    """The smooth objective as a function of scaled weights (C, D) and bias (C,).

    Parameters
    ----------
    moments : PooledMoments
        Of all nodes.
    options : ConeOptions
        Ridge, device and class weights.
    public : Samples, optional
        A public sample, which joins the objective with `public_weight` times its mean loss.
    public_weight : float
        At least 0.
    """

    def __init__(
        self,
        moments: PooledMoments,
        options: ConeOptions,
        public: Samples | None = None,
        public_weight: float = 0.0,
    ) -> None:
        self.device = exact_device(options.device)
        self.classes, self.public = moments.num_classes, public
        self.public_weight = public_weight
        by_form = RIDGE_FULL if moments.matrices else RIDGE_LOW_RANK
        self.ridge = by_form if options.ridge is None else options.ridge
        shares = moments.shares
        if options.class_weight == "balanced":
            shares = balanced_shares(moments.labels, shares)
        self.scale, self.labels, self.shares = map(
            self._tensor, (moments.feature_scale, moments.labels, shares)
        )
        self.matrices, self.low = moments.matrices, moments.low
        self.means = self._tensor(moments.means) / self.scale
        nodes, weights = np.polynomial.hermite_e.hermegauss(POINTS)
        self.nodes = self._tensor(nodes)
        self.node_weights = self._tensor(weights / weights.sum())
        if public is not None:
            self.public_inputs = public.inputs.to(self.device).to(torch.float64) / self.scale
            self.public_labels = public.labels.to(self.device, torch.long)

    def value_and_gradient(self, weight: Tensor, bias: Tensor) -> tuple[float, Tensor, Tensor]:
        """Return the objective at scaled weights, and its gradient by weights and by bias."""
        step = _Step(self, weight, bias)
        if self.matrices:
            step.add_full()
        for block in self.low.blocks():
            step.add_low(block)
            del block  # before the next one is made
        return step.total()

    def component_losses(self, components: slice, scores: Tensor, inner: Tensor) -> Tensor:
        """Return the loss of some components, not yet weighted.

        Parameters
        ----------
        components : slice
            Which of all.
        scores : tensor of shape (n, C)
            Of their means.
        inner : tensor of shape (n, C, C)
            ``W Sigma_e W^T`` for each of them.
        """
        labels = self.labels[components]
        margin = scores.gather(1, labels[:, None]) - scores
        diagonal = inner.diagonal(dim1=1, dim2=2)
        own = diagonal.gather(1, labels[:, None])
        cross = inner.gather(1, labels[:, None, None].expand(-1, 1, self.classes))[:, 0]
        variance = (own + diagonal - 2 * cross).clamp_min(0)
        deviation = (variance + 1e-12).sqrt()
        terms = softplus(-(margin[..., None] + deviation[..., None] * self.nodes))
        expected = terms @ self.node_weights
        # The true class against itself is no rival.
        rivals = 1.0 - one_hot(labels, self.classes).to(expected)
        return (expected * rivals).sum(dim=1)

    def times_full(self, component: int, weight: Tensor) -> Tensor:
        """Return ``S W^T``, (D, C), for a full covariance S of scaled features, by some rows."""
        matrix, features = self.matrices[component], len(self.scale)
        size = max(2, _ROWS_BYTES // (8 * features))
        bounds = [*range(0, features - 1, size), features]
        product = weight.new_empty(features, self.classes)
        for first, last in itertools.pairwise(bounds):
            rows = self._tensor(matrix[first:last].astype(np.float64))
            rows.div_(self.scale[first:last, None] * self.scale)
            torch.mm(rows, weight.T, out=product[first:last])
        return product

    def scaled(self, block: ComponentBlock) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, variances and factors of scaled features; uses up the block."""
        means, variances, factors = map(self._tensor, (block.means, block.variances, block.factors))
        return means.div_(self.scale), variances.div_(self.scale**2), factors.div_(self.scale)

    def public_loss(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the weighted loss of the public sample."""
        assert self.public is not None
        logits = self.public_inputs @ weight.T + bias
        return self.public_weight * cross_entropy(logits, self.public_labels)

    def _tensor(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class _Step:
    """One evaluation under way: losses of the components so far, and parts of the gradient."""

    def __init__(self, objective: ConeObjective, weight: Tensor, bias: Tensor) -> None:
        self.objective, self.weight, self.bias = objective, weight, bias
        components = len(objective.labels)
        self.losses = weight.new_empty(components)
        self.by_scores = weight.new_empty(components, objective.classes)
        # The gradient by the weights: through scores, full covariances, factors, and the right
        # and the left side of ``W diag(v) W^T``.
        self.through_scores = torch.zeros_like(weight)
        self.through_full: Tensor | None = None
        self.through_factors = torch.zeros_like(weight)
        self.through_right = torch.zeros_like(weight)
        self.through_left = CascadeSum()

    def add_full(self) -> None:
        """Take in the components with full covariances."""
        objective, weight = self.objective, self.weight
        components = slice(0, len(objective.matrices))
        # A matrix is needed once, as it is symmetric: W S is kept, and serves the gradient.
        products = [objective.times_full(e, weight) for e in range(components.stop)]
        images = torch.stack(products).transpose(1, 2)
        flat = images.reshape(-1, weight.shape[1]) @ weight.T
        inner = flat.reshape(-1, objective.classes, objective.classes).requires_grad_()
        (by_inner,) = self._add(components, objective.means, inner, [inner])
        self.through_full = ((by_inner + by_inner.transpose(1, 2)) @ images).sum(dim=0)

    def add_low(self, block: ComponentBlock) -> None:
        """Take in some components with low-rank covariances."""
        weight, classes = self.weight, self.objective.classes
        first = len(self.objective.matrices)
        components = slice(first + block.components.start, first + block.components.stop)
        means, variances, factors = self.objective.scaled(block)
        count, features = means.shape
        present = torch.from_numpy(block.present).to(weight.device)
        wide = (weight * variances[:, None, :]).reshape(count * classes, features)
        # Components of fewer columns than others see nothing in the rest.
        padded = weight.new_zeros(*present.shape, classes)
        padded[present] = factors @ weight.T
        seen = padded.transpose(1, 2).contiguous().requires_grad_()
        spread = (wide @ weight.T).reshape(count, classes, classes).requires_grad_()
        inner = seen @ seen.transpose(1, 2) + spread
        by_seen, by_spread = self._add(components, means, inner, [seen, spread])
        rows = by_spread.reshape(count * classes, classes)
        self.through_factors.addmm_(by_seen.transpose(1, 2)[present].T, factors)
        self.through_right.addmm_(rows.T, wide)
        left = torch.mm(rows, weight, out=wide).reshape(count, classes, features)
        self.through_left.add(left.mul_(variances[:, None, :]))

    def total(self) -> tuple[float, Tensor, Tensor]:
        """Return value and gradient when all components are in.

        Parts are added in the order in which automatic differentiation would.
        """
        objective, weight = self.objective, self.weight
        value = objective.shares @ self.losses + objective.ridge * (weight * weight).sum()
        by_weight, by_bias = torch.zeros_like(weight), torch.zeros_like(self.bias)
        if objective.public is not None:
            leaves = [t.detach().requires_grad_() for t in (weight, self.bias)]
            loss = objective.public_loss(*leaves)
            by_weight, by_bias = torch.autograd.grad(loss, leaves)
            value = value + loss.detach()
        by_weight = by_weight + objective.ridge * weight + objective.ridge * weight
        if len(objective.low):
            by_weight = by_weight + self.through_right
            by_weight = by_weight + self.through_left.total() + self.through_factors
        if self.through_full is not None:
            by_weight = by_weight + self.through_full
        by_weight = by_weight + self.through_scores
        return float(value), by_weight, by_bias + self.by_scores.sum(dim=0)

    def _add(
        self, components: slice, means: Tensor, inner: Tensor, leaves: list[Tensor]
    ) -> list[Tensor]:
        """Take in losses and scores; return the gradient by what `inner` is made of."""
        scores = (means @ self.weight.T + self.bias).requires_grad_()
        losses = self.objective.component_losses(components, scores, inner)
        by_scores, *others = torch.autograd.grad(
            losses, [scores, *leaves], self.objective.shares[components]
        )
        self.losses[components], self.by_scores[components] = losses.detach(), by_scores
        self.through_scores.addmm_(by_scores.T, means)
        return others


def balanced_shares(labels: NDArray[np.int64], shares: Float) -> Float:
    """Return shares in which all classes that occur weigh the same."""
    totals = np.bincount(labels, weights=shares)
    return np.asarray(shares / totals[labels] / np.count_nonzero(totals))
