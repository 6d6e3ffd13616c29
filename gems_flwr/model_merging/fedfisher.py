"""FedFisher: the Fisher objective by gradient steps from the average (Jhunjhunwala et al. 2024).

As in Fisher merging each model w_k stands for a Gaussian around it, with its Fisher matrix F_k as
the precision, and the best weights minimise Σ n_k (w − w_k)ᵀ F_k (w − w_k). Where `fisher_mean` and
`kfac` go to the minimum, FedFisher goes *towards* it from the average, and stops where a validation
sample of the server's says so. That is a damping of its own: what the F_k hardly determine hardly
moves. F_k is the diagonal, or Kronecker factors per layer.

As in the released code: 2000 steps of 0.01 with a momentum of 0.9, divided by the root of the sum
of squared gradients that fades by 0.99; with the diagonal 0.01 is added behind that root, with
Kronecker factors under it; a look at the model every 100 steps. Decided here: the average itself
is looked at, too, and without a validation sample the last step counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gems_flwr.device_algebra import product_sums, solves_elsewhere
from gems_flwr.model_merging.layer_statistics import Statistics, check_layers
from gems_flwr.model_merging.rows import mean_rows, rows_of, shares, with_rows
from gems_flwr.networks.layers import WeightLayer
from gems_flwr.typing import Arrays, Float

STEPS = 2000
LOOK_EVERY = 100
RATE = 0.01
MOMENTUM = 0.9
FADING = 0.99
OFFSET = 0.01

Shape = Literal["diagonal", "kfac"]
Gradient = Callable[[Float], Float]


def fedfisher_models(
    shape: Shape,
    models: Sequence[Arrays],
    statistics: Sequence[Statistics],
    weights: Sequence[float],
    *,
    steps: int = STEPS,
    device: str = "cpu",
) -> Iterator[tuple[int, dict[str, NDArray]]]:
    """Yield the average, and the model after every 100 steps and the last, each with its steps.

    Parameters
    ----------
    shape : {"diagonal", "kfac"}
        Which part of the Fisher matrix.
    models : sequence of mappings from str to ndarray
        Chains of linear and convolutional layers, all of the same shapes; at least one.
    statistics : sequence of mappings
        Each model's ``fisher``, or ``inputs`` and ``gradients``; see
        `gems_flwr.model_merging.layer_statistics`.
    weights : sequence of float
        Samples behind each model, above 0.
    steps : int
        At most, at least 1.
    device : str
        Where products with Kronecker factors are computed.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    parts = shares(weights, models)
    layers = check_layers(models[0])
    rows = {layer.weight: mean_rows(rows_of(models, layer), parts) for layer in layers}
    yield 0, with_rows(models[0], layers, rows)
    gradients = {
        layer.weight: _gradient(shape, models, statistics, parts, layer, device) for layer in layers
    }
    speed = {name: np.zeros_like(each) for name, each in rows.items()}
    squares = {name: np.zeros_like(each) for name, each in rows.items()}
    for step in range(1, steps + 1):
        for name, gradient in gradients.items():
            slope = gradient(rows[name])
            speed[name] = slope + MOMENTUM * speed[name]
            squares[name] = slope**2 + FADING * squares[name]
            if shape == "diagonal":
                size = np.sqrt(squares[name]) + OFFSET
            else:
                size = np.sqrt(squares[name] + OFFSET)
            rows[name] = rows[name] - RATE * speed[name] / size
        if step % LOOK_EVERY == 0 or step == steps:
            yield step, with_rows(models[0], layers, rows)


def _gradient(
    shape: Shape,
    models: Sequence[Arrays],
    statistics: Sequence[Statistics],
    parts: Sequence[float],
    layer: WeightLayer,
    device: str,
) -> Gradient:
    """Return half the gradient of the objective in one layer."""
    rows = rows_of(models, layer)
    found = [each[layer.weight] for each in statistics]
    if shape == "diagonal":
        each_precision = [
            p * f["fisher"].astype(np.float64) for p, f in zip(parts, found, strict=True)
        ]
        precision = np.sum(each_precision, axis=0)
        pull = np.sum([f * row for f, row in zip(each_precision, rows, strict=True)], axis=0)
        return lambda at: precision * at - pull
    lefts = [p * f["gradients"].astype(np.float64) for p, f in zip(parts, found, strict=True)]
    rights = [f["inputs"].astype(np.float64) for f in found]
    pulls = [b @ row @ a for b, row, a in zip(lefts, rows, rights, strict=True)]
    pull = np.asarray(np.sum(pulls, axis=0))
    if solves_elsewhere(device):
        there = product_sums(lefts, rights, device)
        return lambda at: there(at) - pull

    def slope(at: Float) -> Float:
        total: Float = -pull
        for b, a in zip(lefts, rights, strict=True):
            total += b @ at @ a
        return total

    return slope
