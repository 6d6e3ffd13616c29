"""Refinement: sums of the softmax loss over nodes, and steps by them to the pooled optimum.

With scaled inputs ``x``, to which a one is appended for the bias, a layer ``V`` (C, D + 1) and
``p = softmax(V x)``, nodes sum up the loss, its gradient ``(p - e_y) x^T`` and, per class, the
curvature ``(diag p - p p^T + r r^T) / 2`` with ``r = p - e_y``, (C, C). Half of it are products of
residuals, for ``diag p - p p^T`` vanishes where the layer is sure and wrong.

**Bounds of sums over nodes** follow from the sums of squares of centred inputs, which are known
from the moments (`gems_flwr.spaces.cone.totals.Standard`): a residual is at most 1, so by Cauchy
and Schwarz ``sum |r_c z_f|`` is at most the root of the samples times that of ``sum z_f^2``. The
loss of a sample is at most ``log C`` and the largest difference of two of its scores.

**Steps** are those of a quasi-Newton method whose first matrix is the curvature by moments,
corrected by the pairs of steps and differences of gradients of earlier rounds (Nocedal's two-loop
recursion; the idea of Jordan, Lee and Yang 2018). Nodes report their losses at points
``(1 + u) V + t d``, and the best is taken only if it is better than where we are: the loss cannot
rise. With ``G_c``, the nodes' estimate for class c, and ``A_c``, the second moment of its inputs,
the curvature ``H V = sum_c share_c G_c V A_c + 2 ridge V`` is positive definite by construction.

**The bound.** The mean loss L is convex and at least 0, so every gradient ``a_t`` gives a plane
below it, and so does any mean of planes, with weights theta. With the ridge, also on the bias, its
minimum is known, so for the layer W that was reached::

    f(W) - min f <= sum_t theta_t (L(W) - L_t - <a_t, W - V_t>)
                    + |2 ridge W + sum_t theta_t a_t|^2 / (4 ridge)

A quadratic program on the simplex finds the weights. The bound holds for the worst rounding of the
gradients, by at most ``errors[c]`` in an entry of row c.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from gems_flwr.devices import exact_device
from gems_flwr.samples import Samples
from gems_flwr.secure.fixed_point import Section
from gems_flwr.spaces.ball.intersect import maximise_on_simplex
from gems_flwr.spaces.cone.covariance import upper_half
from gems_flwr.spaces.cone.solve import PooledMoments, component_images, component_means
from gems_flwr.spaces.cone.totals import SLACK, Standard, chunks
from gems_flwr.typing import Float

Product = Callable[[Float], Float]

GRADIENT_BITS, CURVATURE_BITS, SMALL_BITS = 16, 16, 48
REFINE_RIDGE = 1e-4
REFINE_DAMPING = 1e-6
# After a round in which no step was any good.
MORE_DAMPING = 100.0
LENGTHS = (4.0, 2.0, 1.5, 1.0, 0.75, 0.5, 0.25)
MULTIPLES = (0.0, -0.2, -0.1, 0.1, 0.2)
# Where the curvature is far off.
SHORT = (1 / 8, 1 / 16, 1 / 64)
# A smaller share of the loss is rounding, also that of storing the layer in single precision.
LEAST_GAIN = 1e-6
# Of deviations of the rounding in a gradient: a pair that bends less may be nothing else.
_NOISE = 4.0
# Sums in double precision, of the nodes' losses and here.
_ROUNDING = 1e-9


# --- sums of a node -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over a node's samples."""

    count: int  # samples
    weight: float  # the sum of their classes' weights
    loss: float  # weighted sum
    gradient: Float  # by scaled weights and, last, bias (C, D + 1)
    curvature: Float  # weighted sum for each true class, or for all: (C, C, C) or (1, C, C)


