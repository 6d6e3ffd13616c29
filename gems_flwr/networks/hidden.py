"""The inputs of one hidden layer's neurons, and the activation behind it.

A filter of a convolution is a neuron whose inputs are the patches under the kernel: every patch
of every image is one row. There are too many to keep, so a seeded choice of them is read.

The layers' order is the state dict's, checked by running the model once. The activation is the
first one that the model runs behind the layer, or the one that the caller names where the model
calls it as a function; pooling before or after it makes no difference to a neuron. An activation
that is not monotone (GELU, SiLU) or not known is an error, as `gems_flwr.neurons` rests on it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gems_flwr.devices import chosen_device
from gems_flwr.errors import ModelError
from gems_flwr.networks.inputs import Data, batches, watch
from gems_flwr.networks.layers import resize_model, weight_layers
from gems_flwr.typing import Arrays

# Of all patches that are looked at together: those of all images would not fit.
CHUNK_VALUES = 16 * 2**20


class NeuronInputs(NamedTuple):
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
    """Return the inputs of the hidden layer `index` of a network, and its activation.

    The model gets the arrays' widths and runs on the device, batch by batch. Of all samples or
    patches at most `max_rows` are returned, chosen by the seed. `activation` follows the layer
    where no module shows one; ReLU by default.
    """
    model = resize_model(model, arrays).eval().to(chosen_device(device))
    names = [layer.name for layer in weight_layers(arrays)]
    module = dict(model.named_modules())[names[index]]
    if not isinstance(module, nn.Linear | nn.Conv2d):
        raise ModelError(
            f"layer '{names[index]}' is a {type(module).__name__}, not linear or convolutional"
        )
    seen: list[Tensor] = []
    found: Activation | None = None
    for x, _ in batches(data):
        if not seen:
            found = _checked_chain(model, x[:2], names, index)
        seen.append(watch(model, x, [names[index]])[0].inputs.cpu())
    if not seen:
        raise ModelError("there is no data to build a space on")
    found = found or activation_of(activation or nn.ReLU())
    if found is None:
        raise ModelError(f"{activation} is no activation")
    return NeuronInputs(_rows(module, torch.cat(seen), max_rows, seed), found)


def _checked_chain(model: nn.Module, x: Tensor, names: list[str], index: int) -> Activation | None:
    """Check that the layers run in order, once each; return the activation behind one."""
    leaves = [name for name, module in model.named_modules() if not list(module.children())]
    modules = dict(model.named_modules())
    steps = [step.name for step in watch(model, x, leaves)]
    ran = [name for name in steps if name in names]
    if ran != names:
        raise ModelError(f"the model runs its layers as {ran}, its weights are ordered {names}")
    for name in steps[steps.index(names[index]) + 1 :]:
        if name in names:
            break
        if (found := activation_of(modules[name])) is not None:
            return found
    return None


def _rows(module: nn.Linear | nn.Conv2d, inputs: Tensor, max_rows: int, seed: int) -> Tensor:
    if isinstance(module, nn.Linear):
        return _draw_rows(inputs.reshape(-1, inputs.shape[-1]), max_rows, seed)
    check_convolution(module)
    positions = patches_of(module, inputs[:1]).shape[1]
    chosen = _draw_rows(torch.arange(len(inputs) * positions), max_rows, seed)
    image, position = chosen // positions, chosen % positions
    parts = []
    for part in image_chunks(module, inputs):
        mine = (image >= part.start) & (image < part.stop)
        if bool(mine.any()):
            patches = patches_of(module, inputs[part])
            parts.append(patches[image[mine] - part.start, position[mine]])
    return torch.cat(parts)


def _draw_rows(inputs: Tensor, most: int, seed: int) -> Tensor:
    """Return at most so many rows, in their order, drawn without putting any back."""
    if len(inputs) <= most:
        return inputs
    generator = torch.Generator().manual_seed(seed % 2**63)
    return inputs[torch.randperm(len(inputs), generator=generator)[:most].sort().values]


def check_convolution(module: nn.Conv2d) -> None:
    """Refuse a convolution whose filters do not all see the same plain patches."""
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if module.groups != 1 or not plain:
        raise ModelError("only convolutions without groups and with plain zero padding are known")


def patches_of(module: nn.Conv2d, images: Tensor) -> Tensor:
    """Return the patches of images, shape (images, positions, weights of a filter)."""
    assert not isinstance(module.padding, str)
    patches: Tensor = F.unfold(
        images, module.kernel_size, module.dilation, module.padding, module.stride
    )
    return patches.transpose(1, 2)


def image_chunks(module: nn.Conv2d, images: Tensor) -> Iterator[slice]:
    """Yield parts of many images whose patches fit into memory together."""
    positions, width = patches_of(module, images[:1]).shape[1:]
    step = max(1, CHUNK_VALUES // (positions * width))
    for start in range(0, len(images), step):
        yield slice(start, start + step)


@dataclass(frozen=True, eq=False)
class Activation:
    """A non-decreasing function g applied to each neuron's output."""

    function: Callable[[Tensor], Tensor]
    # A constant with |g(a) - g(b)| <= lipschitz * |a - b|.
    lipschitz: float

    def slope(self, values: Tensor) -> Tensor:
        """Return g' at each value."""
        with torch.enable_grad():
            at = values.detach().requires_grad_()
            return torch.autograd.grad(self.function(at).sum(), at)[0]


# Lipschitz constants by the exact type; None where a parameter makes the function fall.
_KNOWN: dict[type[nn.Module], Callable[[Any], float | None]] = {
    nn.ReLU: lambda _: 1.0,
    nn.LeakyReLU: lambda m: max(1.0, m.negative_slope) if m.negative_slope >= 0 else None,
    nn.Identity: lambda _: 1.0,
    nn.Tanh: lambda _: 1.0,
    nn.Sigmoid: lambda _: 0.25,
    nn.ReLU6: lambda _: 1.0,
    nn.Hardtanh: lambda _: 1.0,
    nn.ELU: lambda m: max(1.0, m.alpha) if m.alpha >= 0 else None,
    # Where PyTorch goes over to the identity the function falls by exp(-threshold) / beta.
    nn.Softplus: lambda m: 1.0 if m.beta > 0 and m.threshold >= 15 else None,
}
# In PyTorch's file of activations, but of all neurons at once.
_JOINT = (nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.MultiheadAttention)


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation that a module computes, or None if it is no activation."""
    kind = type(module)
    lipschitz = _KNOWN[kind](module) if kind in _KNOWN else None
    if lipschitz is not None:
        function = copy.copy(module)
        function.inplace = False  # type: ignore[assignment]
        return Activation(function, lipschitz)
    if kind not in _KNOWN and (kind.__module__ != nn.ReLU.__module__ or kind in _JOINT):
        return None
    raise ModelError(
        f"activation: a neuron's deviation must be monotone along a ray, which is known of "
        f"{sorted(each.__name__ for each in _KNOWN)}, got {module}"
    )
