"""Merging by the Fisher diagonal (Matena & Raffel 2022, Fisher-Weighted Averaging).

Each model stands for a Gaussian posterior around it whose precision is its Fisher diagonal; the
most likely weights under all of them are Σ n_k F_k w_k / Σ n_k F_k, number by number.

As in the authors' code F is at least 1e-6, so a weight on which no node's prediction depends gets
its plain mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.model_merging.layer_statistics import Statistics, check_layers
from gems_flwr.model_merging.rows import mean_rows, rows_of, shares, with_rows
from gems_flwr.typing import Arrays

FLOOR = 1e-6


def merge_by_fisher(
    models: Sequence[Arrays],
    statistics: Sequence[Statistics],
    weights: Sequence[float],
    *,
    floor: float = FLOOR,
) -> dict[str, NDArray]:
    """Merge networks weight by weight.

    Parameters
    ----------
    models : sequence of mappings from str to ndarray
        Chains of linear and convolutional layers, all of the same shapes; at least one.
    statistics : sequence of mappings
        Each model's ``fisher``; see `gems_flwr.model_merging.layer_statistics`.
    weights : sequence of float
        Samples behind each model, above 0.
    floor : float
        Smallest mean squared gradient that counts, above 0.
    """
    if not floor > 0:
        raise ValueError(f"floor must be above 0, got {floor}")
    parts = shares(weights, models)
    layers = check_layers(models[0])
    merged = {}
    for layer in layers:
        rows = rows_of(models, layer)
        mean = mean_rows(rows, parts)
        step, total = np.zeros_like(mean), np.zeros_like(mean)
        for part, row, each in zip(parts, rows, statistics, strict=True):
            precision = part * np.maximum(each[layer.weight]["fisher"], floor).astype(np.float64)
            total += precision
            step += precision * (row - mean)
        merged[layer.weight] = mean + step / total
    return with_rows(models[0], layers, merged)
