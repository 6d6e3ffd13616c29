"""The weight layers of a network, seen from its arrays alone, and their replacement.

The server of layer-wise GEMS (2019, Section 3.2) knows a network only by its arrays. That is
enough for any chain of linear and convolutional layers, each of which feeds the next: a layer
is a matrix or kernel and the bias that follows it, its neurons are the rows, and the columns of
the next layer that belong to a neuron are its outgoing weights (one for a linear layer on a
linear layer, a kernel for a convolution, a block of pixels where a convolution is flattened).

Decided here: a network with other arrays in between (batch normalisation) is refused, because a
merged neuron has no statistics of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import ModelError
from gems_flwr.typing import Arrays


@dataclasses.dataclass(frozen=True)
class WeightLayer:
    """One layer of a network.

    Parameters
    ----------
    weight, bias : str, str or None
        Keys of its arrays.
    width : int
        Neurons, or filters of a convolution.
    shape : tuple of int
        What one neuron's incoming weights look like: ``(inputs,)``, or a kernel's
        ``(channels, height, width)``.
    """

    weight: str
    bias: str | None
    width: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The layer's name in a torch module; empty where it is the module itself."""
        return "" if self.weight == "weight" else self.weight.removesuffix(".weight")

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the layer's arrays."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def dimension(self) -> int:
        """Incoming weights of one neuron, and its bias."""
        return math.prod(self.shape) + (0 if self.bias is None else 1)


def weight_layers(arrays: Arrays) -> tuple[WeightLayer, ...]:
    """Return a network's layers from the input to the output.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        The model in the order of its layers, as in a torch state dict.

    Raises
    ------
    ModelError
        If there is no layer, an array belongs to none, or a layer does not fit the one before.
    """
    layers: list[WeightLayer] = []
    used: set[str] = set()
    for key, array in arrays.items():
        if array.ndim < 2:
            continue
        bias = key.removesuffix("weight") + "bias"
        has_bias = key.endswith("weight") and np.shape(arrays.get(bias, ())) == array.shape[:1]
        layer = WeightLayer(key, bias if has_bias else None, array.shape[0], array.shape[1:])
        layers.append(layer)
        used.update(layer.keys)
    if not layers:
        raise ModelError(f"no layers: expected matrices or kernels among {list(arrays)}")
    extra = sorted(arrays.keys() - used)
    if extra:
        raise ModelError(
            f"{extra} belong to no linear or convolutional layer; layer by layer GEMS needs a "
            "chain of those, without normalisation in between"
        )
    for below, above in itertools.pairwise(layers):
        if above.shape[0] % below.width:
            raise ModelError(
                f"'{above.weight}' has {above.shape[0]} inputs, which does not fit the "
                f"{below.width} neurons of '{below.weight}'; layers must feed each other in order"
            )
    return tuple(layers)


def neuron_rows(arrays: Arrays, layer: WeightLayer) -> NDArray:
    """Return a layer's neurons as rows: incoming weights, then the bias, shape (width, d)."""
    rows = arrays[layer.weight].reshape(layer.width, -1)
    return rows if layer.bias is None else np.column_stack([rows, arrays[layer.bias]])


def outgoing_rows(arrays: Arrays, layer: WeightLayer, above: WeightLayer) -> NDArray:
    """Return what each neuron of a layer feeds to the layer above, shape (width, any)."""
    weight = arrays[above.weight]
    parts = weight.reshape(above.width, layer.width, -1)
    return np.moveaxis(parts, 1, 0).reshape(layer.width, -1)


def layers_below_output(arrays: Arrays) -> int:
    """Return how many layers are below the output layer; 0 for what is no chain of layers."""
    try:
        return len(weight_layers(arrays)) - 1
    except ValueError:
        return 0


def replace_layer(
    arrays: Arrays,
    index: int,
    rows: NDArray,
    *,
    outgoing: NDArray | None = None,
    seed: int,
) -> dict[str, NDArray]:
    """Return a network with other neurons in one layer, and the layer above adapted.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        The network.
    index : int
        Which layer, from 0; not the last.
    rows : array of shape (new width, d)
        The new neurons, as `neuron_rows` gives them.
    outgoing : array of shape (new width, any), optional
        What they feed to the layer above, as `outgoing_rows` gives it. Left out, the layer
        above starts anew: a hidden layer from random weights, uniform within one over the
        square root of its inputs, as in torch; the output layer from zero.
    seed : int
        Source of random weights.

    Notes
    -----
    The output layer above fixed neurons is a convex problem, which needs no random start, and a
    random start that all nodes share would survive their average undivided, while what each node
    learned counts one over their number.
    """
    layers = weight_layers(arrays)
    layer, above = layers[index], layers[index + 1]
    if rows.ndim != 2 or rows.shape[1] != layer.dimension or not len(rows):
        raise ModelError(f"rows: expected shape (neurons, {layer.dimension}), got {rows.shape}")
    width, size = len(rows), math.prod(layer.shape)
    old = arrays[above.weight]
    block = (above.shape[0] // layer.width, *above.shape[1:])
    shape = (above.width, width * block[0], *block[1:])
    if outgoing is None and above is layers[-1]:
        new = np.zeros(shape)
    elif outgoing is None:
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        new = np.random.default_rng(seed).uniform(-bound, bound, shape)
    else:
        parts = outgoing.reshape(width, above.width, -1)
        new = np.moveaxis(parts, 0, 1).reshape(shape)
    out = dict(arrays)
    out[layer.weight] = _like(rows[:, :size].reshape(width, *layer.shape), arrays[layer.weight])
    if layer.bias is not None:
        out[layer.bias] = _like(rows[:, size], arrays[layer.bias])
    out[above.weight] = _like(new, old)
    if outgoing is None and above is layers[-1] and above.bias is not None:
        out[above.bias] = np.zeros_like(arrays[above.bias])
    return out


def _like(values: NDArray, array: NDArray) -> NDArray:
    return np.ascontiguousarray(values, dtype=array.dtype)
