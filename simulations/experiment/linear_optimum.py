"""The best pooled model, where there is one: a linear output layer on fixed features.

That is logistic regression, and every network whose only weights are those of its output layer,
such as one on a seeded lift. A linear layer on fixed features has one best setting for a given
ridge, so a reference need not depend on epochs, rates and patience. Solved is ::

    f(W, b) = mean over rows of −log softmax(W x + b)[label] + ridge / 2 · |W|²

with L-BFGS, in coordinates in which each class's curvature at the start, that is
``Xᵀ diag(p (1 − p)) X / n + ridge``, is the identity: some dozen steps then do what takes many
hundreds on raw features. What all classes have in common changes no probability; it is kept at
zero, or it would wander where the coordinates of the classes differ. The bias is not penalised, so
this is scikit-learn's `LogisticRegression` with ``C = 1 / (n · ridge)``.

The ridge is chosen by cross-validation within the pooled training data, by the accuracy on rows
that are held out in turn; where accuracies are equal, by the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn

from gems_flwr.errors import ModelError, OptionError
from gems_flwr.networks import LayerReader
from gems_flwr.spaces import flatten_linear
from gems_flwr.typing import Arrays

FOLDS = 5
# From strong to weak: solutions change little from one to the next, and each starts the other.
RIDGES = tuple(float(f"{10**exponent:.0e}") for exponent in np.arange(-1.0, -6.5, -0.5))
TOLERANCE = 1e-6
# Enough to compare ridges by.
_ROUGH = 1e-4
# Rows at once.
_CHUNK = 8192
# Rows that the curvature is estimated from; it decides the number of steps, not where they lead.
_CURVATURE_ROWS = 3000
_MEMORY = 30
_MOST_STEPS = 3000
# Neighbours on the grid, either way, that later folds try.
_AROUND = 2


def linear_optimum(
    model: nn.Module, data: tuple[Tensor, Tensor], seed: int, device: str = "cpu"
) -> tuple[Arrays, Mapping[str, Any]] | None:
    """Return the best arrays of a model and how they were found; None if it has more to learn.

    Parameters
    ----------
    model : torch.nn.Module
        Maps a batch to logits.
    data : pair of tensors
        All inputs as the model sees them, and all labels.
    seed : int
        Decides what is held out when; at least 0.
    device : str
        Where the model computes what its output layer sees; the layer is solved for on the CPU.
    """
    arrays = {name: each.detach().cpu().numpy() for name, each in model.state_dict().items()}
    reader = LayerReader(arrays, model, device=device)
    try:
        layer = reader.output_layer(data)
    except ModelError:
        return None
    if layer.bias is None or layer.outputs < 2 or arrays.keys() != set(layer.keys):
        return None
    seen = reader.read(data, layer)
    rows: Any = {"features": seen.inputs, "labels": seen.labels, "classes": layer.outputs}
    choice = choose_ridge(**rows, folds=stratified_folds(seen.labels, FOLDS, seed))
    best = solve(**rows, ridge=choice.ridge, start=choice.start)
    details = {
        "converged": best.gradient_norm <= TOLERANCE,
        "ridge": best.ridge,
        "gradient_norm": best.gradient_norm,
        "gradient_tolerance": TOLERANCE,
        "objective": best.loss,
        "steps": best.steps,
        "validation_accuracy": choice.accuracy,
        "validation_loss": choice.loss,
    }
    point = flatten_linear(best.layer[:, :-1].numpy(), best.layer[:, -1].numpy())
    return layer.replace_in(arrays, point), details


@dataclass(frozen=True)
class Solution:
    """A layer, and how near it is to the best one."""

    # Weights, and in the last column the bias; double precision.
    layer: Tensor
    ridge: float
    # The objective with its ridge, and the Euclidean norm of its gradient.
    loss: float
    gradient_norm: float
    steps: int


def solve(
    features: Tensor,
    labels: Tensor,
    *,
    classes: int,
    ridge: float,
    start: Tensor | None = None,
    tolerance: float = TOLERANCE,
    precision: torch.dtype = torch.float64,
) -> Solution:
    """Return the best layer for a ridge.

    Parameters
    ----------
    features : tensor of shape (rows, features)
        At least one row, of any floating type; converted some rows at a time.
    labels : tensor of int
        Classes, from 0.
    classes : int
        How many there are, at least 2.
    ridge : float
        Above 0, relative to the mean loss.
    start : tensor, optional
        A layer to begin with; zeros by default.
    tolerance : float
        Norm of the gradient at which to stop, above 0. If rounding ends the search before, the
        solution's `gradient_norm` is larger.
    precision : torch.dtype
        What sums over rows are made in; single precision does for tolerances above 1e-5.
    """
    if not len(labels):
        raise OptionError("softmax regression needs at least one row, got none")
    if not ridge > 0 or not tolerance > 0:
        raise OptionError(f"ridge and tolerance must be above 0, got {ridge} and {tolerance}")
    layer = torch.zeros((classes, features.shape[1] + 1), dtype=torch.float64)
    if start is not None:
        layer = start - start.mean(0)
    roots = _curvature_roots(features, layer, ridge)
    norms: dict[bytes, float] = {}

    def objective(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        loss, gradient = _loss_and_gradient(
            features, labels, _from_point(point, roots), ridge, precision
        )
        norms.clear()
        norms[point.tobytes()] = float(gradient.norm())
        # By the point, from that by the layer.
        inner = (gradient - gradient.mean(0))[..., None]
        scaled: Tensor = torch.linalg.solve_triangular(roots, inner, upper=False)
        return loss, scaled.numpy().ravel()

    def stop_when_near(point: NDArray[np.float64]) -> None:
        if norms.get(point.tobytes(), np.inf) <= tolerance:
            raise StopIteration

    found = minimize(
        objective,
        torch.einsum("cij,ci->cj", roots, layer).numpy().ravel(),
        jac=True,
        method="L-BFGS-B",
        callback=stop_when_near,
        options={"maxcor": _MEMORY, "maxiter": _MOST_STEPS, "maxfun": 2 * _MOST_STEPS}
        | {"ftol": 0.0, "gtol": 0.0},
    )
    best = _from_point(found.x, roots)
    loss, gradient = _loss_and_gradient(features, labels, best, ridge, precision)
    return Solution(best, ridge, loss, float(gradient.norm()), int(found.nit))


class RidgeChoice(NamedTuple):
    """A ridge, and its accuracy and loss on held-out rows; a layer that it gave, to go on from."""

    ridge: float
    accuracy: float
    loss: float
    start: Tensor

    @property
    def rank(self) -> tuple[float, float]:
        """What the best one has most of."""
        return self.accuracy, -self.loss


def choose_ridge(
    features: Tensor,
    labels: Tensor,
    *,
    classes: int,
    folds: Sequence[Tensor],
    ridges: Sequence[float] = RIDGES,
) -> RidgeChoice:
    """Return the ridge that is most often right on held-out rows, of equals the least loss.

    The first fold tries the whole grid, the others what lies around its best.

    Parameters
    ----------
    features, labels, classes
        As in `solve`.
    folds : sequence of tensors of int
        Positions of the rows that are held out in turn, at least one each.
    ridges : sequence of float
        What to try, from strong to weak.
    """

    def path(held_out: Tensor, ridges: Sequence[float]) -> dict[float, RidgeChoice]:
        """Return what each ridge gives where some rows are held out."""
        stays = torch.ones(len(labels), dtype=torch.bool)
        stays[held_out] = False
        rows = (features[stays], labels[stays])
        rough: Any = {"classes": classes, "tolerance": _ROUGH, "precision": torch.float32}
        tried: dict[float, RidgeChoice] = {}
        start = None
        for ridge in ridges:
            start = solve(*rows, ridge=ridge, start=start, **rough).layer
            loss, accuracy = score(features[held_out], labels[held_out], start)
            tried[ridge] = RidgeChoice(ridge, accuracy, loss, start)
        return tried

    first = path(folds[0], ridges)
    at = ridges.index(max(first.values(), key=lambda tried: tried.rank).ridge)
    near = ridges[max(0, at - _AROUND) : at + _AROUND + 1]
    paths = [first, *(path(fold, near) for fold in folds[1:])]
    means = [
        RidgeChoice(
            ridge,
            float(np.mean([each[ridge].accuracy for each in paths])),
            float(np.mean([each[ridge].loss for each in paths])),
            first[ridge].start,
        )
        for ridge in near
    ]
    return max(means, key=lambda tried: tried.rank)


def stratified_folds(labels: Tensor, count: int, seed: int) -> list[Tensor]:
    """Return positions in `count` parts, over which every class is dealt out in random order."""
    rng = np.random.default_rng(seed)
    classes = labels.numpy()
    order = rng.permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    return [torch.from_numpy(np.sort(order[part::count])) for part in range(count)]


def score(features: Tensor, labels: Tensor, layer: Tensor) -> tuple[float, float]:
    """Return a layer's mean cross entropy and accuracy on some rows."""
    logits = features @ layer[:, :-1].T.to(features.dtype) + layer[:, -1].to(features.dtype)
    loss = torch.nn.functional.cross_entropy(logits.double(), labels)
    return float(loss), float((logits.argmax(1) == labels).double().mean())


