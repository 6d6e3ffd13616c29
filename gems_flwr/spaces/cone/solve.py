"""One linear layer from the class moments of all nodes: the server's side.

Beyond the papers: instead of any point of the intersection, the point with the smallest expected
pairwise logistic loss under the nodes' moments::

    sum_c pi_c sum_{j != c} E softplus(-(m_cj + sqrt(v_cj) xi)) + ridge |W|^2,  xi ~ N(0, 1)

with m, v as in `gems_flwr.spaces.cone.cone` and pi_c the share of the samples: smooth and convex.
The expectation is a 9-point Gauss-Hermite sum; L-BFGS minimises it. Features are divided by their
pooled deviation first, which is where the ridge acts. Torch differentiates what has a few numbers
per component; as covariances are symmetric, their products with W serve the gradient.

**The moments of all nodes.** Full moments of one class are pooled exactly (counts add, means and
covariances by the law of total variance), so that any split of the same data gives the same
numbers. Low-rank components stay as they were sent, and a few at a time become numbers in double
precision: of thousands of nodes all would not fit into memory.

A class too small for a covariance on a node is lent that of the same class on other nodes, where
any sent it, else the covariance within all classes. Where no node sent any, it is estimated from
the spread of means, as in FedCOF: the mean of n samples has covariance Sigma / n, so that for K_c
groups of class c, with n_ck samples and means mu_ck around mu_c, Sigma is on average
``sum_c sum_k n_ck (mu_ck - mu_c) (mu_ck - mu_c)^T / sum_c (K_c - 1)``; without a second mean of any
class a round covariance stands for it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, softplus

from gems_flwr.bounds import MAX_WEIGHT
from gems_flwr.devices import exact_device
from gems_flwr.errors import OptionError
from gems_flwr.samples import Samples
from gems_flwr.spaces.cone.build import factor
from gems_flwr.spaces.cone.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.cone.covariance import (
    DEAD,
    CommonCovariance,
    FullCovariance,
    LowRankCovariance,
    Own,
)
from gems_flwr.spaces.convex import Intersection, flatten_linear, verdict_of
from gems_flwr.typing import Float

# Chosen on MNIST validation data.
RIDGE_FULL = 2e-3
RIDGE_LOW_RANK = 3e-4
# Of the Gauss-Hermite sum that stands for an expectation.
POINTS = 9
# A block may take a quarter of what was received, within what is worth a step in Python and what
# the processor's cache holds.
_SMALLEST_BLOCK_BYTES, _LARGEST_BLOCK_BYTES = 2**20, 2**22
# Directions of an estimate from means, which has as many as there are means.
_MOST_DIRECTIONS = 64
# Of what the means leave: a share of the mean variance in every direction.
_ROUND_SHARE = 0.1
# In double precision where several nodes' moments were pooled; one node's alone as it sent them.
Matrix = NDArray[np.float32] | NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class PooledMoments:
    """Components of all nodes, full ones pooled by class; the full ones come first."""

    num_classes: int
    labels: NDArray[np.int64]  # class of each component
    shares: Float  # of each component, of all samples
    means: Float  # (full components, D)
    matrices: tuple[Matrix, ...]  # their covariances
    low: LowRankComponents  # the other components

    @functools.cached_property
    def units(self) -> Float:
        """Units of the features, (D,): those of nodes with a common covariance, or 1."""
        found = [cone for cone in self.low.cones if isinstance(cone.covariance, CommonCovariance)]
        if not found:
            return np.ones(self.means.shape[1])
        octaves = np.array([cone.covariance.octaves for cone in found])  # type: ignore[union-attr]
        weights = np.array([[cone.total_count] for cone in found]) * (octaves > DEAD) + 1e-9
        return np.asarray(2.0 ** ((weights * octaves).sum(axis=0) / weights.sum(axis=0) / 4))

    @functools.cached_property
    def center(self) -> Float:
        """Mean of all samples, (D,)."""
        parts = [self.shares[rows] @ means for rows, means in component_means(self)]
        return np.asarray(np.sum(parts, axis=0))

    @functools.cached_property
    def feature_scale(self) -> Float:
        """Deviation of each feature over all samples, floored, (D,)."""
        diagonals = np.array([np.diag(matrix) for matrix in self.matrices], dtype=np.float64)
        variance = self.shares[: len(diagonals)] @ diagonals.reshape(self.means.shape)
        # By the law of total variance.
        for components, means in component_means(self):
            variance = variance + self.shares[components] @ (means - self.center) ** 2
        for rows, within in self.low.spreads(self.shares):
            variance = variance + within + (rows**2).sum(axis=0)
        deviations = np.sqrt(np.maximum(variance, 0)) / self.units
        typical = float(np.sqrt((deviations**2).mean()))
        # A feature that hardly varies would otherwise be blown up to the size of the others.
        return np.maximum(deviations, 0.1 * typical if typical > 0 else 1.0) * self.units


def pool_moments(cones: Sequence[ClassMomentCone]) -> PooledMoments:
    """Gather the moments of all nodes; components without a covariance are lent one."""
    cones = lend_covariances(cones)
    shapes = sorted({(cone.num_classes, cone.num_features) for cone in cones})
    if len(shapes) != 1:
        raise ValueError(f"cones: expected one number of classes and features, got {shapes}")
    num_classes, features = shapes[0]
    pooled: dict[int, tuple[int, Float, Matrix]] = {}
    apart: list[tuple[int, int, Float, Matrix]] = []
    for cone in cones:
        if not isinstance(cone.covariance, FullCovariance):
            continue
        own = zip(cone.counts.tolist(), mean_values(cone), cone.covariance.matrices, strict=True)
        rows = list(zip(cone.labels.tolist(), own, strict=True))
        if len(set(cone.labels.tolist())) < len(rows):  # clusters, which pooling would undo
            apart += [(label, *moments) for label, moments in rows]
            continue
        for label, moments in rows:
            pooled[label] = _pooled(pooled[label], moments) if label in pooled else moments
    full = [(label, *moments) for label, moments in pooled.items()] + apart
    matrices = [matrix for *_, matrix in full]
    low = LowRankComponents.of(cones, len(full))
    labels, counts = [label for label, *_ in full], [count for _, count, *_ in full]
    for cone in low.cones:
        labels += cone.labels.tolist()
        counts += cone.counts.tolist()
    shares = np.array(counts, dtype=np.float64) / sum(counts)
    full_means = np.reshape([mean for *_, mean, _ in full], (len(full), features))
    return PooledMoments(
        num_classes=num_classes,
        labels=np.array(labels, dtype=np.int64),
        shares=shares,
        means=full_means,
        matrices=tuple(matrices),
        low=low,
    )


def _pooled(
    old: tuple[int, Float, Matrix], new: tuple[int, Float, Matrix]
) -> tuple[int, Float, Matrix]:
    """Return count, mean and covariance of both parts of a class together."""
    (old_count, old_mean, old_matrix), (count, mean, matrix) = old, new
    total, step = old_count + count, mean - old_mean
    # Law of total variance, in the form that does not cancel.
    between = np.outer(step, step) * (old_count * count / total**2)
    # One matrix in double precision for a class, however many nodes have it.
    both = np.asarray(old_matrix, dtype=np.float64)
    both *= old_count
    both += np.multiply(matrix, count, dtype=np.float64)
    both /= total
    both += between
    return total, old_mean + step * (count / total), both


# --- low-rank components, a block at a time -------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ComponentBlock:
    """Some consecutive components in double precision."""

    components: slice
    means: Float  # (n, D)
    variances: Float  # the diagonal parts of the covariances (n, D)
    factors: Float  # their columns as rows, zeros where others have more (n, largest rank, D)


@dataclasses.dataclass(frozen=True, eq=False)
class LowRankComponents:
    """The components of all cones with low-rank covariances, in order; no array is copied."""

    cones: tuple[ClassMomentCone, ...]
    first: int = 0  # the number of the first component: the full ones come before

    @classmethod
    def of(cls, cones: Sequence[ClassMomentCone], first: int = 0) -> LowRankComponents:
        """Take the cones with low-rank or common covariances."""
        kinds = (LowRankCovariance, CommonCovariance)
        return cls(tuple(c for c in cones if isinstance(c.covariance, kinds)), first)

    def spreads(self, weights: Float) -> Iterator[tuple[Float, Float]]:
        """Yield what adds up to the weighted sum of covariances: rows of factors, and variances.

        A common covariance counts once for all of its classes, for it is that within them.
        """
        start = self.first
        for cone in self.cones:
            covariance, own = _covariance(cone), weights[start : start + len(cone.labels)]
            start += len(own)
            if isinstance(covariance, CommonCovariance):
                rows, deviations = covariance.common
                yield rows * np.sqrt(own.sum()), own.sum() * deviations**2
                continue
            for index in np.flatnonzero(own).tolist():
                factor = covariance.factor(index).T.astype(np.float64)
                yield factor * np.sqrt(own[index]), own[index] * covariance.variances(index)

    def __len__(self) -> int:
        return len(self._entries)

    @functools.cached_property
    def _entries(self) -> list[tuple[ClassMomentCone, int]]:
        return [(cone, index) for cone in self.cones for index in range(len(cone.labels))]

    @functools.cached_property
    def _block_size(self) -> int:
        features, classes = self.cones[0].num_features, self.cones[0].num_classes
        rank = max(_covariance(cone).factor(index).shape[1] for cone, index in self._entries)
        received = sum(cone.size_bytes for cone in self.cones)
        budget = min(max(received // 4, _SMALLEST_BLOCK_BYTES), _LARGEST_BLOCK_BYTES)
        # A step of the objective makes an array of shape (n, C, D) beside the block itself.
        return int(max(1, budget // (8 * features * (rank + 2 + classes))))

    def blocks(self) -> Iterator[ComponentBlock]:
        """Yield all components, a few at a time."""
        for first in range(0, len(self), self._block_size if self.cones else 1):
            entries = self._entries[first : first + self._block_size]
            factors = [_covariance(cone).factor(index).T for cone, index in entries]
            padded = np.zeros((len(entries), max(map(len, factors)), factors[0].shape[1]))
            for place, rows in zip(padded, factors, strict=True):
                place[: len(rows)] = rows
            # Means of a cone are decoded together.
            means = {id(cone): mean_values(cone) for cone, _ in entries}
            yield ComponentBlock(
                slice(self.first + first, self.first + first + len(entries)),
                np.stack([means[id(cone)][index] for cone, index in entries]),
                np.stack([_covariance(cone).variances(index) for cone, index in entries]),
                padded,
            )


def _covariance(cone: ClassMomentCone) -> LowRankCovariance | CommonCovariance:
    assert isinstance(cone.covariance, LowRankCovariance | CommonCovariance)
    return cone.covariance


# --- shares, means and covariances of whole classes -----------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class HeadMoments:
    """Class moments of all nodes together: what closed-form classifiers need.

    Components of a class are one class here; their means' spread belongs to its covariance (law of
    total variance). Shares and means are 0 where no node sent any samples.
    """

    shares: Float  # of each class, of all samples (C,)
    means: Float  # (C, D)
    within: Float  # covariance within the classes, each weighted by its share (D, D)
    units: Float  # of the features, (D,)
    pooled: PooledMoments | None = None  # for covariances of single classes

    @classmethod
    def of(cls, cones: Sequence[ClassMomentCone]) -> HeadMoments:
        """Gather the moments of all nodes."""
        pooled = pool_moments(cones)
        shares = np.zeros(pooled.num_classes)
        np.add.at(shares, pooled.labels, pooled.shares)
        sums = np.zeros((pooled.num_classes, pooled.means.shape[1]))
        for components, own in component_means(pooled):
            np.add.at(sums, pooled.labels[components], pooled.shares[components, None] * own)
        means = sums / np.where(shares > 0, shares, 1.0)[:, None]
        if all(cone.lacking.all() for cone in cones):
            return cls(shares, means, covariance_from_means(cones), pooled.units)
        within = _spread_around(pooled, means, np.ones(len(pooled.labels), dtype=bool))
        return cls(shares, means, within, pooled.units, pooled)

    def class_covariance(self, label: int) -> Float:
        """Return the covariance of one class, (D, D)."""
        assert self.pooled is not None
        chosen = self.pooled.labels == label
        return _spread_around(self.pooled, self.means, chosen) / float(self.shares[label])


def component_means(pooled: PooledMoments) -> Iterator[tuple[slice, Float]]:
    """Yield the means of all components, some at a time."""
    if pooled.matrices:
        yield slice(0, len(pooled.matrices)), pooled.means
    start = pooled.low.first
    for cone in pooled.low.cones:
        yield slice(start, start + len(cone.labels)), mean_values(cone)
        start += len(cone.labels)


def component_images(
    pooled: PooledMoments, weight: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield all components, some at a time: which, their means, and ``W Sigma`` (n, C, D)."""
    if pooled.matrices:
        products = [weight @ torch.tensor(matrix).to(weight) for matrix in pooled.matrices]
        means = torch.from_numpy(pooled.means).to(weight)
        yield slice(0, len(products)), means, torch.stack(products)
    for block in pooled.low.blocks():
        arrays = (block.means, block.variances, block.factors)
        means, variances, factors = (torch.from_numpy(array).to(weight) for array in arrays)
        images = (weight @ factors.mT) @ factors
        images += weight * variances[:, None]
        yield block.components, means, images
        del block, arrays, factors, images  # before the next one is made


