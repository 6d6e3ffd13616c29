"""Two ways to merge trained models: the peers that one-round GEMS is compared with.

Models are chains of linear and convolutional layers. A bias is the weight of one more input that is
always one, so a layer is a matrix with a row per neuron.

- RegMean (Jin et al. 2023): every layer by least squares, W = (Σ G_k)⁻¹ Σ G_k W_k with the Gram
  matrices G_k = X_kᵀX_k of its inputs, whose off-diagonal entries are shrunk by a factor (0.9 in
  the paper): inputs of a network that was merged below are not those that G_k was measured on.
- Fisher merging (Matena & Raffel 2022): Σ n_k F_k w_k / Σ n_k F_k, number by number, with the
  Fisher diagonals F_k, at least 1e-6 as in the authors' code.

Decided here: the ridge of RegMean pulls towards the nodes' mean, not to zero, so an input that no
node has ever seen keeps its mean weight and identical models stay as they are.

**Statistics** are what a node reports besides its model: per layer, with a the layer's input (and a
one for the bias) and g the gradient of the log-likelihood in the layer's output before the
activation, as means over the node's samples:

==========  ==========================  =======
``inputs``  E[a aᵀ]                     regmean
``fisher``  E[g² (a²)ᵀ], entry-wise     fisher
==========  ==========================  =======

Gradients are in expectation over the labels that the *model* predicts: that is the Fisher matrix,
not the "empirical" one. One backward pass per class gives the gradients of all layers.

A filter of a convolution is one neuron at many positions t, a_t a patch and g_t the gradient in a
pixel. The gradient of one sample in its kernel is Σ_t g_t a_tᵀ, whose square the Fisher diagonal
has; the inputs are patches summed over positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import scipy.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gems_flwr.devices import chosen_device, exact, moved, solve_positive, solves_elsewhere
from gems_flwr.errors import ModelError
from gems_flwr.networks import (
    CHUNK_VALUES,
    Data,
    WeightLayer,
    batches,
    check_convolution,
    image_chunks,
    neuron_rows,
    on_device_of,
    patches_of,
    resize_model,
    weight_layers,
)
from gems_flwr.spaces.ball.layer_data import two_sided
from gems_flwr.typing import Arrays, Float

Method = Literal["regmean", "fisher"]
Kind = Literal["inputs", "fisher"]
# By the name of a layer's weight.
Statistics = Mapping[str, NDArray]
Weighted = nn.Linear | nn.Conv2d

NEEDED: dict[Method, Kind] = {"regmean": "inputs", "fisher": "fisher"}
_ROUNDING = 1e-6  # of single precision, in the smallest eigenvalue relative to the trace
RIDGE = 1e-6
FLOOR = 1e-6  # of Fisher merging
SHRINK = 0.9  # of RegMean


def check_layers(arrays: Arrays) -> tuple[WeightLayer, ...]:
    """Return a network's layers, all of which must be linear or convolutions of images."""
    layers = weight_layers(arrays)
    for layer in layers:
        if len(layer.shape) not in (1, 3):
            raise ModelError(
                f"layer '{layer.name}' is neither linear nor a convolution of images (its neurons "
                f"have weights of shape {layer.shape})"
            )
    return layers


def statistics_shapes(kind: Kind, arrays: Arrays) -> dict[str, tuple[int, int]]:
    """Return the shape of a network's statistics."""
    return {
        layer.weight: (layer.dimension if kind == "inputs" else layer.width, layer.dimension)
        for layer in check_layers(arrays)
    }


def check_statistics(kind: Kind, statistics: Statistics) -> None:
    """Refuse statistics that no data can have, with a ValueError that names layer and kind."""
    for weight, array in statistics.items():
        what = f"'{kind}' of '{weight}'"
        if not np.isfinite(array).all():
            raise ValueError(f"{what}: expected finite values, got NaN or infinity")
        squares = np.diagonal(array) if kind == "inputs" else array
        if squares.min() < 0:
            raise ValueError(f"{what}: mean squares must not be negative, got {squares.min():g}")
        if kind == "fisher":
            continue
        size = float(np.trace(array))
        slack = _ROUNDING * size + np.finfo(np.float32).tiny
        try:
            np.linalg.cholesky(array.astype(np.float64) + slack * np.eye(len(array)))
        except np.linalg.LinAlgError:
            raise ValueError(
                f"{what}: expected the second moment of some data, got a negative variance"
            ) from None