def _loss_and_gradient(
    features: Tensor, labels: Tensor, layer: Tensor, ridge: float, precision: torch.dtype
) -> tuple[float, Tensor]:
    """Return the objective and its gradient."""
    total, gradient = 0.0, torch.zeros_like(layer)
    weight, bias = layer[:, :-1], layer[:, -1]
    slope, offset = weight.T.to(precision), bias.to(precision)
    for rows, y in zip(torch.split(features, _CHUNK), torch.split(labels, _CHUNK), strict=True):
        x = rows.to(precision)
        log_probabilities = torch.log_softmax(torch.addmm(offset, x, slope), dim=1)
        total -= float(log_probabilities.gather(1, y[:, None]).sum(dtype=torch.float64))
        residual = log_probabilities.exp_()
        residual[torch.arange(len(y)), y] -= 1.0
        gradient[:, :-1] += residual.T @ x
        gradient[:, -1] += residual.sum(0)
    gradient /= len(labels)
    gradient[:, :-1] += ridge * weight
    return total / len(labels) + ridge / 2 * float((weight**2).sum()), gradient


def _curvature_roots(features: Tensor, layer: Tensor, ridge: float) -> Tensor:
    """Return a Cholesky factor for each class of the curvature at a layer, bias included."""
    rows = features[:: max(1, len(features) // _CURVATURE_ROWS)]
    x = torch.nn.functional.pad(rows, (0, 1), value=1.0)
    p = torch.softmax(x @ layer.T.to(x.dtype), dim=1)
    floor = torch.eye(x.shape[1], dtype=torch.float64) * ridge
    roots = []
    for weights in (p * (1 - p)).T:
        curvature = ((x * weights[:, None]).T @ x).double() / len(x)
        # Rounding in single precision must not make it indefinite.
        curvature.diagonal().mul_(1 + 1e-6).add_(1e-9)
        roots.append(torch.linalg.cholesky(curvature + floor))
    return torch.stack(roots)


def _from_point(point: NDArray[np.float64], roots: Tensor) -> Tensor:
    """Return the layer that stands for a point: for each class R⁻ᵀ z, without their common part."""
    z = torch.from_numpy(point).reshape(roots.shape[:2])
    layer: Tensor = torch.linalg.solve_triangular(roots.mT, z[..., None], upper=True)[..., 0]
    return layer - layer.mean(0)
