"""Reading a model file that anybody may have written, and putting it into a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import nn

from gems_flwr.disk.faults import disk_faults
from gems_flwr.errors import ModelError
from gems_flwr.networks.surgery import resize_model
from gems_flwr.typing import Arrays


def read_model_file(path: Path) -> dict[str, NDArray]:
    """Return the arrays of a safetensors file.

    Raises
    ------
    ModelError
        If it is no such file, or holds nothing, or something that is no finite number.
    DiskError
        If it cannot be read.
    """
    with disk_faults(f"read {path}"):
        path.open("rb").close()
    try:
        with safe_open(str(path), framework="numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{path} is not a safetensors file that can be read: {reason}") from error
    try:
        check_arrays(arrays)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return arrays


def check_arrays(arrays: Arrays) -> None:
    """Refuse arrays that are no model.

    Raises
    ------
    ModelError
        Names the array.
    """
    if not arrays:
        raise ModelError("there are no arrays in it")
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub":
            raise ModelError(f"array '{name}' is of type {array.dtype}, expected numbers")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            count = int((~np.isfinite(array)).sum())
            raise ModelError(f"array '{name}' has {count} values that are not finite numbers")


def filled(model: nn.Module, arrays: Mapping[str, Any]) -> nn.Module:
    """Return a network with the weights of some arrays, at the widths that these have.

    Raises
    ------
    ModelError
        If the arrays do not belong to it.
    """
    state = model.state_dict()
    for name, array in arrays.items():
        if name in state and state[name].is_floating_point() != (array.dtype.kind == "f"):
            raise ModelError(
                f"array '{name}' is of type {array.dtype}, the model's is {state[name].dtype}"
            )
    return resize_model(model.cpu(), arrays).float()


def linear_model(arrays: Arrays) -> nn.Module | None:
    """Return a linear layer with the weights of some arrays, if that is all that they are.

    One array of two axes, and at most one more with a number for each of its rows, whatever they
    are called: what `python -m gems_flwr aggregate` writes, and Flower's scikit-learn examples.
    """
    weights = [array for array in arrays.values() if array.ndim == 2]
    biases = [array for array in arrays.values() if array.ndim == 1]
    if len(weights) != 1 or len(biases) != len(arrays) - 1 or len(biases) > 1:
        return None
    [weight] = weights
    if any(array.dtype.kind != "f" for array in arrays.values()):
        return None
    if 0 in weight.shape or any(len(bias) != len(weight) for bias in biases):
        return None
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.array(weight)))
        layer.bias.zero_()
        for bias in biases:
            layer.bias.copy_(torch.from_numpy(np.array(bias)))
    return nn.Sequential(nn.Flatten(), layer)
