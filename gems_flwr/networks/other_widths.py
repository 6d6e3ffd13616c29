"""Does a network still run if its hidden layers have other widths? Tried before it matters.

A merged layer may have another width than the app's own. A `forward` with sizes written into it
(``x.view(-1, 400)``) cannot take that, and neither can code that loads arrays into the module as
it is. Both show at once if the network is made one neuron wider everywhere.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gems_flwr.errors import ModelError
from gems_flwr.networks.inputs import on_device_of
from gems_flwr.networks.layers import replace_layer, weight_layers
from gems_flwr.networks.surgery import resize_model
from gems_flwr.typing import Arrays


def widened(arrays: Arrays, seed: int = 0) -> dict[str, NDArray]:
    """Return a network with one more neuron in every hidden layer, and random weights below.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        A chain of layers; see `weight_layers`.
    seed : int
        Source of the weights.
    """
    rng, out = np.random.default_rng(seed), dict(arrays)
    for index in range(len(weight_layers(arrays)) - 1):
        layer = weight_layers(out)[index]
        rows = rng.normal(size=(layer.width + 1, layer.dimension))
        out = replace_layer(out, index, rows, seed=seed)
    return out


def try_other_widths(model: nn.Module, x: Tensor) -> None:
    """Run a model at other widths on one batch.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place; not to be used afterwards.
    x : tensor
        A batch of inputs.

    Raises
    ------
    ModelError
        If it does not run, or does not give an output per sample. The message begins with what to
        do.
    """
    arrays = {key: value.detach().cpu().numpy() for key, value in model.state_dict().items()}
    wider = resize_model(model, widened(arrays)).eval()
    try:
        with torch.no_grad():
            outputs = wider(on_device_of(wider, x))
        fault = "" if len(outputs) == len(x) else f"{len(x)} samples gave {len(outputs)} outputs"
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        raise ModelError(
            'keep the app\'s widths (max_hidden="same"), or write no sizes into forward (for '
            f"example torch.flatten(x, 1)): {type(model).__name__} does not run at other widths: "
            f"{fault}"
        )
