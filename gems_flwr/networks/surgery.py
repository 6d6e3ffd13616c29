"""Changing torch models: other widths, frozen layers.

Layer by layer GEMS sends networks back whose hidden layers have other widths than those that the
user's code builds, and asks that the layers below stay as they are. This is what does both to a
model; in a train handler `freeze_layers` reads from the message how many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gems_flwr.errors import ModelError
from gems_flwr.networks.layers import weight_layers
from gems_flwr.typing import Arrays

Model = TypeVar("Model", bound=nn.Module)


def resize_model(model: Model, arrays: Mapping[str, Any]) -> Model:
    """Give a model the widths of some arrays, and load them.

    Parameters
    ----------
    model : torch.nn.Module
        The architecture; changed in place. Linear and convolutional layers may differ in width,
        everything else must fit.
    arrays : ArrayRecord, or mapping from str to ndarray or tensor
        The weights, named as in the model's state dict.

    Returns
    -------
    torch.nn.Module
        The model.

    Raises
    ------
    ModelError
        If the arrays do not belong to this architecture.

    Examples
    --------
    >>> import numpy as np
    >>> from torch import nn
    >>> from gems_flwr import resize_model
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> sent = {  # by the server, with 12 hidden neurons instead of 8
    ...     "0.weight": np.zeros((12, 4), np.float32),
    ...     "0.bias": np.zeros(12, np.float32),
    ...     "2.weight": np.zeros((2, 12), np.float32),
    ...     "2.bias": np.zeros(2, np.float32),
    ... }
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
        if tuple(state[key].shape) == array.shape:
            continue
        owner, _, attribute = key.rpartition(".")
        _resize(modules[owner], attribute, key, array.shape)
    model.load_state_dict({key: torch.from_numpy(np.array(a)) for key, a in arrays.items()})
    return model


def freeze_lowest(model: nn.Module, count: int) -> None:
    """Keep the weights of the lowest layers out of training.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place: the weights of the lowest `count` layers get no gradients.
    count : int
        How many; 0 freezes nothing.
    """
    if count == 0:
        return
    layers = weight_layers({key: value.numpy() for key, value in _plain_state(model).items()})
    if not 0 <= count < len(layers):
        raise ModelError(f"expected 0 to {len(layers) - 1} frozen layers, got {count}")
    frozen = {key for layer in layers[:count] for key in layer.keys}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen)


def start_afresh(model: nn.Module, other: nn.Module, seed: int) -> None:
    """Give the layers that are not frozen new initial weights.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place.
    other : torch.nn.Module
        A new model of this architecture, whose weights are taken where they fit.
    seed : int
        Source of weights of layers that have another width: uniform within one over the square
        root of the inputs, as in torch.
    """
    state = model.state_dict()
    generator = torch.Generator().manual_seed(seed % 2**63)
    fresh = dict(other.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            if fresh[name].shape == weight.shape:
                state[name].copy_(fresh[name])
            elif weight.ndim > 1:
                bound = weight[0].numel() ** -0.5
                drawn = torch.empty(weight.shape).uniform_(-bound, bound, generator=generator)
                state[name].copy_(drawn)
            else:
                state[name].zero_()


def _as_numpy(array: Any) -> NDArray:
    """Return an array of whatever kind: Flower's and torch's know how to become one of numpy's."""
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu()
    return np.asarray(array.numpy() if hasattr(array, "numpy") else array)


def _plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().cpu() for key, value in model.state_dict().items()}


def _check_ends(state: Mapping[str, torch.Tensor], arrays: Arrays) -> None:
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