def _spread_around(pooled: PooledMoments, means: Float, chosen: Float) -> Float:
    """Return the spread of some components around their classes' means, each times its share."""
    full, weights = len(pooled.matrices), np.where(chosen, pooled.shares, 0.0)
    features = pooled.means.shape[1]
    total = np.zeros((features, features))
    for component in np.flatnonzero(chosen[:full]):
        total += np.multiply(pooled.matrices[component], weights[component], dtype=np.float64)
    for components, own in component_means(pooled):
        off = own - means[pooled.labels[components]]
        total += (off * weights[components, None]).T @ off
    diagonal = np.zeros(features)
    for rows, variances in pooled.low.spreads(weights):
        diagonal += variances
        total += rows.T @ rows
    total[np.diag_indices_from(total)] += diagonal
    return (total + total.T) / 2


# --- covariances for components without one -------------------------------------------------------


def missing_classes(cones: Sequence[ClassMomentCone]) -> tuple[int, ...]:
    """Return the classes of the task of which no node sent anything."""
    sent = set().union(*(cone.labels.tolist() for cone in cones))
    return tuple(label for label in range(cones[0].num_classes) if label not in sent)


def lend_covariances(cones: Sequence[ClassMomentCone]) -> list[ClassMomentCone]:
    """Return cones in which every component has a covariance; as they are where none lacks one."""
    if not any(cone.lacking.any() for cone in cones):
        return list(cones)
    parts = [cone.without_components(cone.lacking) for cone in cones]
    regular = [part for part in parts if part is not None]
    # The small parts of a class are one component.
    small = np.concatenate([cone.labels[cone.lacking] for cone in cones])
    samples = np.concatenate([cone.counts[cone.lacking] for cone in cones])
    rows = np.concatenate([mean_values(cone)[cone.lacking] for cone in cones])
    labels = np.unique(small)
    counts = np.array([samples[small == label].sum() for label in labels], dtype=np.int64)
    means = np.stack([samples[small == label] @ rows[small == label] for label in labels])
    stored = (means / counts[:, None]).astype(np.float32)
    lent = _lent(cones, regular, labels.tolist())
    return [*regular, ClassMomentCone(cones[0].num_classes, labels, counts, stored, lent)]


