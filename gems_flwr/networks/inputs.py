"""The inputs of a model's linear output layer, on whatever data a user has.

A good-enough space of one round is about the output layer, seen from the layers below it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gems_flwr.averaging import Arrays
from gems_flwr.construct import LayerInputs
from gems_flwr.networks.data import Data, batches
from gems_flwr.networks.surgery import resize_model
from gems_flwr.networks.watch import on_device_of, watch
from gems_flwr.spaces import OutputLayer, find_output_layer


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
                raise ValueError(f"the model has no layer '{layer}'; its linear layers are {names}")

    def output_layer(self, data: Data) -> OutputLayer:
        """Return which arrays are the output layer; data is only needed to try the model out."""
        if self._module is not None and self._name is None:
            for inputs, _ in batches(data):
                self._name = self._find(inputs[:2])
                break
        layer = find_output_layer(self._arrays, self._name)
        below = [key for key in self._arrays if key not in (layer.weight, layer.bias)]
        if self._module is None and below:
            raise ValueError(
                f"the model has arrays below its output layer ({below}); give the mod the "
                "torch module, so that it can compute the layer's inputs"
            )
        return layer

    def read(self, data: Data, layer: OutputLayer) -> LayerInputs:
        """Return the layer's inputs on all of the data."""
        inputs, labels = [], []
        for x, y in batches(data):
            inputs.append(self._inputs(x))
            labels.append(y.reshape(-1).long())
        if not inputs:
            raise ValueError("there is no data to build a space on")
        result = LayerInputs(torch.cat(inputs), torch.cat(labels))
        if result.inputs.shape[1] != layer.features:
            raise ValueError(
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
        raise ValueError(
            f"no linear layer gives the model's output; name the one to aggregate by "
            f"layer=..., one of {linear}"
        )
