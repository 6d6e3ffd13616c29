"""The inputs of a model's linear output layer, on whatever data a user has.

A good-enough space of one round is about the output layer, seen from the layers below it. Data may
come as a pair of arrays or as batches, from a torch ``DataLoader`` or Flower's datasets; what a
layer sees is noted while the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
        inputs, labels = torch.as_tensor(data[0]), torch.as_tensor(data[1])
        for start in range(0, len(labels), _BATCH):
            yield inputs[start : start + _BATCH], labels[start : start + _BATCH]
        return
    for batch in data:
        inputs, labels = _pair(batch)
        yield torch.as_tensor(inputs), torch.as_tensor(labels)


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
    """Return a batch as the model wants it."""
    weight = next(model.parameters())
    return x.to(weight.device, weight.dtype)


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
    """

    def __init__(
        self, arrays: Arrays, model: nn.Module | None = None, layer: str | None = None
    ) -> None:
        self._module: nn.Module | None = None
        self._name = layer
        self._arrays = arrays
        if model is not None:
            self._module = resize_model(model, arrays).eval()
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
                f"the model has arrays below its output layer ({below}); give the mod the "
                "torch module, so that it can compute the layer's inputs"
            )
        return layer

    def read(self, data: Data, layer: OutputLayer) -> Samples:
        """Return the layer's inputs on all of the data."""
        inputs, labels = [], []
        for x, y in batches(data):
            inputs.append(self._inputs(x))
            labels.append(y.reshape(-1).long())
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
            return x.reshape(len(x), -1).float()
        assert self._name is not None
        return watch(self._module, x, [self._name])[0].inputs

    def _find(self, x: Tensor) -> str:
        """Return the name of the linear layer whose output is the model's."""
        assert self._module is not None
        linear = [n for n, m in self._module.named_modules() if isinstance(m, nn.Linear)]
        with torch.no_grad():
            output = self._module(on_device_of(self._module, x))
        for step in reversed(watch(self._module, x, linear)):
            if step.outputs.shape == output.shape and torch.equal(step.outputs, output):
                return step.name
        raise ModelError(
            f"no linear layer gives the model's output; name the one to aggregate by "
            f"layer=..., one of {linear}"
        )