def _lent(
    cones: Sequence[ClassMomentCone], regular: Sequence[ClassMomentCone], labels: Sequence[int]
) -> Own:
    """Return a covariance for the small parts of each class, from the cones that have any."""
    if not regular:
        estimate = covariance_from_means(cones)
        top, rest = factor(estimate, min(_MOST_DIRECTIONS, len(estimate)))
        # An estimate from few means has some spread everywhere.
        variance = float(np.trace(estimate)) / len(estimate)
        return _stacked([(top, np.sqrt(rest**2 + _ROUND_SHARE * variance))] * len(labels))
    moments = HeadMoments.of(regular)
    donors = [
        moments.class_covariance(label) if moments.shares[label] > 0 else moments.within
        for label in labels
    ]
    if any(isinstance(cone.covariance, FullCovariance) for cone in regular):
        return FullCovariance(np.stack(donors).astype(np.float32))
    pairs = ((_covariance(cone), e) for cone in regular for e in range(len(cone.labels)))
    most = max(covariance.factor(e).shape[1] for covariance, e in pairs)
    return _stacked([factor(matrix, most) for matrix in donors])


def _stacked(pairs: Sequence[tuple[Float, Float]]) -> LowRankCovariance:
    # Means within the bound may scatter beyond it: no node's lie is to end the run here.
    factors, deviations = (
        np.clip(np.stack(each), -MAX_WEIGHT, MAX_WEIGHT).astype(np.float32)
        for each in zip(*pairs, strict=True)
    )
    return LowRankCovariance(factors, deviations)


