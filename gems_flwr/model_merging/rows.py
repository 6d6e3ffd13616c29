"""Layers as rows of neurons, in double precision, there and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.networks.layers import WeightLayer, neuron_rows
from gems_flwr.typing import Arrays, Float


def rows_of(models: Sequence[Arrays], layer: WeightLayer) -> list[Float]:
    """Return one layer of every model: a row per neuron, incoming weights and then the bias."""
    return [neuron_rows(model, layer).astype(np.float64) for model in models]


def with_rows(
    template: Arrays, layers: Sequence[WeightLayer], rows: Mapping[str, NDArray]
) -> dict[str, NDArray]:
    """Return a network with other neurons, by the name of each layer's weight."""
    merged = dict(template)
    for layer in layers:
        new, size = rows[layer.weight], math.prod(layer.shape)
        old = template[layer.weight]
        merged[layer.weight] = new[:, :size].reshape(old.shape).astype(old.dtype)
        if layer.bias is not None:
            merged[layer.bias] = new[:, size].astype(template[layer.bias].dtype)
    return merged


def shares(weights: Sequence[float], models: Sequence[object]) -> list[float]:
    """Return weights that sum to one.

    Raises
    ------
    ValueError
        If there is no model, or not one positive weight for each.
    """
    if not models or len(weights) != len(models):
        raise ValueError(f"expected a weight for each model, got {len(weights)} of {len(models)}")
    total = float(sum(weights))
    if not (math.isfinite(total) and min(weights) > 0):
        raise ValueError(f"weights must be above 0 and finite, got {list(weights)}")
    return [weight / total for weight in weights]


def mean_rows(rows: Sequence[Float], parts: Sequence[float]) -> Float:
    """Return the mean of one layer over the models."""
    return np.asarray(sum(part * each for part, each in zip(parts, rows, strict=True)))
