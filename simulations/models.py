"""The experiments' models, as plain `torch.nn.Sequential` networks that return logits, or a number.

Every builder takes ``input_shape``, the shape of one example (models without convolutions flatten
images), and ``classes``, the number of outputs, at least 2, or 0 for a number, which is one output.
What is out of range is a ValueError. Models take batches shaped ``(n, *input_shape)``. The last
module is always the linear output layer, which GEMS treats differently from the layers below.
Dropout modules stay in place at rate 0, so that the names of the weights do not depend on the rate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

from gems_flwr.lifts import SMALLEST_SIDE, RandomFilters, RandomFourier


def logistic(*, input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Build multinomial logistic regression."""
    shape = _checked(input_shape, classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes or 1))


def mlp(
    *,
    input_shape: Sequence[int],
    classes: int,
    hidden: Sequence[int] = (50,),
    dropout: float = 0.5,
    initial: str = "glorot",
) -> nn.Sequential:
    """Build a feed-forward network with ReLU, and dropout after each hidden layer.

    The defaults are the GEMS paper's network for MNIST and HAM10000 (Appendix B.4); for CIFAR-10
    the paper has 100 hidden neurons.

    Parameters
    ----------
    input_shape, classes
        See the module.
    hidden : sequence of int
        Number of neurons of each hidden layer, at least 1 each; none makes it `logistic`.
    dropout : float
        Rate, 0 ≤ dropout < 1.
    initial : str
        Initial weights: ``"glorot"``, uniform by inputs and outputs with biases of zero, as in
        the papers, or ``"torch"``, torch's own, which are less than half as large here and give
        hidden neurons that are more alike.
    """
    shape = _checked(input_shape, classes)
    rate = _checked_rate("dropout", dropout)
    if initial not in ("glorot", "torch"):
        raise ValueError(f"model.initial must be glorot or torch, got {initial!r}")
    widths = [math.prod(shape), *hidden]
    if any(not isinstance(width, int) or width < 1 for width in widths):
        raise ValueError(f"model.hidden must be whole numbers of at least 1, got {list(hidden)}")
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(rate)]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], classes or 1))
    return _glorot(model) if initial == "glorot" else model


def cnn(
    *,
    input_shape: Sequence[int],
    classes: int,
    conv_dropout: float = 0.25,
    dropout: float = 0.5,
) -> nn.Sequential:
    """Build the convolutional network of the dynamic-averaging paper.

    Two 3×3 convolutions (32 and 64 filters), 2×2 max-pooling, a dense layer of 128 neurons:
    1,199,882 weights for MNIST. Both rates of dropout are in [0, 1); images have at least 6×6
    pixels.
    """
    channels, height, width = _checked_image("cnn", input_shape, classes, smallest=6)
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(_checked_rate("conv_dropout", conv_dropout)),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        nn.Dropout(_checked_rate("dropout", dropout)),
        nn.Linear(128, classes or 1),
    )