def covariance_from_means(cones: Sequence[ClassMomentCone]) -> Float:
    """Return the covariance within classes, (D, D), estimated from counts and means alone."""
    labels = np.concatenate([cone.labels for cone in cones])
    counts = np.concatenate([cone.counts for cone in cones]).astype(np.float64)
    means = np.concatenate([mean_values(cone) for cone in cones])
    freedom = len(labels) - len(np.unique(labels))
    if not freedom:
        return np.eye(cones[0].num_features)
    # Each mean's distance from its class's, times the root of its count.
    rows = np.empty_like(means)
    for label in np.unique(labels):
        mine = labels == label
        center = counts[mine] @ means[mine] / counts[mine].sum()
        rows[mine] = np.sqrt(counts[mine])[:, None] * (means[mine] - center)
    return np.asarray(rows.T @ rows / freedom)


# --- the layer ------------------------------------------------------------------------------------


ClassWeight = Literal["counts", "balanced"]


@dataclasses.dataclass(frozen=True)
class ConeOptions:
    """How the cone objective is minimised.

    Parameters
    ----------
    ridge : float, optional
        Weight of ``|W|^2`` on scaled features, at least 0. If left out, 2e-3 with full moments and
        3e-4 without: the inflated diagonal of a low-rank covariance already acts as a ridge.
    iterations : int
        L-BFGS steps at most.
    device, class_weight
        Where the objective is evaluated; whether a class counts by its samples ("counts"), or all
        classes the same ("balanced").
    """

    ridge: float | None = None
    iterations: int = 200
    device: str | torch.device = "cpu"
    class_weight: ClassWeight = "counts"

    def __post_init__(self) -> None:
        if self.class_weight not in ("counts", "balanced"):
            raise OptionError(f"class_weight: expected counts or balanced, got {self.class_weight}")
        for name, low in (("ridge", 0), ("iterations", 1)):
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise OptionError(f"{name}: expected at least {low}, got {value}")


