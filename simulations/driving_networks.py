"""Networks that steer: the one of Kamp et al. 2018, Table 6, at any image size, and a small one.

Table 6 is PilotNet (Bojarski et al. 2016) behind a Keras printout: three 5×5 convolutions with
stride 2 (24, 36, 48 filters), two 3×3 ones (64, 64), dense layers of 100, 50, 10 and 1 neurons.
At the paper's 68×320 colour pixels that is 348,219 weights, 211,300 of them in the first dense
layer; at 64×64 grey pixels the last convolution has a single place left, so that layer has 6,500,
and the network 142,219.

The table says neither activations nor initial weights nor normalisation. Decided here: ReLU after
every layer but the last, Keras' default initial weights (Glorot's, biases of zero), and pixels from
-1 to 1, which is the "hard-coded" normalisation of Bojarski et al.; the output is not squashed.
There is no batch norm and no dropout, so no buffers: ``backend=lockstep`` takes both networks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from simulations.models import checked_image, outputs_of

# Filters, kernel and stride of each convolution.
_TABLE_6 = ((24, 5, 2), (36, 5, 2), (48, 5, 2), (64, 3, 1), (64, 3, 1))
_SMALL = ((8, 5, 3), (16, 5, 2), (24, 3, 2))


class Centred(nn.Module):
    """Pixels from 0 … 1 to -1 … 1; nothing to learn and nothing to send."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the pixels around zero."""
        return pixels * 2 - 1


def pilotnet(*, input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Build the network of Table 6.

    Parameters
    ----------
    input_shape : sequence of int
        ``(channels, height, width)``, at least 61×61 pixels from 0 to 1.
    classes : int
        0 for a number, one output; or number of classes, at least 2.

    Raises
    ------
    ValueError
        If the input is no image or too small.
    """
    return _network("pilotnet", input_shape, classes, _TABLE_6, (100, 50, 10))


def pilotnet_small(*, input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Build a network of the same kind for two cores: 14,189 weights at 64×64 grey pixels.

    Parameters
    ----------
    input_shape : sequence of int
        ``(channels, height, width)``, at least 29×29 pixels from 0 to 1.
    classes : int
        0 for a number, one output; or number of classes, at least 2.

    Raises
    ------
    ValueError
        If the input is no image or too small.
    """
    return _network("pilotnet_small", input_shape, classes, _SMALL, (32, 10))


def smallest_side(convolutions: Sequence[tuple[int, int, int]]) -> int:
    """Return the pixels that are needed for one place to be left after the convolutions."""
    side = 1
    for _, kernel, stride in reversed(convolutions):
        side = (side - 1) * stride + kernel
    return side


def _network(
    name: str,
    input_shape: Sequence[int],
    classes: int,
    convolutions: Sequence[tuple[int, int, int]],
    dense: Sequence[int],
) -> nn.Sequential:
    smallest = smallest_side(convolutions)
    channels, height, width = checked_image(name, input_shape, classes, smallest=smallest)
    layers: list[nn.Module] = [Centred()]
    for filters, kernel, stride in convolutions:
        layers += [nn.Conv2d(channels, filters, kernel, stride), nn.ReLU()]
        channels = filters
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    layers.append(nn.Flatten())
    inputs = channels * height * width
    for outputs in dense:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    layers.append(nn.Linear(inputs, outputs_of(classes)))
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)
