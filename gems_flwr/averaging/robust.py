"""Means that a few bad models cannot move far: an open question of Kamp et al. 2018, Section 6.

Both medians have the unit of the models themselves, so the threshold Δ of dynamic averaging, a
squared distance, keeps its meaning. What they do not keep is Definition 2 (i): a median is not the
mean, so replacing models by it may move the mean of all models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging.means import Arrays, weighted_mean, with_floats_of

MeanKind = Literal["mean", "median", "geometric_median"]

_STEPS = 100
_TOLERANCE = 1e-7


def combine(
    kind: MeanKind, models: Sequence[Arrays], weights: Sequence[float]
) -> dict[str, NDArray]:
    """Return the mean of the kind that is asked for; integer arrays are those of the first model.

    Parameters
    ----------
    kind : {"mean", "median", "geometric_median"}
        Which mean.
    models : sequence of mappings from str to ndarray
        At least one.
    weights : sequence of float
        One positive weight per model. The coordinate-wise median does not use them.
    """
    if kind == "mean":
        return with_floats_of(models[0], weighted_mean(models, weights))
    if kind == "median":
        return coordinate_median(models)
    return geometric_median(models, weights)


def coordinate_median(models: Sequence[Arrays]) -> dict[str, NDArray]:
    """Return the median of every single number; fewer than half of the models cannot break it."""
    return {
        name: np.median(np.stack([model[name] for model in models]), axis=0).astype(array.dtype)
        if array.dtype.kind == "f"
        else array
        for name, array in models[0].items()
    }


def geometric_median(models: Sequence[Arrays], weights: Sequence[float]) -> dict[str, NDArray]:
    """Return the model with the smallest weighted sum of distances to all (Weiszfeld's steps).

    It begins at the coordinate-wise median and stops when a step moves it by less than 1e-7 of
    the median distance to it, or after 100 steps. A model on which it lands counts as if it were
    that far away, which keeps the step finite (smoothed Weiszfeld). Scales are medians, too: bad
    models must not blur what counts as near.
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
    median = dict(models[0])
    position = 0
    for name in names:
        array = models[0][name]
        part = centre[position : position + array.size]
        median[name] = part.reshape(array.shape).astype(array.dtype)
        position += array.size
    return median
