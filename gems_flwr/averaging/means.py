"""Weighted means of models and of metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.typing import Arrays, Metrics


def weighted_mean(models: Sequence[Arrays], weights: Sequence[float]) -> dict[str, NDArray]:
    """Return the weighted mean of models, array by array.

    Floating-point arrays are summed in their own precision in the order given, with the
    weights normalised first: bit for bit what Flower's FedAvg computes. Integer and boolean
    arrays (batch-norm counters, masks) keep their dtype: their mean is rounded to the nearest
    integer, where Flower's becomes a float that the model cannot load back.

    Parameters
    ----------
    models : sequence of mappings from str to ndarray
        At least one model; all with the same names and shapes.
    weights : sequence of float
        One non-negative weight per model, with a positive sum.

    Returns
    -------
    dict of str to ndarray
        New arrays, with the dtypes of the first model.
    """
    if not models:
        raise ValueError("weighted_mean needs at least one model")
    if len(models) != len(weights):
        raise ValueError(f"got {len(models)} models but {len(weights)} weights")
    total = sum(weights)
    if not (np.isfinite(total) and total > 0 and min(weights) >= 0):
        raise ValueError(f"weights must be >= 0 with a positive finite sum, got {list(weights)}")
    names = models[0].keys()
    for position, model in enumerate(models):
        if model.keys() != names:
            raise ValueError(f"model {position} has arrays {sorted(model)}, not {sorted(names)}")

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
    if dtype.kind in "iub":
        return np.rint(total).astype(dtype)
    return total


def mean_metrics(
    metrics: Sequence[Metrics], weights: Sequence[float]
) -> dict[str, float | list[float]]:
    """Return the weighted mean of those metrics that all have, of lists number by number.

    Parameters
    ----------
    metrics : sequence of mappings from str to float or list of float
        At least one.
    weights : sequence of float
        One positive weight for each.
    """
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
    """Return `model` with its floating-point arrays replaced by those of `average`.

    Integer arrays (batch-norm counters) are a node's own business: they count what this node
    has seen, and a mean of counts says nothing.
    """
    return {
        name: np.asarray(average[name]) if array.dtype.kind == "f" else array
        for name, array in model.items()
    }