# --- on a node ------------------------------------------------------------------------------------


def measure_statistics(
    kind: Kind,
    arrays: Arrays,
    data: Data,
    *,
    model: nn.Module | None = None,
    device: str | torch.device = "cpu",
) -> Statistics:
    """Return the statistics of a network on a node's data, measured in one pass.

    The labels of the data are not used. Batches go to the device one by one.
    """
    layers = check_layers(arrays)
    module, weighted = _prepared(model, arrays, layers)
    totals: dict[str, Tensor] = {}
    samples = 0
    with moved(module, chosen_device(device)):
        for x in _parts(module, weighted, data):
            samples += len(x)
            scores, seen = _run(module, weighted, x)
            gradients = _gradients(scores, seen) if kind == "fisher" else [[] for _ in seen]
            for layer, each, (a, _), g in zip(layers, weighted, seen, gradients, strict=True):
                fresh = _sum(each, a, g)
                totals[layer.weight] = totals.get(layer.weight, torch.zeros_like(fresh)) + fresh
    if not samples:
        raise ModelError("there is no data to measure statistics on")
    return {weight: (total / samples).cpu().numpy() for weight, total in totals.items()}


def _prepared(
    model: nn.Module | None, arrays: Arrays, layers: tuple[WeightLayer, ...]
) -> tuple[nn.Module, list[Weighted]]:
    if model is None:
        raise ModelError(
            "write good_enough_mod(data, model=Net): only the torch module computes what its "
            "layers see"
        )
    module = resize_model(model, arrays).eval()
    modules = dict(module.named_modules())
    found: list[Weighted] = []
    for layer in layers:
        each = modules.get(layer.name)
        if not isinstance(each, nn.Linear | nn.Conv2d):
            raise ModelError(
                f"layer '{layer.name}' is a {type(each).__name__}, neither torch.nn.Linear nor "
                "torch.nn.Conv2d, whose inputs could be measured"
            )
        if isinstance(each, nn.Conv2d):
            check_convolution(each)
        found.append(each)
    return module, found


