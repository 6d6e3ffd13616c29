"""Three ways to merge trained models: the peers that one-round GEMS is compared with.

Models are chains of linear and convolutional layers. A bias is the weight of one more input that is
always one, so a layer is a matrix with a row per neuron.

- RegMean (Jin et al. 2023): every layer by least squares, W = (Σ G_k)⁻¹ Σ G_k W_k with the Gram
  matrices G_k = X_kᵀX_k of its inputs, whose off-diagonal entries are shrunk by a factor (0.9 in
  the paper): inputs of a network that was merged below are not those that G_k was measured on.
- Fisher merging (Matena & Raffel 2022): Σ n_k F_k w_k / Σ n_k F_k, number by number, with the
  Fisher diagonals F_k, at least 1e-6 as in the authors' code.
- FedFisher with Kronecker factors (Jhunjhunwala et al. 2024) minimises Σ n_k (w − w_k)ᵀ F_k (w −
  w_k) by gradient steps from the average, as in the released code, and stops where a validation
  sample of the server's says so.

Decided here: the ridge of RegMean pulls towards the nodes' mean, not to zero, so an input that no
node has ever seen keeps its mean weight and identical models stay as they are. FedFisher also looks
at the average itself, and without a validation sample its last step counts.

**Statistics** are what a node reports besides its model: per layer, with a the layer's input (and a
one for the bias) and g the gradient of the log-likelihood in the layer's output before the
activation, as means over the node's samples:

==============  ==========================  =======================
``inputs``      E[a aᵀ]                     regmean, fedfisher_kfac
``gradients``   E[g gᵀ]                     fedfisher_kfac
``fisher``      E[g² (a²)ᵀ], entry-wise     fisher
==============  ==========================  =======================

Gradients are in expectation over the labels that the *model* predicts: that is the Fisher matrix,
not the "empirical" one. One backward pass per class gives the gradients of all layers.

A filter of a convolution is one neuron at many positions t, a_t a patch and g_t the gradient in a
pixel. The gradient of one sample in its kernel is Σ_t g_t a_tᵀ, whose square the Fisher diagonal
has. The Kronecker factors are those of Grosse & Martens 2016: patches summed over positions, and
output gradients averaged over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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

Method = Literal["regmean", "fisher", "fedfisher_kfac"]
Kind = Literal["inputs", "gradients", "fisher"]
# By the name of a layer's weight, then by kind.
Statistics = Mapping[str, Mapping[Kind, NDArray]]
Weighted = nn.Linear | nn.Conv2d

SYMMETRIC: tuple[Kind, ...] = ("inputs", "gradients")
NEEDED: dict[Method, tuple[Kind, ...]] = {
    "regmean": ("inputs",),
    "fisher": ("fisher",),
    "fedfisher_kfac": ("inputs", "gradients"),
}
_ROUNDING = 1e-6  # of single precision, in the smallest eigenvalue relative to the trace
# Of RegMean: tried where there is a sample to choose by, as in FedFisher's code; else the first.
SHRINKS: tuple[float, ...] = (0.9, 0.1)
RIDGE = 1e-6
FLOOR = 1e-6  # of Fisher merging
# Of FedFisher: the rate is divided by the root of the sum of squared gradients, which fades.
STEPS, LOOK_EVERY = 2000, 100
RATE, MOMENTUM, FADING, OFFSET = 0.01, 0.9, 0.99, 0.01


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


def statistics_shapes(method: Method, arrays: Arrays) -> dict[str, dict[Kind, tuple[int, int]]]:
    """Return the shape of every statistic that a method needs for a network."""
    shapes: dict[str, dict[Kind, tuple[int, int]]] = {}
    for layer in check_layers(arrays):
        known: dict[Kind, tuple[int, int]] = {
            "inputs": (layer.dimension, layer.dimension),
            "gradients": (layer.width, layer.width),
            "fisher": (layer.width, layer.dimension),
        }
        shapes[layer.weight] = {kind: known[kind] for kind in NEEDED[method]}
    return shapes


def check_statistics(statistics: Statistics) -> None:
    """Refuse statistics that no data can have, with a ValueError that names layer and kind."""
    each = ((w, kind, array) for w, kinds in statistics.items() for kind, array in kinds.items())
    for weight, kind, array in each:
        what = f"'{kind}' of '{weight}'"
        if not np.isfinite(array).all():
            raise ValueError(f"{what}: expected finite values, got NaN or infinity")
        squares = np.diagonal(array) if kind in SYMMETRIC else array
        if squares.min() < 0:
            raise ValueError(f"{what}: mean squares must not be negative, got {squares.min():g}")
        if kind not in SYMMETRIC:
            continue
        size = float(np.trace(array))
        if not np.allclose(array, array.T, rtol=0, atol=_ROUNDING * size):
            raise ValueError(f"{what}: a second moment is symmetric, this one is not")
        slack = _ROUNDING * size + np.finfo(np.float32).tiny
        try:
            np.linalg.cholesky(array.astype(np.float64) + slack * np.eye(len(array)))
        except np.linalg.LinAlgError:
            raise ValueError(
                f"{what}: expected the second moment of some data, got a negative variance"
            ) from None


# --- on a node ------------------------------------------------------------------------------------


def measure_statistics(
    kinds: Sequence[Kind],
    arrays: Arrays,
    data: Data,
    *,
    model: nn.Module | None = None,
    device: str | torch.device = "cpu",
) -> Statistics:
    """Return some statistics of a network on a node's data, measured in one pass.

    The labels of the data are not used. Without a `model`, the network must be a single linear
    layer on flattened inputs. Batches go to the device one by one.
    """
    layers = check_layers(arrays)
    module, weighted = _prepared(model, arrays, layers)
    totals: dict[str, dict[Kind, Tensor]] = {layer.weight: {} for layer in layers}
    samples = 0
    with moved(module, chosen_device(device)):
        for x in _parts(module, weighted, data):
            samples += len(x)
            scores, seen = _run(module, weighted, x)
            gradients = None if tuple(kinds) == ("inputs",) else _gradients(scores, seen)
            for position, layer in enumerate(layers):
                g = [] if gradients is None else gradients[position]
                mine = totals[layer.weight]
                for kind in kinds:
                    fresh = _sum(kind, weighted[position], seen[position][0], g)
                    mine[kind] = mine[kind] + fresh if kind in mine else fresh
    if not samples:
        raise ModelError("there is no data to measure statistics on")
    return {
        weight: {kind: (total / samples).cpu().numpy() for kind, total in found.items()}
        for weight, found in totals.items()
    }


def _prepared(
    model: nn.Module | None, arrays: Arrays, layers: tuple[WeightLayer, ...]
) -> tuple[nn.Module, list[Weighted]]:
    if model is None:
        if len(layers) > 1:
            raise ModelError(
                f"write good_enough_mod(data, model=Net): the model has {len(layers)} layers, and "
                "only the torch module computes what each of them sees"
            )
        (layer,) = layers
        linear = nn.Linear(layer.shape[0], layer.width, bias=layer.bias is not None)
        named = zip((n for n, _ in linear.named_parameters()), layer.keys, strict=True)
        linear.load_state_dict({n: torch.from_numpy(np.array(arrays[key])) for n, key in named})
        return nn.Sequential(nn.Flatten(), linear).eval(), [linear]
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


def _sum(kind: Kind, module: Weighted, inputs: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return one statistic of a layer, summed over the samples of a batch."""
    if isinstance(module, nn.Conv2d):
        return _convolution_sum(kind, module, inputs, gradients)
    a = _with_one(exact(inputs), module)
    if kind == "inputs":
        return a.T @ a
    if kind == "gradients":
        return torch.stack([g.T @ g for g in gradients]).sum(0)
    return torch.stack([g**2 for g in gradients]).sum(0).T @ a**2


