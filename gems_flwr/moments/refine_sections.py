"""What nodes add up in rounds of refinement, and by what every sum is bounded.

Inputs are centred and scaled, ``z``; the sums of their squares over all nodes are known from the
moments (`gems_flwr.moments.moment_sums.Standard`). A residual is at most 1, so by Cauchy and
Schwarz ``sum |r_c z_f|`` is at most the root of the number of samples times that of
``sum z_f^2``. The loss of a sample is at most ``log C`` and the largest difference of two of its
scores, which is at most that of the biases and ``2 max |w_c - mean w|`` times its length. So every
sum, also that of losses, is bounded before it is asked for, whatever the data: nothing is clipped.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from gems_flwr.moments.loss_sums import LossSums
from gems_flwr.moments.moment_sums import Standard
from gems_flwr.secure.fixed_point import Section
from gems_flwr.typing import Float

GRADIENT_BITS, CURVATURE_BITS, SMALL_BITS = 16, 16, 48
# For the rounding of what bounds are computed from.
_SLACK = 1 + 1e-3


def rescaled(standard: Standard, scale: Float) -> Standard:
    """Return how long inputs are with another scale."""
    return dataclasses.replace(
        standard, scale=scale, squares=standard.squares * (standard.scale / scale) ** 2
    )


def largest_loss(layer: Float, standard: Standard) -> float:
    """Return what the mean loss over all samples cannot exceed.

    Parameters
    ----------
    layer : array of shape (C, D + 1)
        Weights of inputs that are scaled, and not centred; the bias in the last column.
    standard : Standard
        With the same scale.
    """
    weight = layer[:, :-1]
    bias = layer[:, -1] + weight @ (standard.center / standard.scale)
    longest = float(np.linalg.norm(weight - weight.mean(axis=0), axis=1).max())
    length = math.sqrt(standard.trace / standard.count)
    return (math.log(len(layer)) + float(np.ptp(bias)) + 2 * longest * length) * _SLACK


def gradient_sections(
    layer: Float, standard: Standard, weights: Float, *, by_class: bool
) -> list[Section]:
    """Return the sections of loss, gradient and curvature.

    Parameters
    ----------
    layer : array of shape (C, D + 1)
        Where.
    standard : Standard
        With the scale of the layer.
    weights : array of shape (C,)
        How much a sample of each class counts.
    by_class : bool
        Whether each class has a curvature of its own.
    """
    classes, features = len(layer), layer.shape[1] - 1
    most = max(float(weights.max()), 1e-30) * standard.count * _SLACK
    steepest = most * math.sqrt(float(standard.squares.max()) / standard.count) * _SLACK
    half = classes * (classes + 1) // 2
    return [
        *_loss_sections("loss", 1, most * largest_loss(layer, standard), classes, most),
        Section("gradient", (classes, features), max(steepest, 1e-30), GRADIENT_BITS, True),
        Section("bias", (classes,), most, SMALL_BITS, True),
        Section("curvature", (classes if by_class else 1, half), most, CURVATURE_BITS, True),
    ]


def losses_sections(layers: list[Float], standard: Standard, weights: Float) -> list[Section]:
    """Return the sections of the losses at some layers; see `gradient_sections`."""
    most = max(float(weights.max()), 1e-30) * standard.count * _SLACK
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
    """Return a node's summand.

    Parameters
    ----------
    sums : LossSums
        What there is to tell.
    by_class : array of shape (C,)
        The weight of each class's samples.
    center : array of shape (D,)
        What is taken from scaled inputs.
    """
    rows, columns = np.triu_indices(len(sums.gradient))
    bias = sums.gradient[:, -1]
    return {
        "loss": np.array([sums.loss]),
        "weights": by_class,
        "gradient": sums.gradient[:, :-1] - np.outer(bias, center),
        "bias": bias,
        "curvature": sums.curvature[:, rows, columns],
    }


def gradient_of(gradient: Float, bias: Float, center: Float) -> Float:
    """Return the gradient by weights of inputs that are not centred, and by the bias."""
    return np.column_stack([gradient + np.outer(bias, center), bias])


def curvature_of(halves: Float, classes: int) -> Float:
    """Return symmetric matrices from their upper halves."""
    rows, columns = np.triu_indices(classes)
    full = np.zeros((len(halves), classes, classes))
    full[:, rows, columns] = halves
    full[:, columns, rows] = halves
    return full
