"""Second moments of a network's inputs and gradients on a node's own data.

Gradients are those of the log-likelihood of labels that the *model* predicts, in expectation or
drawn, not of the true labels: that is the Fisher matrix, which Matena & Raffel and K-FAC mean, and
not the "empirical" one. One backward pass per class gives the gradients of all layers in their
outputs; together with the layers' inputs they give every statistic without a gradient per sample
and weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gems_flwr.devices import chosen_device, exact, moved
from gems_flwr.errors import ModelError
from gems_flwr.model_merging.layer_moments import statistic_sum
from gems_flwr.model_merging.layer_statistics import (
    NEEDED,
    Kind,
    Method,
    Statistics,
    check_layers,
)
from gems_flwr.networks.inputs import Data, batches, on_device_of
from gems_flwr.networks.layers import WeightLayer
from gems_flwr.networks.patches import CHUNK_VALUES, check_convolution
from gems_flwr.networks.surgery import resize_model
from gems_flwr.radii.fisher_axes import Labels
from gems_flwr.radii.quality import two_sided
from gems_flwr.typing import Arrays

Weighted = nn.Linear | nn.Conv2d


def measure_statistics(
    method: Method,
    labels: Labels,
    arrays: Arrays,
    data: Data,
    *,
    model: nn.Module | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Statistics:
    """Return what a method needs to know of a node besides its model.

    Parameters
    ----------
    method : one of `gems_flwr.model_merging.layer_statistics.NEEDED`
        How models will be merged.
    labels : {"exact", "sampled"}
        Whether gradients are taken in expectation over the labels that the model itself predicts,
        or for one label drawn from the prediction.
    arrays : mapping from str to ndarray
        The trained network, a chain of linear and convolutional layers.
    data : pair of arrays, or iterable of batches
        The node's data; its labels are not used.
    model : torch.nn.Module, optional
        The architecture. A single linear layer on flattened inputs can do without.
    seed : int
        Source of drawn labels.
    device : str or torch.device
        Where to compute; batches go there one by one.

    Raises
    ------
    ModelError
        If there is no data, or the model is not the chain of layers that its arrays are.
    """
    kinds = NEEDED[method]
    if not kinds:
        return {}
    return measure_kinds(kinds, labels, arrays, data, model=model, seed=seed, device=device)


def measure_kinds(
    kinds: Sequence[Kind],
    labels: Labels,
    arrays: Arrays,
    data: Data,
    *,
    model: nn.Module | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Statistics:
    """Return some statistics of a network, measured in one pass; see `measure_statistics`."""
    layers = check_layers(arrays)
    module, weighted = _prepared(model, arrays, layers)
    with moved(module, chosen_device(device)):
        return _measured(kinds, labels, module, weighted, layers, data, seed)


def _measured(
    kinds: Sequence[Kind],
    labels: Labels,
    module: nn.Module,
    weighted: list[Weighted],
    layers: Sequence[WeightLayer],
    data: Data,
    seed: int,
) -> Statistics:
    draws = torch.Generator().manual_seed(seed % 2**63)
    totals: dict[str, dict[Kind, Tensor]] = {layer.weight: {} for layer in layers}
    samples = 0
    for x in _parts(module, weighted, data):
        samples += len(x)
        scores, seen = _run(module, weighted, x)
        need_gradients = tuple(kinds) != ("inputs",)
        gradients = _gradients(scores, seen, labels, draws) if need_gradients else None
        for position, layer in enumerate(layers):
            g = None if gradients is None else gradients[position]
            for kind in kinds:
                fresh = statistic_sum(kind, weighted[position], seen[position][0], g)
                old = totals[layer.weight].get(kind)
                totals[layer.weight][kind] = fresh if old is None else old + fresh
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
                f"write statistics_mod(data, model=Net): the model has {len(layers)} layers, and "
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
    if not any(isinstance(each, nn.Conv2d) for each in weighted):
        yield from (x for x, _ in batches(data))
        return
    step = 0
    for x, _ in batches(data):
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

    The gradient in the zero is the gradient in the layer's output, whether or not the weights
    are being trained.
    """
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(layer: nn.Module, arguments: Any, out: Tensor) -> Tensor:
        zero = torch.zeros_like(out, requires_grad=True)
        seen.append((layer, arguments[0].detach(), zero))
        return out + zero

    hook: Callable[..., Any] = note
    handles = [layer.register_forward_hook(hook) for layer in weighted]
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


def _gradients(
    scores: Tensor,
    seen: list[tuple[Tensor, Tensor]],
    labels: Labels,
    draws: torch.Generator,
) -> list[list[Tensor]]:
    """Return per layer the gradients in its outputs, so that their squares sum to the Fisher's.

    In expectation there is one tensor per class, times the root of the class's chance.
    """
    logs = scores.log_softmax(dim=1)
    chances = logs.detach().exp()
    zeros = [zero for _, zero in seen]
    if labels == "sampled":
        drawn = torch.multinomial(chances.cpu(), 1, generator=draws).to(scores.device)
        per_layer = torch.autograd.grad(logs.gather(1, drawn).sum(), zeros)
        return [[exact(g)] for g in per_layer]
    gradients: list[list[Tensor]] = [[] for _ in zeros]
    for label in range(logs.shape[1]):
        per_layer = torch.autograd.grad(logs[:, label].sum(), zeros, retain_graph=True)
        root = exact(chances[:, label, None]).sqrt()
        for known, g in zip(gradients, per_layer, strict=True):
            known.append(root.reshape(-1, *[1] * (g.ndim - 1)) * exact(g))
    return gradients