def loss_sums(
    samples: Samples,
    layer: Float,
    scale: Float,
    class_weights: Float,
    *,
    by_class: bool = True,
    device: str | torch.device = "cpu",
) -> LossSums:
    """Return loss, gradient and curvature of a layer (C, D + 1) on some samples.

    Inputs are divided by `scale` (D,); a sample of each class counts by `class_weights` (C,). With
    `by_class` each class has a curvature of its own.
    """
    classes, where = len(layer), exact_device(device)
    weights, each = torch.from_numpy(layer).to(where), torch.from_numpy(class_weights).to(where)
    zeros = partial(torch.zeros, dtype=torch.float64, device=where)
    loss, gradient = zeros(()), torch.zeros_like(weights)
    curvature = zeros(classes if by_class else 1, classes, classes)
    for inputs, labels in _with_ones(samples, scale, where):
        logs = torch.log_softmax(inputs @ weights.T, dim=1)
        counted = each[labels]
        loss -= counted @ logs.gather(1, labels[:, None])[:, 0]
        chances = logs.exp()
        residuals = chances.clone()
        residuals[torch.arange(len(labels), device=where), labels] -= 1
        for label in sorted(set(labels.tolist())):
            own, off = chances[labels == label], residuals[labels == label]
            matrix = torch.diag(own.sum(dim=0)) - own.T @ own + off.T @ off
            curvature[label if by_class else 0] += each[label] / 2 * matrix
        residuals *= counted[:, None]
        gradient += residuals.T @ inputs
    labels = samples.labels.long().cpu()
    return LossSums(
        count=len(samples),
        weight=float(torch.from_numpy(class_weights)[labels].sum()),
        loss=float(loss),
        gradient=gradient.cpu().numpy(),
        curvature=curvature.cpu().numpy(),
    )


def gradient_parts(
    samples: Samples, layer: Float, scale: Float, class_weights: Float, device: str = "cpu"
) -> Float:
    """Return how much each sample adds to gradient, loss and curvature, weighted (n, C + 2).

    Lengths of ``r_c x``, the loss, and the length of ``r``; see `loss_sums`.
    """
    where, parts = exact_device(device), []
    weights, each = torch.from_numpy(layer).to(where), torch.from_numpy(class_weights).to(where)
    for inputs, labels in _with_ones(samples, scale, where):
        logs = torch.log_softmax(inputs @ weights.T, dim=1)
        own = logs.gather(1, labels[:, None])
        residuals = logs.exp().scatter_add(1, labels[:, None], -torch.ones_like(own)).abs()
        lengths = residuals * inputs.norm(dim=1, keepdim=True)
        found = torch.cat([lengths, -own, residuals.norm(dim=1, keepdim=True)], dim=1)
        parts.append(each[labels][:, None] * found)
    return np.asarray(torch.cat(parts).cpu().numpy())


def losses_along(
    samples: Samples,
    layer: Float,
    directions: Float,
    coefficients: Float,
    scale: Float,
    class_weights: Float,
    device: str | torch.device = "cpu",
) -> NDArray[np.float64]:
    """Return the weighted losses of samples at several points, shape (n, M).

    The points are the layer plus `directions` (K, C, D + 1), each `coefficients` (M, K) far. Scores
    are computed once for each direction, so points are cheap.
    """
    classes, _ = layer.shape
    where = exact_device(device)
    stacked = torch.from_numpy(np.concatenate([layer[None], directions])).to(where)
    flat = stacked.reshape(-1, stacked.shape[2])
    points, weights = (torch.from_numpy(a).to(where) for a in (coefficients, class_weights))
    losses = [torch.zeros(0, len(points), dtype=torch.float64, device=where)]
    for inputs, labels in _with_ones(samples, scale, where):
        scores = (inputs @ flat.T).reshape(len(labels), -1, classes)
        found = torch.empty(len(labels), len(points), dtype=torch.float64, device=where)
        for number, point in enumerate(points):
            logits = scores[:, 0] + torch.einsum("k,nkc->nc", point, scores[:, 1:])
            own = logits.gather(1, labels[:, None])[:, 0]
            found[:, number] = weights[labels] * (torch.logsumexp(logits, dim=1) - own)
        losses.append(found)
    return np.asarray(torch.cat(losses).cpu().numpy())


