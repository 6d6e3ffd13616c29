"""How a linear layer becomes one flat vector, and back.

A space lives in R^d, a layer in a matrix of shape (classes, features) and a bias. One
order for the whole project: the weight row by row, then the bias, as in a torch state dict.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gems_flwr.spaces.errors import SpaceError


def flatten_linear(weight: ArrayLike, bias: ArrayLike) -> NDArray[np.float64]:
    """Return the flat vector of a linear layer.

    Parameters
    ----------
    weight : array of shape (classes, features)
        One row per class.
    bias : array of shape (classes,)
        One number per class.
    """
    matrix = np.asarray(weight, dtype=np.float64)
    offset = np.asarray(bias, dtype=np.float64)
    if matrix.ndim != 2 or offset.shape != matrix.shape[:1]:
        raise SpaceError(
            "weight, bias", "shapes (C, D) and (C,)", f"{matrix.shape} and {offset.shape}"
        )
    return np.concatenate([matrix.reshape(-1), offset])


def unflatten_linear(
    w: ArrayLike, num_classes: int, num_features: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weight and bias of the layer that `flatten_linear` made flat."""
    vector = np.asarray(w, dtype=np.float64).reshape(-1)
    size = num_classes * (num_features + 1)
    if vector.size != size:
        raise SpaceError("w", f"{size} values ({num_classes} x ({num_features} + 1))", vector.size)
    split = num_classes * num_features
    return vector[:split].reshape(num_classes, num_features), vector[split:]
