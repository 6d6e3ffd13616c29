"""The inputs of one hidden layer's neurons, and the activation behind it.

A filter of a convolution is a neuron whose inputs are the patches under the kernel: every patch
of every image is one row. There are too many to keep, so a seeded choice of them is read.

Decided here: the layers' order is the state dict's, checked by running the model once, and the
activation is the first one that the model runs behind the layer. Pooling before or after a
monotone activation makes no difference to a neuron, dropout does not run in evaluation mode. A
model that calls its activation as a function shows no module; it is then the one that the caller
names.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from gems_flwr.devices import chosen_device
from gems_flwr.errors import ModelError
from gems_flwr.networks.inputs import Data, batches, watch
from gems_flwr.networks.layers import weight_layers
from gems_flwr.networks.patches import check_convolution, image_chunks, patches_of
from gems_flwr.networks.surgery import resize_model
from gems_flwr.radii.activations import Activation, activation_of
from gems_flwr.radii.neuron_data import draw_rows
from gems_flwr.typing import Arrays


@dataclasses.dataclass(frozen=True, eq=False)
class NeuronInputs:
    """What the neurons of one layer see, of shape (rows, inputs), and their activation."""

    rows: Tensor
    activation: Activation


def read_neuron_inputs(
    model: nn.Module,
    arrays: Arrays,
    index: int,
    data: Data,
    *,
    max_rows: int,
    seed: int,
    activation: nn.Module | None = None,
    device: str | torch.device = "cpu",
) -> NeuronInputs:
    """Return the inputs of a hidden layer.

    Parameters
    ----------
    model : torch.nn.Module
        The architecture, a chain of linear and convolutional layers; its widths are made those
        of the arrays.
    arrays : mapping from str to ndarray
        The network.
    index : int
        Which layer, from 0.
    data : pair of arrays, or iterable of batches
        See `gems_flwr.networks.inputs.batches`.
    max_rows : int
        Rows to return at most: of all samples, or of all patches.
    seed : int
        Source of the choice.
    activation : torch.nn.Module, optional
        What follows the layer where no module shows it; ReLU by default.
    device : str or torch.device
        Where the model runs, batch by batch; the rows come back.

    Raises
    ------
    ModelError
        If the model is no such chain, or there is no data.
    """
    model = resize_model(model, arrays).eval().to(chosen_device(device))
    layers = weight_layers(arrays)
    name = layers[index].name
    module = dict(model.named_modules())[name]
    if not isinstance(module, nn.Linear | nn.Conv2d):
        raise ModelError(
            f"layer '{name}' is a {type(module).__name__}, not linear or convolutional"
        )
    seen: list[Tensor] = []
    found: Activation | None = None
    for x, _ in batches(data):
        if not seen:
            found = _checked_chain(model, x[:2], [layer.name for layer in layers], index)
        seen.append(watch(model, x, [name])[0].inputs.cpu())
    if not seen:
        raise ModelError("there is no data to build a space on")
    inputs = torch.cat(seen)
    rows = _rows(module, inputs, max_rows, seed)
    return NeuronInputs(rows, found or _fallback(activation))


def activation_behind(
    model: nn.Module, sample: Tensor, arrays: Arrays, index: int, activation: nn.Module | None
) -> Activation:
    """Return the activation behind a hidden layer; where no module shows it, the one given."""
    names = [layer.name for layer in weight_layers(arrays)]
    return _checked_chain(model, sample[:2], names, index) or _fallback(activation)


def _fallback(activation: nn.Module | None) -> Activation:
    known = activation_of(activation or nn.ReLU())
    if known is None:
        raise ModelError(f"{activation} is no activation")
    return known


def _checked_chain(model: nn.Module, x: Tensor, names: list[str], index: int) -> Activation | None:
    """Check that the layers run in order, once each; return the activation behind one."""
    leaves = [name for name, module in model.named_modules() if not list(module.children())]
    modules = dict(model.named_modules())
    steps = [step.name for step in watch(model, x, leaves)]
    ran = [name for name in steps if name in names]
    if ran != names:
        raise ModelError(f"the model runs its layers as {ran}, its weights are ordered {names}")
    behind = steps[steps.index(names[index]) + 1 :]
    for name in behind:
        if name in names:
            break
        found = activation_of(modules[name])
        if found is not None:
            return found
    return None


def _rows(module: nn.Linear | nn.Conv2d, inputs: Tensor, max_rows: int, seed: int) -> Tensor:
    if isinstance(module, nn.Linear):
        return draw_rows(inputs.reshape(-1, inputs.shape[-1]), max_rows, seed)
    check_convolution(module)
    positions = patches_of(module, inputs[:1]).shape[1]
    chosen = draw_rows(torch.arange(len(inputs) * positions), max_rows, seed).to(inputs.device)
    image, position = chosen // positions, chosen % positions
    parts = []
    for part in image_chunks(module, inputs):
        mine = (image >= part.start) & (image < part.stop)
        if bool(mine.any()):
            patches = patches_of(module, inputs[part])
            parts.append(patches[image[mine] - part.start, position[mine]])
    return torch.cat(parts)