def _with_ones(
    samples: Samples, scale: Float, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    for inputs, labels in chunks(samples, device, np.asarray(scale, dtype=np.float64)):
        yield torch.nn.functional.pad(inputs, (0, 1), value=1.0), labels


# --- sums over nodes ------------------------------------------------------------------------------


def rescaled(standard: Standard, scale: Float) -> Standard:
    """Return how long inputs are with another scale."""
    squares = standard.squares * (standard.scale / scale) ** 2
    return dataclasses.replace(standard, scale=scale, squares=squares)


def largest_loss(layer: Float, standard: Standard) -> float:
    """Return what the mean loss over all samples cannot exceed.

    The layer (C, D + 1) is for inputs that are scaled as in `standard`, and not centred.
    """
    weight = layer[:, :-1]
    bias = layer[:, -1] + weight @ (standard.center / standard.scale)
    longest = float(np.linalg.norm(weight - weight.mean(axis=0), axis=1).max())
    length = math.sqrt(standard.trace / standard.count)
    return (math.log(len(layer)) + float(np.ptp(bias)) + 2 * longest * length) * SLACK


def gradient_sections(
    layer: Float, standard: Standard, weights: Float, *, by_class: bool
) -> list[Section]:
    """Return the sections of loss, gradient and curvature; see `loss_sums` for the weights (C,)."""
    classes, features = len(layer), layer.shape[1] - 1
    most = max(float(weights.max()), 1e-30) * standard.count * SLACK
    steepest = most * math.sqrt(float(standard.squares.max()) / standard.count) * SLACK
    half = classes * (classes + 1) // 2
    return [
        *_loss_sections("loss", 1, most * largest_loss(layer, standard), classes, most),
        Section("gradient", (classes, features), max(steepest, 1e-30), GRADIENT_BITS, True),
        Section("bias", (classes,), most, SMALL_BITS, True),
        Section("curvature", (classes if by_class else 1, half), most, CURVATURE_BITS, True),
    ]


def losses_sections(layers: list[Float], standard: Standard, weights: Float) -> list[Section]:
    """Return the sections of the losses at some layers; see `gradient_sections`."""
    most = max(float(weights.max()), 1e-30) * standard.count * SLACK
    worst = max(largest_loss(layer, standard) for layer in layers)
    return _loss_sections("losses", len(layers), most * worst, len(weights), most)


def _loss_sections(
    name: str, points: int, bound: float, classes: int, most: float
) -> list[Section]:
    return [
        Section(name, (points,), bound, SMALL_BITS, True),
        Section("weights", (classes,), most, SMALL_BITS, True),
    ]


def gradient_summand(sums: LossSums, by_class: Float, center: Float) -> dict[str, Float]:
    """Return a node's summand, with scaled inputs centred at `center` (D,).

    The weights of each class's samples are `by_class` (C,).
    """
    bias = sums.gradient[:, -1]
    return {
        "loss": np.array([sums.loss]),
        "weights": by_class,
        "gradient": sums.gradient[:, :-1] - np.outer(bias, center),
        "bias": bias,
        "curvature": upper_half(sums.curvature),
    }


def gradient_of(gradient: Float, bias: Float, center: Float) -> Float:
    """Return the gradient by weights of inputs that are not centred, and by the bias."""
    return np.column_stack([gradient + np.outer(bias, center), bias])


# --- steps ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """The loss at one layer, as the nodes reported it."""

    layer: Float  # (C, D + 1)
    loss: float  # mean loss of the samples, without the ridge
    gradient: Float  # of that (C, D + 1)
    errors: Float  # how far any entry of a row of the gradient may be off (C,)
    # Whose samples these are. Other nodes' are another loss: neither pairs nor bounds mix them.
    nodes: tuple[str, ...] = ()

    def full_loss(self, ridge: float) -> float:
        """Return the loss with the ridge."""
        return self.loss + ridge * squared_length(self.layer)

    def full_gradient(self, ridge: float) -> Float:
        """Return the gradient with that of the ridge."""
        return np.asarray(self.gradient + 2 * ridge * self.layer)

    @property
    def error_length(self) -> float:
        """By how much the whole gradient may be off, in length."""
        return float(np.sqrt(self.layer.shape[1] * (self.errors**2).sum()))


@dataclasses.dataclass(frozen=True, eq=False)
class Proposal:
    """A step to be tried."""

    direction: Float  # the step of length 1 (C, D + 1)
    gain: float  # by how much the loss is expected to fall


def candidates() -> Float:
    """Return which points are tried: (points, 2), changes of the multiple and lengths.

    The first is where we are. All are compared by the same reply.
    """
    short = ((0.0, length) for length in SHORT)
    return np.array([(0.0, 0.0), *itertools.product(MULTIPLES, LENGTHS), *short])


def points_at(layer: Float, direction: Float, tried: Float) -> list[Float]:
    """Return the layers of some candidates."""
    return [(1 + multiple) * layer + length * direction for multiple, length in tried]


def propose(
    history: Sequence[Evaluation], curvature: Product, ridge: float, damping: float
) -> Proposal:
    """Return the step from where the last evaluation was.

    `curvature` is the product with a positive definite estimate of the Hessian, ridge included.
    """
    now = history[-1]
    pairs = secant_pairs(history, ridge)
    strength = 1.0
    if pairs:
        step, change = pairs[-1]
        # Where the moments think the loss flatter than the last step has shown.
        strength = max(1.0, dot(step, change) / dot(step, curvature(step)))
    rest, weights = now.full_gradient(ridge), []
    target = rest
    for step, change in reversed(pairs):
        weights.append(dot(step, rest) / dot(step, change))
        rest = rest - weights[-1] * change
    found = conjugate_gradients(lambda v: strength * curvature(v), rest, damping)
    for (step, change), weight in zip(pairs, reversed(weights), strict=True):
        found = found + (weight - dot(change, found) / dot(step, change)) * step
    return Proposal(-found, dot(target, found) / 2)


def secant_pairs(history: Sequence[Evaluation], ridge: float) -> list[tuple[Float, Float]]:
    """Return steps and the differences of gradients that they made, where these say anything."""
    pairs = []
    for before, after in itertools.pairwise(history):
        step = after.layer - before.layer
        change = after.full_gradient(ridge) - before.full_gradient(ridge)
        # Rounding is even over an entry's error, so its deviation is a root of 3 below that.
        rounding = np.hypot(before.errors, after.errors) / np.sqrt(3)
        noise = float(np.sqrt((rounding**2 * (step**2).sum(axis=1)).sum()))
        if before.nodes == after.nodes and dot(step, change) > _NOISE * noise:
            pairs.append((step, change))
    return pairs


def choose(losses: Sequence[float]) -> int:
    """Return which candidate to take: that of the lowest loss, or 0, where we are."""
    best = int(np.argmin(losses))
    return best if losses[0] - losses[best] > LEAST_GAIN * abs(losses[0]) else 0


def damping_after(damping: float, taken: int) -> float:
    """Return the damping of the next round."""
    if taken:
        return max(REFINE_DAMPING, damping / MORE_DAMPING)
    return max(1e-4, damping * MORE_DAMPING)


def dot(a: Float, b: Float) -> float:
    """Return the inner product of two layers."""
    return float((a * b).sum())


def squared_length(a: Float) -> float:
    """Return the sum of squares."""
    return dot(a, a)


# --- the curvature by moments ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LossCurvature:
    """Products with the curvature of the loss at one layer."""

    moments: PooledMoments
    scale: Float  # what inputs are divided by (D,)
    shares: Float  # of each component within its class, or with one matrix for all in all
    softmax: Float  # of each class, or of all, per sample: (C, C, C) or (1, C, C)
    ridge: float

    @classmethod
    def of(
        cls, moments: PooledMoments, scale: Float, softmax: Float, ridge: float, weights: Float
    ) -> LossCurvature:
        """Return the curvature where a sample of each class counts by its weight.

        A class of which nodes have samples but sent no moments is taken to lie where all others do.
        """
        if len(softmax) == 1:
            shares = moments.shares * weights[moments.labels]
            return cls(moments, scale, shares / shares.sum(), softmax, ridge)
        present = np.bincount(moments.labels, moments.shares, minlength=moments.num_classes)
        unknown = softmax[present == 0].sum(axis=0)
        mixed = softmax + present[:, None, None] * unknown
        return cls(moments, scale, shares_within(moments), mixed, ridge)

    def __call__(self, layer: Float) -> Float:
        """Return the product with a direction of shape (C, D + 1)."""
        result, weight = np.zeros_like(layer), torch.from_numpy(layer[:, :-1] / self.scale)
        for rows, *tensors in component_images(self.moments, weight):
            means, images = (tensor.numpy() for tensor in tensors)
            labels = self.moments.labels[rows] if len(self.softmax) > 1 else 0
            mixed = self.softmax[labels] * self.shares[rows, None, None]
            scores = means @ weight.numpy().T + layer[:, -1]
            by_scores = np.einsum("nij,nj->ni", mixed, scores)
            result[:, :-1] += np.tensordot(mixed, images, ([0, 2], [0, 1])) + by_scores.T @ means
            result[:, -1] += by_scores.sum(axis=0)
        result[:, :-1] /= self.scale
        return result + 2 * self.ridge * layer


def shares_within(moments: PooledMoments) -> Float:
    """Return each component's share of its class."""
    totals = np.bincount(moments.labels, weights=moments.shares, minlength=moments.num_classes)
    return np.asarray(moments.shares / totals[moments.labels])


def mean_directions(moments: PooledMoments, scale: Float, most: int = 10) -> Float:
    """Return orthonormal directions (at most `most`, D + 1) in which the scaled class means lie.

    Nodes that hold few classes have gradients that are large along the means of these and cancel
    only in the sum: that part is sent more exactly than the rest.
    """
    means = np.zeros((moments.num_classes, len(scale) + 1))
    shares = shares_within(moments)
    for rows, own in component_means(moments):
        np.add.at(means[:, :-1], moments.labels[rows], shares[rows, None] * own)
    means[:, :-1] /= scale
    means[np.unique(moments.labels), -1] = 1
    _, sizes, directions = np.linalg.svd(means, full_matrices=False)
    return np.asarray(directions[:most][sizes[:most] > 1e-9 * sizes[0]])


def conjugate_gradients(product: Product, target: Float, damping: float, steps: int = 60) -> Float:
    """Return x with ``(H + damping) x = target`` by conjugate gradients, at most so many steps.

    The product with H is positive semi-definite. Stopped early, the result is still a direction of
    descent.
    """

    def damped(flat: Float) -> Float:
        return (product(flat.reshape(target.shape)) + damping * flat.reshape(target.shape)).ravel()

    shape = (target.size, target.size)
    operator = LinearOperator(shape, matvec=damped, dtype=np.float64)
    return np.asarray(cg(operator, target.ravel(), rtol=1e-4, maxiter=steps)[0]).reshape(
        target.shape
    )


# --- how far from the optimum ---------------------------------------------------------------------


def loss_bound(
    layer: Float, loss: float, history: Sequence[Evaluation], ridge: float, slack: float = 0.0
) -> float:
    """Return an upper bound on how much lower the loss, ridge included, is at the optimum.

    `loss` is the mean loss at the layer that was reached, without the ridge, at most `slack` too
    small; `history` has gradients of the same loss, of the same nodes.
    """
    worst = [float(seen.errors @ np.abs(layer - seen.layer).sum(axis=1)) for seen in history]
    rise = [
        loss - seen.loss - dot(seen.gradient, layer - seen.layer) + off
        for seen, off in zip(history, worst, strict=True)
    ]
    linear = np.array([loss, *rise])
    planes = np.array([np.zeros(layer.size), *(seen.gradient.reshape(-1) for seen in history)])
    lengths = np.array([0.0, *(seen.error_length for seen in history)])
    own = 2 * ridge * layer.reshape(-1)

    def value(weights: Float) -> float:
        length = float(np.linalg.norm(own + weights @ planes) + weights @ lengths)
        return float(weights @ linear) + length**2 / (4 * ridge)

    gram = planes @ planes.T / (4 * ridge)
    best = maximise_on_simplex(-linear - planes @ own / (2 * ridge), gram)
    # Any weights give a bound; these ones do not know of the rounding.
    corners = np.eye(len(linear))
    found = min(value(weights) for weights in (best, *corners))
    return float((found + slack) * (1 + _ROUNDING) + _ROUNDING * loss)
