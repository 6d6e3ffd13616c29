"""Weighted means of models (mappings from names to arrays) and of metrics; distances of models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.typing import Arrays, Metrics


def weighted_mean(models: Sequence[Arrays], weights: Sequence[float]) -> dict[str, NDArray]:
    """Return the weighted mean of models with the same names and shapes, array by array.

    Floating-point arrays are summed in their own precision in the order given, with the weights (at
    least 0, of a positive sum) normalised first: bit for bit what Flower's FedAvg computes. Integer
    and boolean arrays (batch-norm counters, masks) keep their dtype: their mean is rounded to the
    nearest integer, where Flower's becomes a float that the model cannot load back.
    """
    if not models or len(models) != len(weights):
        raise ValueError(
            f"expected a weight for each of at least one model, got {len(models)} "
            f"models and {len(weights)} weights"
        )
    total = sum(weights)
    if not (np.isfinite(total) and total > 0 and min(weights) >= 0):
        raise ValueError(f"weights must be >= 0 with a positive finite sum, got {list(weights)}")
    return weighted_sum(models, [weight / total for weight in weights])


def weighted_sum(models: Sequence[Arrays], factors: Sequence[float]) -> dict[str, NDArray]:
    """Return Σ factor × model, array by array, as `weighted_mean` sums; at least one model."""
    return {name: _summed([model[name] for model in models], factors) for name in models[0]}


def _summed(arrays: Sequence[NDArray], factors: Sequence[float]) -> NDArray:
    total = np.asarray(arrays[0] * factors[0])
    product = np.empty_like(total)
    for array, factor in zip(arrays[1:], factors[1:], strict=True):
        if array.dtype == arrays[0].dtype and type(factor) is type(factors[0]):
            total += np.multiply(array, factor, out=product)  # the same, in memory that is there
        else:
            total += array * factor
    dtype = arrays[0].dtype
    return np.rint(total).astype(dtype) if dtype.kind in "iub" else total


# Floating-point arrays that are no parameters, by how torch calls those of normalisation layers.
BUFFERS = ("running_mean", "running_var")


def squared_distance(one: Arrays, other: Arrays) -> float:
    """Return ‖one − other‖² over all parameters, summed in double precision (Kamp et al. 2018).

    Integer arrays and `BUFFERS` do not count. Both models have the same names and shapes.
    """
    total = 0.0
    for name, array in one.items():
        if array.dtype.kind == "f" and not name.endswith(BUFFERS):
            gap = np.subtract(array, other[name], dtype=np.float64).ravel()
            total += float(gap @ gap)
    return total


def mean_metrics(
    metrics: Sequence[Metrics], weights: Sequence[float]
) -> dict[str, float | list[float]]:
    """Return the weighted mean of those metrics that all have, of lists number by number."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    means: dict[str, float | list[float]] = {}
    for key in metrics[0]:
        if len({metric_form(each.get(key)) for each in metrics}) > 1:
            continue
        rows = [value if isinstance(value := each[key], list) else [value] for each in metrics]
        mean = [
            sum(number * share for number, share in zip(column, shares, strict=True))
            for column in zip(*rows, strict=True)
        ]
        means[key] = mean if isinstance(metrics[0][key], list) else mean[0]
    return means


def metric_form(value: float | list[int] | list[float] | None) -> str:
    """Return what can be averaged with what: numbers, and lists of one length."""
    if value is None:
        return "missing"
    return f"a list of {len(value)}" if isinstance(value, list) else "a number"


def with_floats_of(model: Arrays, average: Arrays) -> dict[str, NDArray]:
    """Return `model` with the floating-point arrays of `average`; counters are the model's own."""
    return {
        name: np.asarray(average[name]) if array.dtype.kind == "f" else array
        for name, array in model.items()
    }
