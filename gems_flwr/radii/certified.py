"""Radii that hold in every direction, for a linear layer.

The papers have no such radius. A model ``c + D`` moves the margin of sample i over class j
by at most ``|D| * |grad|``, and the gradient has length ``sqrt(2) |x_i|`` (x with the one
for the bias). So sample i is safe up to ``rho_i = min_j m_ij / (sqrt(2) |x_i|)``, and within
the k-th smallest rho at most k - 1 samples break. For an ellipsoid with relative axes s the
length is that of ``s * grad``.

For the mean cross-entropy two bounds hold and the better one counts: it is Lipschitz with
constant ``mean sqrt(2) |x_i|``, and it is smooth, ``L0 + G0 r + (lambda / 4) r^2``, with G0
the gradient at the centre and lambda the largest eigenvalue of the inputs' second moment
(the softmax's own curvature is at most 1/2).

Decided here: radii are shrunk by 1e-5 to cover single-precision rounding.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gems_flwr.errors import NotGoodEnoughError
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.quality import Quality, class_margins
from gems_flwr.radii.rays import RadiusCurve

SHRINK = 1 - 1e-5


def _squared_lengths(data: LayerData, x: Tensor) -> Tensor:
    """Return the squared length of each score's gradient, shape (n, classes)."""
    outputs = data.weight.shape[0]
    if data.axes is None:
        lengths = (x * x).sum(dim=1, keepdim=True).expand(-1, outputs)
    else:
        squared_axes = data.matrix(data.axes.to(data.weight)[None] ** 2)[0]
        lengths = (x * x) @ squared_axes.T
    # A layer with one output has a constant rival score, which does not move.
    return lengths if outputs > 1 else torch.cat([torch.zeros_like(lengths), lengths], dim=1)


def safe_radii(data: LayerData) -> Tensor:
    """Return how far each sample is sure to stay right; 0 if it is wrong, shape (n,)."""
    parts = []
    for rows in data.row_chunks(3 * (data.num_classes + data.weight.shape[1])):
        scores, y = data.scores(rows)
        x, _ = data.augmented(rows)
        lengths = _squared_lengths(data, x)
        pair = (lengths + lengths.gather(1, y[:, None])).sqrt()
        safe = (class_margins(scores, y) / pair.clamp_min(1e-30)).amin(dim=1)
        parts.append(safe.clamp_min(0))
    return torch.cat(parts)


def certified_curve(data: LayerData) -> RadiusCurve:
    """Return a radius for every accuracy within which no model at all fails."""
    safe = np.sort(safe_radii(data).double().cpu().numpy()) * SHRINK
    # With k samples asked for, failing takes n - k + 1 broken ones: the (n - k + 1)-th.
    radii = np.concatenate([[np.inf], safe[::-1]])
    return RadiusCurve(radii)


def certified_loss_radius(data: LayerData, quality: Quality) -> float:
    """Return a radius within which no model's mean cross-entropy exceeds epsilon."""
    scores, y = data.scores()
    at_center = quality.score(scores, y)
    room = quality.epsilon - at_center
    if room < 0:
        raise NotGoodEnoughError(quality.epsilon, at_center, "loss")
    x, _ = data.augmented(slice(None))
    lengths = _squared_lengths(data, x)
    largest = torch.topk(lengths, 2, dim=1).values.sum(dim=1).sqrt()
    by_slope = room / float(largest.double().mean())
    residual = scores.softmax(dim=1)
    residual[torch.arange(len(y), device=y.device), y] -= 1
    if data.weight.shape[0] == 1:
        residual = residual[:, 1:]
    gradient = data.on_surface(data.flat((residual.T @ x / len(y))[None]))
    slope = float(gradient.double().norm())
    scale = 1.0 if data.axes is None else float(data.axes.max())
    moment = (x.double().T @ x.double()) / len(y)
    # One output has curvature at most 1/4, several at most 1/2.
    curvature = scale**2 * float(torch.linalg.eigvalsh(moment)[-1])
    curvature *= 0.25 if data.weight.shape[0] == 1 else 0.5
    by_curve = (math.sqrt(slope**2 + 2 * curvature * room) - slope) / max(curvature, 1e-300)
    return SHRINK * max(by_slope, by_curve)