def solve_cones(
    cones: Sequence[ClassMomentCone],
    options: ConeOptions | None = None,
    public: Samples | None = None,
    start: Float | None = None,
    public_weight: float = 0.0,
) -> Intersection:
    """Return the linear layer that serves the class moments of all nodes best.

    The result is ``feasible`` if it lies in every node's cone, else ``undecided``. Samples that are
    `public` join the objective with `public_weight` times their mean loss; `start` is a flat layer.
    """
    began = time.perf_counter()
    options = options or ConeOptions()
    moments = pool_moments(cones)
    objective = ConeObjective(moments, options, public, public_weight)
    classes, features = moments.num_classes, moments.means.shape[1]
    split, scale = classes * features, moments.feature_scale

    def value_and_gradient(flat: Float) -> tuple[float, Float]:
        w = objective.tensor(flat)
        weight = w[:split].reshape(classes, features)
        value, *parts = objective.value_and_gradient(weight, w[split:])
        return value, torch.cat([part.reshape(-1) for part in parts]).cpu().numpy()

    first = np.zeros(split + classes)
    if start is not None:
        given = np.asarray(start)[:split].reshape(classes, features)
        first[:split] = (given * scale).reshape(-1)
        first[split:] = np.asarray(start)[split:] + given @ moments.center
    found = minimize(
        value_and_gradient,
        first,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": options.iterations, "maxcor": 20, "ftol": 1e-10, "gtol": 1e-7},
    )
    weight = found.x[:split].reshape(classes, features) / scale
    point = flatten_linear(weight, found.x[split:] - weight @ moments.center)
    method = "cones: expected pairwise logistic loss"
    return verdict_of(cones, point, method, began)


