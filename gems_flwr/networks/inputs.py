"""The inputs of a model's linear output layer, on whatever data a user has.

A good-enough space of one round is about the output layer, seen from the layers below it. Data may
come as a pair of arrays or as batches, from a torch ``DataLoader`` or Flower's datasets; what a
layer sees is noted while the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gems_flwr.devices import chosen_device, exact_device
from gems_flwr.errors import ModelError
from gems_flwr.networks.surgery import resize_model
from gems_flwr.samples import Samples
from gems_flwr.spaces.output_layer import OutputLayer, find_output_layer
from gems_flwr.typing import Arrays

Data = tuple[Any, Any] | Iterable[Any]

_BATCH = 4096
_LABEL_NAMES = ("label", "labels", "target", "y", "fine_label")


def batches(data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels of data in any of the usual forms.

    Parameters
    ----------
    data : pair of arrays, or iterable of batches
        A batch is a pair of inputs and labels, or a mapping with one entry called ``label``,
        ``labels``, ``target`` or ``y`` and one other.
    """
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[1], "shape"):
        inputs, labels = _tensor(data[0]), _tensor(data[1])
        for start in range(0, len(labels), _BATCH):
            yield inputs[start : start + _BATCH], labels[start : start + _BATCH]
        return
    for batch in data:
        inputs, labels = map(_tensor, _pair(batch))
        if labels.ndim == 0:
            raise ModelError(
                "return loaders, for example DataLoader(dataset, batch_size=32): what came is a "
                "single sample, not a batch"
            )
        yield inputs, labels


def _tensor(values: Any) -> Tensor:
    # By way of numpy, which knows pandas' frames and lists of arrays, too.
    return values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, Mapping):
        inputs, labels = batch
        return inputs, labels
    named = [key for key in batch if key in _LABEL_NAMES]
    others = [key for key in batch if key not in _LABEL_NAMES]
    if len(named) != 1 or len(others) != 1:
        raise ModelError(
            f"a batch must have its inputs and one of {list(_LABEL_NAMES)}, got {list(batch)}"
        )
    return batch[others[0]], batch[named[0]]


def _classes(labels: Tensor, samples: int) -> Tensor:
    """Return one class number per sample; they may come as floats of shape (n, 1)."""
    flat = labels.reshape(-1)
    if len(flat) != samples:
        raise ModelError(
            f"labels must be one class number per sample, got shape {tuple(labels.shape)} for "
            f"{samples} samples"
        )
    classes = flat.long()
    if flat.is_floating_point() and not torch.equal(classes.to(flat), flat):
        raise ModelError("labels must be class numbers 0, 1, …, got fractions: is it a regression?")
    return classes


# What may stand between the linear output layer and what the model returns.
_ENDINGS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda scores: scores,
    torch.sigmoid,
    lambda scores: scores.softmax(-1),
    lambda scores: scores.log_softmax(-1),
)


def _is_same(ours: Tensor, output: Any) -> bool:
    """Return whether a model returned these numbers; one per sample may have lost its axis."""
    if not isinstance(output, Tensor) or ours.numel() != output.numel():
        return False
    return len(ours) == len(output) and torch.allclose(ours.reshape(output.shape), output)


class Step(NamedTuple):
    """One call of a module: its name, first input and output."""

    name: str
    inputs: Tensor
    outputs: Tensor


def watch(model: nn.Module, x: Tensor, names: Iterable[str]) -> list[Step]:
    """Return the calls of some modules in the order in which they ran.

    Parameters
    ----------
    model : torch.nn.Module
        Run once on `x`, without gradients.
    x : tensor
        A batch; moved to where the model is.
    names : iterable of str
        Names of submodules.
    """
    seen: list[Step] = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, arguments: Any, out: Any) -> None:
            seen.append(Step(name, arguments[0].detach(), out.detach()))

        return note

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(hook(name)) for name in names]
    try:
        with torch.no_grad():
            model(on_device_of(model, x))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def on_device_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a batch where the model is, and as it wants it."""
    weight = next(model.parameters())
    return x.to(weight.device, weight.dtype)


def linear_layer(
    arrays: Arrays, output: OutputLayer, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a model's output layer in single precision, for exact sums."""
    where = exact_device(device)
    weight = torch.from_numpy(np.array(arrays[output.weight])).float()
    bias = torch.from_numpy(np.array(arrays[output.bias])).float() if output.bias else None
    return weight.to(where), None if bias is None else bias.to(where)


class LayerReader:
    """Finds the linear output layer of a model and computes its inputs.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        The model that the server sent: the layers below the output layer that all nodes share.
    model : torch.nn.Module, optional
        The architecture. Without it the model must be the linear layer alone, and its inputs
        are the data, flattened.
    layer : str, optional
        Name of the output layer in the module, where it cannot be found.
    call : str
        What to write where the module is missing.
    device : str or torch.device
        Where the model runs: batches go there one by one, and what a layer sees comes back.
    """

    def __init__(
        self,
        arrays: Arrays,
        model: nn.Module | None = None,
        layer: str | None = None,
        *,
        call: str = "good_enough_mod(data, model=Net)",
        device: str | torch.device = "cpu",
    ) -> None:
        self._call = call
        self._module: nn.Module | None = None
        self._name = layer
        self._arrays = arrays
        if model is not None:
            self._module = resize_model(model, arrays).eval().to(chosen_device(device))
            if layer is not None and layer not in dict(model.named_modules()):
                names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
                raise ModelError(f"the model has no layer '{layer}'; its linear layers are {names}")

    def output_layer(self, data: Data) -> OutputLayer:
        """Return which arrays are the output layer; data is only needed to try the model out."""
        if self._module is not None and self._name is None:
            for inputs, _ in batches(data):
                self._name = self._find(inputs[:2])
                break
        layer = find_output_layer(self._arrays, self._name)
        below = [key for key in self._arrays if key not in (layer.weight, layer.bias)]
        if self._module is None and below:
            raise ModelError(
                f"write {self._call}: the model has arrays below its output layer ({below}), and "
                "only the torch module computes what that layer sees"
            )
        return layer

    def read(self, data: Data, layer: OutputLayer) -> Samples:
        """Return the layer's inputs on all of the data."""
        inputs, labels = [], []
        for x, y in batches(data):
            inputs.append(self._inputs(x))
            labels.append(_classes(y, len(x)).cpu())
        if not inputs:
            raise ModelError("there is no data to build a space on")
        result = Samples(torch.cat(inputs), torch.cat(labels))
        if result.inputs.shape[1] != layer.features:
            raise ModelError(
                f"the output layer has {layer.features} inputs, the data gives "
                f"{result.inputs.shape[1]}"
            )
        return result

    def _inputs(self, x: Tensor) -> Tensor:
        if self._module is None:
            return x.reshape(len(x), -1).float().cpu()
        assert self._name is not None
        return watch(self._module, x, [self._name])[0].inputs.cpu()

    def _find(self, x: Tensor) -> str:
        """Return the linear layer whose output is the model's, or makes its probabilities."""
        assert self._module is not None
        linear = [n for n, m in self._module.named_modules() if isinstance(m, nn.Linear)]
        with torch.no_grad():
            output = self._module(on_device_of(self._module, x))
        for step in reversed(watch(self._module, x, linear)):
            if any(_is_same(ending(step.outputs), output) for ending in _ENDINGS):
                return step.name
        raise ModelError(
            f"no linear layer gives the model's output; name the one to aggregate by "
            f"layer=..., one of {linear}"
        )
