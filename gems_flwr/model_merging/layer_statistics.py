"""What a node tells of itself besides its model, so that the model can be merged with others.

Per layer, with a the layer's input (and a one for the bias) and g the gradient of the
log-likelihood in the layer's output before the activation, all as means over the node's samples:

==============  ==========================  ==========================
``inputs``      E[a aᵀ]                     regmean, kfac, fedfisher_kfac
``gradients``   E[g gᵀ]                     kfac, fedfisher_kfac
``fisher``      E[g² (a²)ᵀ], entry-wise     fisher, fedfisher_diagonal
==============  ==========================  ==========================

Of a convolution a is a patch and g the gradient in a pixel; `layer_moments` says how positions add
up. A filter's weights are in the order of its kernel (channel, row, column), then the bias.

Means, not sums: how much a node counts is said by its number of examples, which the operator can
limit (`max_examples`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import ModelError
from gems_flwr.networks.layers import WeightLayer, weight_layers
from gems_flwr.typing import Arrays

Method = Literal["regmean", "fisher", "kfac", "matching", "fedfisher_diagonal", "fedfisher_kfac"]
Kind = Literal["inputs", "gradients", "fisher"]
# By the name of a layer's weight, then by kind.
Statistics = Mapping[str, Mapping[Kind, NDArray]]

SYMMETRIC: tuple[Kind, ...] = ("inputs", "gradients")
NEEDED: dict[Method, tuple[Kind, ...]] = {
    "regmean": ("inputs",),
    "fisher": ("fisher",),
    "kfac": ("inputs", "gradients"),
    "matching": (),
    "fedfisher_diagonal": ("fisher",),
    "fedfisher_kfac": ("inputs", "gradients"),
}
# What rounding to single precision may take from the smallest eigenvalue, relative to the trace.
_ROUNDING = 1e-6


def check_layers(arrays: Arrays) -> tuple[WeightLayer, ...]:
    """Return a network's layers, all of which must be linear or convolutions of images.

    Raises
    ------
    ModelError
        Names the layer that is neither.
    """
    layers = weight_layers(arrays)
    for layer in layers:
        if len(layer.shape) not in (1, 3):
            raise ModelError(
                f"layer '{layer.name}' is neither linear nor a convolution of images (its neurons "
                f"have weights of shape {layer.shape}); only matching takes it"
            )
    return layers


def statistics_shapes(method: Method, arrays: Arrays) -> dict[str, dict[Kind, tuple[int, int]]]:
    """Return the shape of every statistic that a method needs for a network."""
    if not NEEDED[method]:
        return {}
    shapes: dict[str, dict[Kind, tuple[int, int]]] = {}
    for layer in check_layers(arrays):
        known: dict[Kind, tuple[int, int]] = {
            "inputs": (layer.dimension, layer.dimension),
            "gradients": (layer.width, layer.width),
            "fisher": (layer.width, layer.dimension),
        }
        shapes[layer.weight] = {kind: known[kind] for kind in NEEDED[method]}
    return shapes


def check_statistics(statistics: Statistics, method: Method, arrays: Arrays) -> None:
    """Refuse statistics that no data can have.

    Parameters
    ----------
    statistics : mapping
        By weight and kind.
    method : one of `NEEDED`
        What they are for.
    arrays : mapping from str to ndarray
        A network of the right shapes.

    Raises
    ------
    ValueError
        Names the layer and the statistic, what was expected and what came.
    """
    shapes = statistics_shapes(method, arrays)
    if statistics.keys() != shapes.keys():
        raise ValueError(f"statistics: expected those of {list(shapes)}, got {list(statistics)}")
    for weight, kinds in shapes.items():
        if statistics[weight].keys() != kinds.keys():
            got = sorted(statistics[weight])
            raise ValueError(f"statistics of '{weight}': expected {sorted(kinds)}, got {got}")
        for kind, shape in kinds.items():
            _check_values(f"'{kind}' of '{weight}'", kind, statistics[weight][kind], shape)


def _check_values(what: str, kind: Kind, array: NDArray, shape: tuple[int, int]) -> None:
    if array.shape != shape:
        raise ValueError(f"{what}: expected shape {shape}, got {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{what}: expected finite values, got NaN or infinity")
    squares = array if kind == "fisher" else np.diagonal(array)
    if squares.min() < 0:
        raise ValueError(f"{what}: mean squares must not be negative, got {squares.min():g}")
    if kind not in SYMMETRIC:
        return
    size = float(np.trace(array))
    if not np.allclose(array, array.T, rtol=0, atol=_ROUNDING * size):
        raise ValueError(f"{what}: a second moment is symmetric, this one is not")
    slack = _ROUNDING * size + np.finfo(np.float32).tiny
    try:
        np.linalg.cholesky(array.astype(np.float64) + slack * np.eye(len(array)))
    except np.linalg.LinAlgError:
        raise ValueError(
            f"{what}: expected the second moment of some data, got a negative variance"
        ) from None
