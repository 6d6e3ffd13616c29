"""Means that a few bad models cannot move far: an open question of Kamp et al. 2018, Section 6.

- `coordinate_median` and `trimmed_mean` (Yin et al. 2018) look at one number at a time. On the same
  models in the same order they are, bit for bit, what Flower's FedMedian and FedTrimmedAvg compute.
- `geometric_median` (Weiszfeld's steps) looks at whole models.

All have the unit of the models themselves, so the threshold Δ of dynamic averaging, a squared
distance, keeps its meaning. What they do not keep is Definition 2 (i): they are not the mean, so
replacing models by them may move the mean of all models.

Integer and boolean arrays keep their dtype: the mean of their numbers is rounded, where Flower's
becomes a float that the model cannot load back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.typing import Arrays

_STEPS = 100
_TOLERANCE = 1e-7


def coordinate_median(models: Sequence[Arrays]) -> dict[str, NDArray]:
    """Return the median of every single number; fewer than half of the models cannot break it."""
    return by_coordinate(models, lambda stack: np.median(stack, axis=0))


def trimmed_mean(models: Sequence[Arrays], cut: int) -> dict[str, NDArray]:
    """Return the mean of every single number without its largest and smallest values.

    Parameters
    ----------
    models : sequence of mappings from str to ndarray
        More than twice `cut`.
    cut : int
        How many of the largest, and of the smallest, do not count; at least 0.
    """
    kept = len(models) - 2 * cut
    if cut < 0 or kept < 1:
        raise ValueError(f"cut must be at least 0 and below half of {len(models)}, got {cut}")

    def middle(stack: NDArray) -> NDArray:
        parted = np.partition(stack, (cut, cut + kept - 1), axis=0)
        return np.asarray(np.mean(parted[cut : cut + kept], axis=0))

    return by_coordinate(models, middle)


def by_coordinate(
    models: Sequence[Arrays], centre: Callable[[NDArray], NDArray]
) -> dict[str, NDArray]:
    """Apply a mean to every array of some models, stacked, and give back the models' own dtypes."""
    means = {}
    for name, array in models[0].items():
        stack = np.stack([model[name] for model in models])
        if array.dtype.kind == "f":
            means[name] = np.asarray(centre(stack)).astype(array.dtype)
        else:
            means[name] = np.rint(centre(stack.astype(np.float64))).astype(array.dtype)
    return means


def geometric_median(models: Sequence[Arrays], weights: Sequence[float]) -> dict[str, NDArray]:
    """Return the model with the smallest weighted sum of distances to all (Weiszfeld's steps).

    It begins at the coordinate-wise median and stops when a step moves it by less than 1e-7 of
    the median distance to it, or after 100 steps. A model on which it lands counts as if it were
    that far away, which keeps the step finite (smoothed Weiszfeld). Scales are medians, too: bad
    models must not blur what counts as near. Integer arrays are their coordinate-wise median.
    """
    names = [name for name, array in models[0].items() if array.dtype.kind == "f"]
    points = np.stack(
        [np.concatenate([np.ravel(m[n]) for n in names]).astype(np.float64) for m in models]
    )
    shares = np.asarray(weights, dtype=np.float64)
    centre = np.median(points, axis=0)
    spread = float(np.median(np.linalg.norm(points - centre, axis=1)))
    for _ in range(_STEPS if spread > 0 else 0):
        distances = np.linalg.norm(points - centre, axis=1)
        pulls = shares / np.maximum(distances, _TOLERANCE * spread)
        before, centre = centre, pulls @ points / pulls.sum()
        if np.linalg.norm(centre - before) <= _TOLERANCE * spread:
            break
    integers = {name for name in models[0] if name not in names}
    median = coordinate_median([{n: m[n] for n in integers} for m in models]) if integers else {}
    position = 0
    for name in names:
        array = models[0][name]
        part = centre[position : position + array.size]
        median[name] = part.reshape(array.shape).astype(array.dtype)
        position += array.size
    return {name: median[name] for name in models[0]}