def lenet(*, input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Build LeNet-5 with ReLU and max-pooling: 61,706 weights for MNIST, at least 12×12 pixels.

    The first convolution is padded by 2, which makes 28×28 input what LeNet's 32×32 was.
    """
    channels, height, width = _checked_image("lenet", input_shape, classes, smallest=12)
    return nn.Sequential(
        nn.Conv2d(channels, 6, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes or 1),
    )


def random_filters(
    *,
    input_shape: Sequence[int],
    classes: int,
    filters: int = 64,
    kernel: int | None = None,
    grid: int = 4,
    lift_seed: int = 0,
) -> nn.Sequential:
    """Build a linear layer on random filters, whose weights are made from a seed and never travel.

    Options are those of `gems_flwr.RandomFilters`; ``lift_seed``, the source of the filters, is not
    the run's seed, since all seeds have the same lift.
    """
    shape = _checked_image("random_filters", input_shape, classes, smallest=SMALLEST_SIDE)
    lift = RandomFilters(shape, filters, kernel, grid, lift_seed)
    return nn.Sequential(lift, nn.Linear(lift.features, classes or 1))


def random_fourier(
    *,
    input_shape: Sequence[int],
    classes: int,
    outputs: int = 1000,
    bandwidth: float = 0.7,
    keep_inputs: bool = False,
    lift_seed: int = 0,
) -> nn.Sequential:
    """Build a linear layer on random Fourier features, whose weights are made from a seed.

    Options are those of `gems_flwr.RandomFourier`; ``lift_seed`` is not the run's seed.
    """
    inputs = math.prod(_checked(input_shape, classes))
    lift = RandomFourier(inputs, outputs, bandwidth, keep_inputs, lift_seed)
    return nn.Sequential(nn.Flatten(), lift, nn.Linear(lift.features, classes or 1))


# --- networks that steer --------------------------------------------------------------------------

# Filters, kernel and stride of each convolution.
_TABLE_6 = ((24, 5, 2), (36, 5, 2), (48, 5, 2), (64, 3, 1), (64, 3, 1))
_SMALL = ((8, 5, 3), (16, 5, 2), (24, 3, 2))


class Centred(nn.Module):
    """Pixels from 0 … 1 to -1 … 1; nothing to learn and nothing to send."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the pixels around zero."""
        return pixels * 2 - 1


def pilotnet(*, input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Build the network of Kamp et al. 2018, Table 6, for at least 61×61 pixels from 0 to 1.

    Table 6 is PilotNet (Bojarski et al. 2016): five convolutions, dense layers of 100, 50, 10 and 1
    neurons. At the paper's 68×320 colour pixels that is 348,219 weights, at 64×64 grey pixels
    142,219. The table says neither activations nor initial weights nor normalisation. Decided here:
    ReLU after every layer but the last, Keras' default initial weights (Glorot's, biases of zero),
    and pixels from -1 to 1, as in Bojarski et al.; the output is not squashed.
    """
    return _steering("pilotnet", input_shape, classes, _TABLE_6, (100, 50, 10))


def pilotnet_small(*, input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Build a network of the same kind for two cores: 14,189 weights at 64×64 grey pixels."""
    return _steering("pilotnet_small", input_shape, classes, _SMALL, (32, 10))


def _steering(
    name: str,
    input_shape: Sequence[int],
    classes: int,
    convolutions: Sequence[tuple[int, int, int]],
    dense: Sequence[int],
) -> nn.Sequential:
    # As many pixels as leave one place after the convolutions.
    smallest = 1
    for _, kernel, stride in reversed(convolutions):
        smallest = (smallest - 1) * stride + kernel
    channels, height, width = _checked_image(name, input_shape, classes, smallest=smallest)
    layers: list[nn.Module] = [Centred()]
    for filters, kernel, stride in convolutions:
        layers += [nn.Conv2d(channels, filters, kernel, stride), nn.ReLU()]
        channels = filters
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    layers.append(nn.Flatten())
    for inputs, outputs in itertools.pairwise([channels * height * width, *dense]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return _glorot(nn.Sequential(*layers, nn.Linear(dense[-1], classes or 1)))


# --- checks and initial weights -------------------------------------------------------------------


def _glorot(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return model


def _checked(input_shape: Sequence[int], classes: int) -> tuple[int, ...]:
    shape = tuple(input_shape)
    if not shape or any(not isinstance(length, int) or length < 1 for length in shape):
        raise ValueError(f"input_shape must be whole numbers of at least 1, got {shape}")
    if classes < 0 or classes == 1:
        raise ValueError(f"classes must be at least 2, or 0 for a number, got {classes}")
    return shape


def _checked_image(
    model: str, input_shape: Sequence[int], classes: int, *, smallest: int
) -> tuple[int, int, int]:
    shape = _checked(input_shape, classes)
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ValueError(
            f"model={model} needs images shaped (channels, height, width) of at least "
            f"{smallest}×{smallest} pixels, got {shape}; model=logistic and model=mlp take any "
            f"shape"
        )
    return shape[0], shape[1], shape[2]


def _checked_rate(option: str, rate: float) -> float:
    if not 0 <= rate < 1:
        raise ValueError(f"model.{option} must be in [0, 1), got {rate}")
    return rate
