"""What a chain of linear layers makes of a hidden layer's outputs.

A neuron's loss-based ball (`gems_flwr.radii.neuron_loss`) needs the network above it, run on many
changed inputs at once. For linear layers that is a few products; a convolution would need all its
patches anew for every point, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gems_flwr.errors import ModelError
from gems_flwr.networks.hidden import activation_behind
from gems_flwr.networks.layers import weight_layers
from gems_flwr.networks.surgery import resize_model
from gems_flwr.radii.activations import Activation
from gems_flwr.typing import Arrays

Step = tuple[Activation, Tensor, Tensor | None]


def finish_network(
    model: nn.Module,
    arrays: Arrays,
    index: int,
    sample: Tensor,
    *,
    activation: nn.Module | None = None,
    device: str | torch.device = "cpu",
) -> Callable[[Tensor], Tensor] | None:
    """Return what turns the sums in the layer above a hidden one into logits.

    None if the layer above is the output layer: then they are the logits.

    Parameters
    ----------
    model : torch.nn.Module
        The architecture; its widths are made those of the arrays.
    arrays : mapping from str to ndarray
        The network.
    index : int
        The hidden layer, from 0.
    sample : tensor
        One or two inputs, on which the model's order is looked at.
    activation : torch.nn.Module, optional
        What follows a layer where no module shows it; ReLU by default.
    device : str or torch.device
        Where the result computes.

    Raises
    ------
    ModelError
        If the layer, or one above it, is a convolution.
    """
    model = resize_model(model, arrays).eval()
    layers = weight_layers(arrays)
    for layer in layers[index:]:
        if len(layer.shape) != 1:
            raise ModelError(
                f"'{layer.weight}' is a convolution: the loss of a moved neuron is for linear "
                "layers; measure='absolute' or 'relative' goes by the neuron's own output"
            )
    if layers[index + 1].shape[0] != layers[index].width:
        raise ModelError(f"'{layers[index + 1].weight}' has several inputs for each neuron")
    steps: list[Step] = []
    for position in range(index + 1, len(layers) - 1):
        behind = activation_behind(model, sample, arrays, position, activation)
        above = layers[position + 1]
        weight = torch.from_numpy(arrays[above.weight].copy()).float().to(device)
        bias = None if above.bias is None else torch.from_numpy(arrays[above.bias].copy())
        steps.append((behind, weight, None if bias is None else bias.float().to(device)))
    return _Finish(steps) if steps else None


class _Finish:
    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    def __call__(self, sums: Tensor) -> Tensor:
        for activation, weight, bias in self.steps:
            sums = nn.functional.linear(
                activation.function(sums), weight.to(sums), None if bias is None else bias.to(sums)
            )
        return sums
