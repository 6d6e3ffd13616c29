"""How a linear layer becomes one flat vector, and back.

A space lives in R^d, a layer in a matrix of shape (classes, features) and a bias. One
order for the whole project: the weight row by row, then the bias, as in a torch state dict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gems_flwr.errors import ModelError, SpaceError


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


@dataclasses.dataclass(frozen=True)
class OutputLayer:
    """Which arrays of a model are its linear output layer.

    Parameters
    ----------
    weight, bias : str, str or None
        Keys of the arrays, of shape (outputs, features) and (outputs,).
    outputs, features : int
        Size of the layer; one output is a logistic model of two classes.
    """

    weight: str
    bias: str | None
    outputs: int
    features: int

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the layer's arrays."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def num_classes(self) -> int:
        """Classes told apart."""
        return max(2, self.outputs)

    @property
    def dimension(self) -> int:
        """Weights and biases together."""
        return self.outputs * self.features + (self.outputs if self.bias else 0)

    def scaled_in(self, arrays: Mapping[str, NDArray], scale: ArrayLike) -> NDArray[np.float64]:
        """Return a model's output layer for inputs that were divided by `scale`, bias last.

        Returns
        -------
        array of shape (num_classes, features + 1)
            A single output is the difference of two rows, of which each has half.
        """
        weight = np.asarray(arrays[self.weight], dtype=np.float64) * np.asarray(scale)
        bias = np.asarray(arrays[self.bias], dtype=np.float64) if self.bias else 0.0
        rows = np.column_stack([weight, np.broadcast_to(bias, self.outputs)])
        return np.concatenate([-rows / 2, rows / 2]) if self.outputs == 1 else rows

    def replace_in(self, arrays: Mapping[str, NDArray], point: ArrayLike) -> dict[str, NDArray]:
        """Return a model's arrays with the output layer replaced by a flat one.

        A layer of two classes (from a cone) becomes the difference of its rows where the model
        has a single output.
        """
        vector = np.asarray(point, dtype=np.float64).reshape(-1)
        if vector.size == self.dimension:
            split = self.outputs * self.features
            weight, bias = vector[:split].reshape(self.outputs, self.features), vector[split:]
        else:
            weight, bias = unflatten_linear(vector, self.num_classes, self.features)
            if self.outputs == 1:
                weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
            if self.bias is None and np.abs(bias).max() > 0:
                raise SpaceError("bias", "a layer with a bias, for the solution has one", "none")
        out = dict(arrays)
        out[self.weight] = weight.astype(arrays[self.weight].dtype)
        if self.bias:
            out[self.bias] = bias.astype(arrays[self.bias].dtype)
        return out


def find_output_layer(arrays: Mapping[str, NDArray], name: str | None = None) -> OutputLayer:
    """Find the linear output layer among a model's arrays: the last matrix, and its bias.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        The model, in the order of its layers, as in a torch state dict.
    name : str, optional
        The layer's name in a torch module, where the last matrix is not the one; empty if the
        module is that layer.

    Raises
    ------
    ModelError
        If there is no such layer.
    """
    keys = list(arrays)
    if name is not None:
        # A module that is the layer itself has no name.
        named = f"{name}.weight" if name else "weight"
        candidates = [key for key in keys if key == named]
    else:
        candidates = [key for key in keys if np.ndim(arrays[key]) == 2]
    if not candidates or np.ndim(arrays[candidates[-1]]) != 2:
        wanted = "a matrix among the arrays" if name is None else f"a matrix '{named}'"
        raise ModelError(f"no linear output layer: expected {wanted}, got {keys}")
    weight = candidates[-1]
    outputs, features = np.shape(arrays[weight])
    # A bias follows its matrix, or has the matching name.
    following = keys[keys.index(weight) + 1 :][:1]
    namesakes = [key for key in keys if key == weight.removesuffix("weight") + "bias"]
    fits = [key for key in (namesakes or following) if np.shape(arrays[key]) == (outputs,)]
    return OutputLayer(weight, fits[0] if fits else None, outputs, features)