def _parts(module: nn.Module, weighted: Sequence[Weighted], data: Data) -> Iterator[Tensor]:
    """Yield inputs, of networks with convolutions so few that all labels' gradients fit."""
    step = 0
    for x, _ in batches(data):
        if not any(isinstance(each, nn.Conv2d) for each in weighted):
            yield x
            continue
        if not step:
            scores, seen = _run(module, weighted, x[:1])
            pixels = sum(zero.numel() for _, zero in seen)
            step = max(1, CHUNK_VALUES // (pixels * (scores.shape[1] + 1)))
        for start in range(0, len(x), step):
            yield x[start : start + step]


def _run(
    module: nn.Module, weighted: Sequence[Weighted], x: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return scores, and for each layer its inputs and a zero that was added to its outputs.

    The gradient in the zero is the gradient in the layer's output.
    """
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(layer: nn.Module, arguments: Any, out: Tensor) -> Tensor:
        zero = torch.zeros_like(out, requires_grad=True)
        seen.append((layer, arguments[0].detach(), zero))
        return out + zero

    handles = [layer.register_forward_hook(note) for layer in weighted]
    try:
        with torch.enable_grad():
            scores = two_sided(module(on_device_of(module, x)))
    finally:
        for handle in handles:
            handle.remove()
    if [layer for layer, _, _ in seen] != list(weighted):
        raise ModelError("the model does not run its layers once each in the order of its arrays")
    if scores.ndim != 2 or any(
        a.ndim != (4 if isinstance(layer, nn.Conv2d) else 2) for layer, a, _ in seen
    ):
        raise ModelError(
            "the model's linear layers must see one row per sample, its convolutions one image"
        )
    return scores, [(a, zero) for _, a, zero in seen]


def _gradients(scores: Tensor, seen: list[tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
    """Return per layer and class the gradients in its outputs, times the root of the chance.

    Their squares then sum to the Fisher matrix.
    """
    logs = scores.log_softmax(dim=1)
    chances = logs.detach().exp()
    zeros = [zero for _, zero in seen]
    gradients: list[list[Tensor]] = [[] for _ in zeros]
    for label in range(logs.shape[1]):
        per_layer = torch.autograd.grad(logs[:, label].sum(), zeros, retain_graph=True)
        root = exact(chances[:, label, None]).sqrt()
        for known, g in zip(gradients, per_layer, strict=True):
            known.append(root.reshape(-1, *[1] * (g.ndim - 1)) * exact(g))
    return gradients


def _sum(module: Weighted, inputs: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return a layer's statistic summed over a batch: of inputs where there are no gradients."""
    if isinstance(module, nn.Conv2d):
        return _convolution_sum(module, inputs, gradients)
    a = _with_one(exact(inputs), module)
    if not gradients:
        return a.T @ a
    return torch.stack([g**2 for g in gradients]).sum(0).T @ a**2


def _convolution_sum(module: nn.Conv2d, images: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    total: Tensor | None = None
    for part in image_chunks(module, images):
        a = _with_one(exact(patches_of(module, images[part])), module)
        if not gradients:
            flat = a.reshape(-1, a.shape[-1])
            fresh = flat.T @ flat
        else:
            # Of every sample and label the gradient in the kernel, a matrix (width, d), as one
            # product, which is much faster than one for each label.
            maps = torch.cat([torch.flatten(g[part], start_dim=2) for g in gradients], dim=1)
            squares = ((maps @ a) ** 2).sum(0)
            fresh = squares.reshape(len(gradients), -1, a.shape[-1]).sum(0)
        total = fresh if total is None else total + fresh
    assert total is not None
    return total


def _with_one(a: Tensor, module: Weighted) -> Tensor:
    return a if module.bias is None else torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)


# --- on the server ------------------------------------------------------------------------------


def merge_models(
    method: Method,
    models: Sequence[Arrays],
    statistics: Sequence[Statistics],
    weights: Sequence[float],
    *,
    shrink: float = SHRINK,
    device: str = "cpu",
) -> dict[str, NDArray]:
    """Merge trained models of the same shapes, with the statistics that the method needs of each.

    The weights, above 0, are the samples behind each model; for `method` and `shrink` see
    `gems_flwr.MergedModels`. RegMean solves on the `device`.
    """
    total = float(sum(weights))
    if not (math.isfinite(total) and min(weights) > 0):
        raise ValueError(f"weights must be above 0 and finite, got {list(weights)}")
    parts = [weight / total for weight in weights]
    merged = dict(models[0])
    for layer in check_layers(merged):
        rows = [neuron_rows(model, layer).astype(np.float64) for model in models]
        found = [each[layer.weight].astype(np.float64) for each in statistics]
        # Both are solved for the step from the mean: 0 where all nodes agree.
        mean = np.asarray(sum(p * row for p, row in zip(parts, rows, strict=True)))
        steps = [row - mean for row in rows]
        if method == "regmean":
            new = mean + _regmean(parts, steps, found, shrink, device)
        else:
            sure = [p * np.maximum(fisher, FLOOR) for p, fisher in zip(parts, found, strict=True)]
            new = mean + sum(p * step for p, step in zip(sure, steps, strict=True)) / sum(sure)
        size, old = math.prod(layer.shape), merged[layer.weight]
        merged[layer.weight] = new[:, :size].reshape(old.shape).astype(old.dtype)
        if layer.bias is not None:
            merged[layer.bias] = new[:, size].astype(merged[layer.bias].dtype)
    return merged


def _regmean(
    parts: Sequence[float], steps: Sequence[Float], grams: Sequence[Float], shrink: float, at: str
) -> Float:
    total, pull = np.zeros_like(grams[0]), np.zeros_like(steps[0])
    for part, step, gram in zip(parts, steps, grams, strict=True):
        own = part * shrink * gram
        np.fill_diagonal(own, part * np.diagonal(gram))
        total += own
        pull += step @ own
    size = float(np.trace(total)) / len(total)
    if size == 0:
        return pull
    total[np.diag_indices_from(total)] += RIDGE * size
    try:
        if solves_elsewhere(at):
            return solve_positive(total, pull.T, at).T
        return np.asarray(scipy.linalg.solve(total, pull.T, assume_a="pos").T)
    except np.linalg.LinAlgError:
        # A node's moments may be negative by as much as rounding explains, which may be more than
        # the ridge.
        values, vectors = np.linalg.eigh(total)
        return np.asarray((pull @ vectors / np.maximum(values, RIDGE * size)) @ vectors.T)
