"""One call for all methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.model_merging import fisher_mean as fisher
from gems_flwr.model_merging import kfac, regmean
from gems_flwr.model_merging.layer_statistics import Method, Statistics
from gems_flwr.model_merging.matching import match_and_average
from gems_flwr.typing import Arrays


@dataclasses.dataclass(frozen=True, eq=False)
class MergedModel:
    """The merged arrays, and what there is to tell about them."""

    arrays: dict[str, NDArray]
    details: Mapping[str, Any]


def merge_models(
    method: Method,
    models: Sequence[Arrays],
    statistics: Sequence[Statistics],
    weights: Sequence[float],
    *,
    shrink: float = regmean.SHRINK,
    damping: float | None = None,
    device: str = "cpu",
) -> MergedModel:
    """Merge trained models.

    Parameters
    ----------
    method : {"regmean", "fisher", "kfac", "matching"}
        How; see the modules of these names.
    models : sequence of mappings from str to ndarray
        At least one, all of the same shapes.
    statistics : sequence of mappings
        What the method needs of each node; see `gems_flwr.model_merging.layer_statistics`.
    weights : sequence of float
        Samples behind each model, above 0. The largest is the reference of matching.
    shrink : float
        Of regmean.
    damping : float, optional
        The ridge of regmean, the floor of fisher, the damping of kfac; by default 1e-6, 1e-6
        and 1e-3.
    device : str
        Where regmean and kfac solve; the others have nothing to solve.
    """
    if method == "regmean":
        ridge = regmean.RIDGE if damping is None else damping
        merged = regmean.merge_by_regmean(
            models, statistics, weights, shrink=shrink, ridge=ridge, device=device
        )
        return MergedModel(merged, {})
    if method == "fisher":
        floor = fisher.FLOOR if damping is None else damping
        return MergedModel(fisher.merge_by_fisher(models, statistics, weights, floor=floor), {})
    if method == "kfac":
        damp = kfac.DAMPING if damping is None else damping
        merged, solved = kfac.merge_by_kfac(
            models, statistics, weights, damping=damp, device=device
        )
        details = {
            "steps": {weight: each.steps for weight, each in solved.items()},
            "residuals": {weight: each.residual for weight, each in solved.items()},
        }
        return MergedModel(merged, details)
    reference = int(np.argmax(weights))
    merged = match_and_average(models, weights, reference=reference)
    return MergedModel(merged, {"reference": reference})
