"""The softmax loss of a linear layer on a node's samples: its sum, gradient and curvature.

What `Gems(refine=…)` asks of nodes after the first round. With scaled inputs ``x``, to which a one
is appended for the bias, a layer ``V`` of shape (C, D + 1) and ``p = softmax(V x)``::

    loss       sum_i a_y(i) * -log p_y(i)
    gradient   sum_i a_y(i) * r_i x_i^T,  r = p - e_y                   (C, D + 1)
    curvature  sum of a_y (diag p - p p^T + r r^T) / 2 over the samples
               of a class                                              (C, C) per class

where ``a`` weighs classes. All of them are plain sums, so they do not depend on how samples are
spread over nodes. The curvature of a sample is ``diag p - p p^T``, the mean of ``r r^T`` over
labels that the layer itself predicts. Where the layer is sure and wrong the first is next to
nothing, and a step by it would be endless; the second is not.

Decided here: double precision, some samples at a time. The rounding of the sums is then far below
that of the message (see `gems_flwr.wire.gradient_replies`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.devices import exact_device
from gems_flwr.samples import Samples
from gems_flwr.typing import Float

_CHUNK = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over a node's samples.

    Parameters
    ----------
    count : int
        How many samples.
    weight : float
        The sum of their classes' weights.
    loss : float
        Weighted sum of the losses.
    gradient : array of shape (C, D + 1)
        By scaled weights and, last, bias.
    curvature : array of shape (C, C, C), or (1, C, C)
        The weighted sum of ``(diag p - p p^T + r r^T) / 2`` for each true class, or for all.
    fewest : float
        How many samples stand behind the row of the gradient that the fewest do: the square of
        the sum of a row's residuals over the sum of their squares.
    """

    count: int
    weight: float
    loss: float
    gradient: Float
    curvature: Float
    fewest: float = np.inf


def loss_sums(
    samples: Samples,
    layer: Float,
    scale: Float,
    class_weights: Float,
    *,
    by_class: bool = True,
    device: str | torch.device = "cpu",
) -> LossSums:
    """Return loss, gradient and curvature of a layer on some samples.

    Parameters
    ----------
    samples : Samples
        Inputs of the layer and their classes.
    layer : array of shape (C, D + 1)
        Weights of scaled inputs, and the bias in the last column.
    scale : array of shape (D,)
        What inputs are divided by.
    class_weights : array of shape (C,)
        How much a sample of each class counts.
    by_class : bool
        Whether each class has a curvature of its own.
    device : str or torch.device
        Where to compute; samples go there some at a time, the sums come back.
    """
    classes, width = layer.shape
    where = exact_device(device)
    weights, each = torch.from_numpy(layer).to(where), torch.from_numpy(class_weights).to(where)
    zeros = partial(torch.zeros, dtype=torch.float64, device=where)
    loss, gradient = zeros(()), zeros(classes, width)
    curvature = zeros(classes if by_class else 1, classes, classes)
    first, second = zeros(classes), zeros(classes)
    for inputs, labels in _chunks(samples, scale, where):
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
        first += residuals.abs().sum(dim=0)
        second += residuals.square().sum(dim=0)
    told = second > 0
    fewest = (first[told].square() / second[told]).min().item() if told.any() else np.inf
    labels = samples.labels.long().cpu()
    return LossSums(
        count=len(samples),
        weight=float(torch.from_numpy(class_weights)[labels].sum()),
        loss=float(loss),
        gradient=gradient.cpu().numpy(),
        curvature=curvature.cpu().numpy(),
        fewest=float(fewest),
    )


def losses_along(
    samples: Samples,
    layer: Float,
    directions: Float,
    coefficients: Float,
    scale: Float,
    class_weights: Float,
    device: str | torch.device = "cpu",
) -> NDArray[np.float64]:
    """Return the weighted sums of the losses at several points.

    Parameters
    ----------
    samples, layer, scale, class_weights, device
        As in `loss_sums`.
    directions : array of shape (K, C, D + 1)
        Where to go from the layer.
    coefficients : array of shape (M, K)
        How far along each, for every point.

    Returns
    -------
    array of shape (M,)
        Many points cost little: scores are computed once for each direction.
    """
    classes, _ = layer.shape
    where = exact_device(device)
    stacked = torch.from_numpy(np.concatenate([layer[None], directions])).to(where)
    flat = stacked.reshape(-1, stacked.shape[2])
    points, weights = (torch.from_numpy(a).to(where) for a in (coefficients, class_weights))
    losses = torch.zeros(len(coefficients), dtype=torch.float64, device=where)
    for inputs, labels in _chunks(samples, scale, where):
        scores = (inputs @ flat.T).reshape(len(labels), -1, classes)
        counted = weights[labels]
        for number, point in enumerate(points):
            logits = scores[:, 0] + torch.einsum("k,nkc->nc", point, scores[:, 1:])
            own = logits.gather(1, labels[:, None])[:, 0]
            losses[number] += counted @ (torch.logsumexp(logits, dim=1) - own)
    return losses.cpu().numpy()


def _chunks(
    samples: Samples, scale: Float, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scaled inputs with a one appended, and classes, in double precision."""
    divisor = torch.from_numpy(np.asarray(scale, dtype=np.float64)).to(device)
    for start in range(0, len(samples), _CHUNK):
        rows = slice(start, start + _CHUNK)
        inputs = samples.inputs[rows].detach().to(device).double() / divisor
        ones = torch.ones(len(inputs), 1, dtype=torch.float64, device=device)
        yield torch.cat([inputs, ones], dim=1), samples.labels[rows].to(device).long()