def _convolution_sum(
    kind: Kind, module: nn.Conv2d, images: Tensor, gradients: Sequence[Tensor]
) -> Tensor:
    if kind == "gradients":
        rows = [g.transpose(0, 1).reshape(g.shape[1], -1) for g in gradients]
        return torch.stack([g @ g.T for g in rows]).sum(0) / gradients[0][0, 0].numel()
    total: Tensor | None = None
    for part in image_chunks(module, images):
        a = _with_one(exact(patches_of(module, images[part])), module)
        if kind == "inputs":
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


class MergedModel(NamedTuple):
    """The merged arrays, and what there is to report about them."""

    arrays: dict[str, NDArray]
    details: Mapping[str, Any]


def merge_models(
    method: Method,
    models: Sequence[Arrays],
    statistics: Sequence[Statistics],
    weights: Sequence[float],
    *,
    shrink: float | None = None,
    steps: int = STEPS,
    device: str = "cpu",
    score: Callable[[Arrays], float] | None = None,
) -> MergedModel:
    """Merge trained models of the same shapes, with the statistics that the method needs of each.

    The weights, above 0, are the samples behind each model; for `method`, `shrink`, `steps` and
    `score` see `gems_flwr.MergedModels`. RegMean solves on the `device`.
    """
    total = float(sum(weights))
    if not (math.isfinite(total) and min(weights) > 0):
        raise ValueError(f"weights must be above 0 and finite, got {list(weights)}")
    layers = check_layers(models[0])
    parts = [weight / total for weight in weights]
    stacks = [
        _Layer(
            parts,
            [neuron_rows(model, layer).astype(np.float64) for model in models],
            [each[layer.weight] for each in statistics],
        )
        for layer in layers
    ]
    tried: Iterator[tuple[list[Float], dict[str, Any]]]
    if method == "regmean":
        shrinks = (shrink,) if shrink is not None else SHRINKS if score else SHRINKS[:1]
        tried = (
            ([_regmean(x, factor, device) for x in stacks], {"shrink": factor})
            for factor in shrinks
        )
    elif method == "fisher":
        tried = iter([([_fisher(each) for each in stacks], {})])
    else:
        tried = _fedfisher(stacks, steps)
    found = ((_with_rows(models[0], layers, rows), details) for rows, details in tried)
    if score is None:
        *_, (arrays, details) = found
        return MergedModel(arrays, details)
    scored = [(score(arrays), arrays, details) for arrays, details in found]
    # The first of equals: of FedFisher the one with the fewest steps.
    best, arrays, details = max(scored, key=lambda each: each[0])
    return MergedModel(arrays, {**details, "tried": len(scored), "public_score": best})


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of all nodes: their shares, rows of neurons (in double precision), statistics."""

    parts: Sequence[float]
    rows: Sequence[Float]
    statistics: Sequence[Mapping[Any, NDArray]]

    @property
    def mean(self) -> Float:
        return np.asarray(sum(p * row for p, row in zip(self.parts, self.rows, strict=True)))

    def moments(self, kind: str) -> list[Float]:
        return [each[kind].astype(np.float64) for each in self.statistics]


def _with_rows(
    template: Arrays, layers: Sequence[WeightLayer], rows: Sequence[Float]
) -> dict[str, NDArray]:
    merged = dict(template)
    for layer, new in zip(layers, rows, strict=True):
        size, old = math.prod(layer.shape), template[layer.weight]
        merged[layer.weight] = new[:, :size].reshape(old.shape).astype(old.dtype)
        if layer.bias is not None:
            merged[layer.bias] = new[:, size].astype(template[layer.bias].dtype)
    return merged


def _regmean(each: _Layer, shrink: float, device: str) -> Float:
    mean = each.mean
    dimension = mean.shape[1]
    total, pull = np.zeros((dimension, dimension)), np.zeros_like(mean)
    for part, row, gram in zip(each.parts, each.rows, each.moments("inputs"), strict=True):
        own = part * shrink * gram
        np.fill_diagonal(own, part * np.diagonal(gram))
        total += own
        # Solved for the step from the mean: 0 where all nodes agree.
        pull += (row - mean) @ own
    size = float(np.trace(total)) / dimension
    if size == 0:
        return mean
    total[np.diag_indices_from(total)] += RIDGE * size
    try:
        if solves_elsewhere(device):
            step: Float = solve_positive(total, pull.T, device).T
        else:
            step = scipy.linalg.solve(total, pull.T, assume_a="pos").T
    except np.linalg.LinAlgError:
        # A node's moments may be negative by as much as rounding explains, which may be more than
        # the ridge.
        values, vectors = np.linalg.eigh(total)
        step = (pull @ vectors / np.maximum(values, RIDGE * size)) @ vectors.T
    return mean + step


def _fisher(each: _Layer) -> Float:
    pairs = zip(each.parts, each.moments("fisher"), strict=True)
    precisions = [part * np.maximum(fisher, FLOOR) for part, fisher in pairs]
    # As a step from the mean: 0 where all nodes agree.
    pulls = (p * (row - each.mean) for p, row in zip(precisions, each.rows, strict=True))
    return np.asarray(each.mean + sum(pulls) / sum(precisions))


def _fedfisher(
    stacks: Sequence[_Layer], steps: int
) -> Iterator[tuple[list[Float], dict[str, Any]]]:
    """Yield the average, and the model after every 100 steps and the last."""
    rows = [each.mean for each in stacks]
    yield list(rows), {"steps": 0}
    slopes = [_slope(each) for each in stacks]
    speed = [np.zeros_like(each) for each in rows]
    squares = [np.zeros_like(each) for each in rows]
    for step in range(1, steps + 1):
        for i, slope in enumerate(slopes):
            at = slope(rows[i])
            speed[i] = at + MOMENTUM * speed[i]
            squares[i] = at**2 + FADING * squares[i]
            rows[i] = rows[i] - RATE * speed[i] / np.sqrt(squares[i] + OFFSET)
        if step % LOOK_EVERY == 0 or step == steps:
            yield list(rows), {"steps": step}


def _slope(each: _Layer) -> Callable[[Float], Float]:
    """Return half the gradient of FedFisher's objective in one layer: Σ n_k B_k (W − W_k) A_k."""
    lefts = [p * b for p, b in zip(each.parts, each.moments("gradients"), strict=True)]
    factors = list(zip(lefts, each.moments("inputs"), strict=True))
    pull = np.asarray(np.sum([b @ w @ a for (b, a), w in zip(factors, each.rows, strict=True)], 0))

    def slope(at: Float) -> Float:
        total: Float = -pull
        for b, a in factors:
            total += b @ at @ a
        return total

    return slope