class ConeObjective:
    """The smooth objective as a function of scaled weights (C, D) and bias (C,).

    Inputs are centred first: years beside fractions would leave the bias to itself.
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
        self.scale, self.labels = map(self.tensor, (moments.feature_scale, moments.labels))
        self.center = self.tensor(moments.center)
        self.shares = self.tensor(shares)
        self.moments = moments
        nodes, weights = np.polynomial.hermite_e.hermegauss(POINTS)
        self.nodes, self.node_weights = map(self.tensor, (nodes, weights / weights.sum()))
        if public is not None:
            inputs = public.inputs.to(self.device).to(torch.float64)
            self.public_inputs = (inputs - self.center) / self.scale
            self.public_labels = public.labels.to(self.device, torch.long)

    def tensor(self, array: NDArray) -> Tensor:
        """Return an array as a tensor on the device."""
        return torch.from_numpy(array).to(self.device)

    def value_and_gradient(self, weight: Tensor, bias: Tensor) -> tuple[float, Tensor, Tensor]:
        """Return the objective at scaled weights, and its gradient by weights and by bias."""
        value = float(self.ridge * (weight * weight).sum())
        gradient = 2 * self.ridge * weight, torch.zeros_like(bias)
        if self.public is not None:
            leaves = [t.detach().requires_grad_() for t in (weight, bias)]
            logits = self.public_inputs @ leaves[0].T + leaves[1]
            loss = self.public_weight * cross_entropy(logits, self.public_labels)
            for total, part in zip(gradient, torch.autograd.grad(loss, leaves), strict=True):
                total += part
            value += float(loss.detach())
        for rows, means, images in component_images(self.moments, weight / self.scale):
            means, images = (means - self.center) / self.scale, images / self.scale
            value += self._add(rows, means, images, weight, bias, gradient)
        return value, *gradient

    def _add(
        self,
        components: slice,
        means: Tensor,
        images: Tensor,
        weight: Tensor,
        bias: Tensor,
        gradient: tuple[Tensor, Tensor],
    ) -> float:
        """Return the loss of some components, and add to the gradient; images are W Sigma_e."""
        scores = (means @ weight.T + bias).requires_grad_()
        inner = (images @ weight.T).requires_grad_()
        loss = self.shares[components] @ self.component_losses(components, scores, inner)
        by_scores, by_inner = torch.autograd.grad(loss, [scores, inner])
        gradient[0].addmm_(by_scores.T, means)
        gradient[0].add_(torch.tensordot(by_inner + by_inner.mT, images, dims=([0, 2], [0, 1])))
        gradient[1].add_(by_scores.sum(dim=0))
        return float(loss.detach())

    def component_losses(self, components: slice, scores: Tensor, inner: Tensor) -> Tensor:
        """Return the loss of some components, not yet weighted.

        `scores` (n, C) are those of their means, `inner` (n, C, C) is ``W Sigma_e W^T`` for each.
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


def balanced_shares(labels: NDArray[np.int64], shares: Float) -> Float:
    """Return shares in which all classes that occur weigh the same."""
    totals = np.bincount(labels, weights=shares)
    return np.asarray(shares / totals[labels] / np.count_nonzero(totals))
