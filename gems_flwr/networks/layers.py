"""Networks as chains of weight layers: their arrays, other widths, frozen layers.

The server of layer-wise GEMS (2019, Section 3.2) knows a network only by its arrays. That is
enough for any chain of linear and convolutional layers, each of which feeds the next: a layer
is a matrix or kernel and the bias that follows it, its neurons are the rows, and the columns of
the next layer that belong to a neuron are its outgoing weights (one for a linear layer on a
linear layer, a kernel for a convolution, a block of pixels where a convolution is flattened).

A network with other arrays in between (batch normalisation) is refused, because a merged neuron
has no statistics of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gems_flwr.errors import ModelError
from gems_flwr.typing import Arrays

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class WeightLayer:
    """One layer of a network."""

    # Keys of its arrays.
    weight: str
    bias: str | None
    # Neurons, or filters of a convolution.
    width: int
    # Of one neuron's incoming weights: (inputs,), or a kernel's (channels, height, width).
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
    """Return a network's layers from the input to the output, the order of its arrays."""
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
    parts = arrays[above.weight].reshape(above.width, layer.width, -1)
    return np.moveaxis(parts, 1, 0).reshape(layer.width, -1)


def lowest_layers(arrays: Arrays, keys: Iterable[str]) -> int:
    """Return how many layers, from the input, some arrays are; 0 for what is no chain of layers."""
    known = set(keys)
    try:
        layers = weight_layers(arrays)
    except ValueError:
        return 0
    return sum(1 for _ in itertools.takewhile(lambda each: known >= {*each.keys}, layers))


def replace_layer(arrays: Arrays, index: int, rows: NDArray, *, seed: int) -> dict[str, NDArray]:
    """Return a network with other neurons in the hidden layer `index`, and a new layer above it.

    `rows` are as `neuron_rows` gives them. The weights above are drawn by the seed, uniform within
    one over the square root of the inputs, as in torch. The output layer starts from zero: above
    fixed neurons it is a convex problem, and a random start that all nodes share would survive
    their average undivided, while what each node learned counts one over their number.
    """
    layers = weight_layers(arrays)
    layer, above = layers[index], layers[index + 1]
    if rows.ndim != 2 or rows.shape[1] != layer.dimension or not len(rows):
        raise ModelError(f"rows: expected shape (neurons, {layer.dimension}), got {rows.shape}")
    width, size = len(rows), math.prod(layer.shape)
    shape = (above.width, width * (above.shape[0] // layer.width), *above.shape[1:])
    new = {layer.weight: rows[:, :size].reshape(width, *layer.shape)}
    if layer.bias is not None:
        new[layer.bias] = rows[:, size]
    if above is not layers[-1]:
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        new[above.weight] = np.random.default_rng(seed).uniform(-bound, bound, shape)
    else:
        new[above.weight] = np.zeros(shape)
        if above.bias is not None:
            new[above.bias] = np.zeros(above.width)
    typed = {k: np.ascontiguousarray(v, dtype=arrays[k].dtype) for k, v in new.items()}
    return {**arrays, **typed}


def resize_model(model: Model, arrays: Mapping[str, Any]) -> Model:
    """Give a model the widths of some arrays, and load them.

    Parameters
    ----------
    model : torch.nn.Module
        The architecture; changed in place. Linear and convolutional layers may differ in width,
        everything else must fit.
    arrays : ArrayRecord, or mapping from str to ndarray or tensor
        The weights, named as in the model's state dict.

    Examples
    --------
    >>> from torch import nn
    >>> from gems_flwr import resize_model
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> wider = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2))
    >>> sent = {key: array.numpy() for key, array in wider.state_dict().items()}
    >>> resize_model(model, sent)[0]
    Linear(in_features=4, out_features=12, bias=True)
    """
    arrays = {key: _as_numpy(array) for key, array in arrays.items()}
    state = model.state_dict()
    if state.keys() != arrays.keys():
        missing, surplus = (
            sorted(state.keys() - arrays.keys()),
            sorted(arrays.keys() - state.keys()),
        )
        raise ModelError(f"the arrays are not this model's: missing {missing}, surplus {surplus}")
    _check_ends(state, arrays)
    modules = dict(model.named_modules())
    for key, array in arrays.items():
        if tuple(state[key].shape) != array.shape:
            owner, _, attribute = key.rpartition(".")
            _resize(modules[owner], attribute, key, array.shape)
    # As `load_state_dict`, which is slower: it looks at every module's tables.
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            weight.copy_(torch.from_numpy(np.array(arrays[key])))
    return model


def freeze_lowest(model: nn.Module, count: int) -> None:
    """Keep the weights of the lowest `count` layers of a model out of training, in place."""
    if count == 0:
        return
    layers = weight_layers({key: _as_numpy(each) for key, each in model.state_dict().items()})
    if not 0 <= count < len(layers):
        raise ModelError(f"expected 0 to {len(layers) - 1} frozen layers, got {count}")
    frozen = {key for layer in layers[:count] for key in layer.keys}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen)


def _as_numpy(array: Any) -> NDArray:
    if isinstance(array, Tensor):
        array = array.detach().cpu()
    return np.asarray(array.numpy() if hasattr(array, "numpy") else array)


def _check_ends(state: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Refuse other inputs or outputs of the whole network: those come from the data."""
    keys = [key for key in state if state[key].ndim > 1]
    for key, axis, what in ((keys[0], 1, "inputs"), (keys[-1], 0, "outputs")) if keys else ():
        ours, theirs = state[key].shape[axis], arrays[key].shape[axis]
        if ours != theirs:
            raise ModelError(
                f"size mismatch: '{key}' has {theirs} {what}, this model's has {ours}; only the "
                "hidden layers of a network can have other widths"
            )


def _resize(module: nn.Module, attribute: str, key: str, shape: tuple[int, ...]) -> None:
    old = getattr(module, attribute)
    known = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    if not known or old.ndim != len(shape) or tuple(old.shape[2:]) != shape[2:]:
        raise ModelError(
            f"'{key}' has shape {shape}, this model's is {tuple(old.shape)}; only the widths of "
            "linear layers and of convolutions without groups can change"
        )
    fresh = torch.empty(shape, dtype=old.dtype, device=old.device)
    setattr(module, attribute, nn.Parameter(fresh))
    if attribute == "weight" and isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
    elif attribute == "weight" and isinstance(module, nn.Conv2d):
        module.out_channels, module.in_channels = shape[:2]
