"""One call for all methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.model_merging import fisher_mean as fisher
from gems_flwr.model_merging import kfac, regmean
from gems_flwr.model_merging.fedfisher import STEPS, Shape, fedfisher_models
from gems_flwr.model_merging.layer_statistics import Method, Statistics
from gems_flwr.model_merging.matching import match_and_average
from gems_flwr.typing import Arrays

# What is tried where there is a sample to choose by: as in FedFisher's code, and for dampings.
SHRINKS: tuple[float, ...] = (0.9, 0.1)
KFAC_DAMPINGS: tuple[float, ...] = (1e-3, 1e-2, 0.1, 1.0)


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
    shrink: float | None = None,
    damping: float | None = None,
    steps: int = STEPS,
    device: str = "cpu",
    score: Callable[[Arrays], float] | None = None,
) -> MergedModel:
    """Merge trained models.

    Parameters
    ----------
    method : one of `gems_flwr.model_merging.layer_statistics.NEEDED`
        How; see the modules of these names.
    models : sequence of mappings from str to ndarray
        At least one, all of the same shapes.
    statistics : sequence of mappings
        What the method needs of each node; see `gems_flwr.model_merging.layer_statistics`.
    weights : sequence of float
        Samples behind each model, above 0. The largest is the reference of matching.
    shrink : float, optional
        Of regmean; by default 0.9.
    damping : float, optional
        The ridge of regmean, the floor of fisher, the damping of kfac; by default 1e-6, 1e-6
        and 1e-3.
    steps : int
        Of FedFisher, at most.
    device : str
        Where regmean, kfac and FedFisher's Kronecker factors compute; the others have nothing to
        solve.
    score : callable, optional
        How good a model is on a sample of the server's own. What the method leaves open is then
        chosen by it: FedFisher's steps, the shrink of regmean, the damping of kfac, where they
        are not given.
    """
    tried = _candidates(
        method, models, statistics, weights, shrink, damping, steps, device, bool(score)
    )
    if score is None:
        *_, last = tried
        return last
    best, best_score, count = None, -np.inf, 0
    for each in tried:
        count += 1
        found = score(each.arrays)
        # The first of equals: of FedFisher the one with the fewest steps.
        if best is None or found > best_score:
            best, best_score = each, found
    assert best is not None
    details = {**best.details, "tried": count, "public_score": best_score}
    return MergedModel(best.arrays, details)


def _candidates(
    method: Method,
    models: Sequence[Arrays],
    statistics: Sequence[Statistics],
    weights: Sequence[float],
    shrink: float | None,
    damping: float | None,
    steps: int,
    device: str,
    several: bool,
) -> Iterator[MergedModel]:
    """Yield what a method gives, of several settings those that are to be chosen from."""
    if method == "regmean":
        ridge = regmean.RIDGE if damping is None else damping
        default = SHRINKS if several else (regmean.SHRINK,)
        for factor in default if shrink is None else (shrink,):
            merged = regmean.merge_by_regmean(
                models, statistics, weights, shrink=factor, ridge=ridge, device=device
            )
            yield MergedModel(merged, {"shrink": factor} if several else {})
    elif method == "fisher":
        floor = fisher.FLOOR if damping is None else damping
        yield MergedModel(fisher.merge_by_fisher(models, statistics, weights, floor=floor), {})
    elif method == "kfac":
        default = KFAC_DAMPINGS if several else (kfac.DAMPING,)
        for damp in default if damping is None else (damping,):
            merged, solved = kfac.merge_by_kfac(
                models, statistics, weights, damping=damp, device=device
            )
            details = {
                "steps": {weight: each.steps for weight, each in solved.items()},
                "residuals": {weight: each.residual for weight, each in solved.items()},
            }
            yield MergedModel(merged, details | ({"damping": damp} if several else {}))
    elif method == "matching":
        reference = int(np.argmax(weights))
        merged = match_and_average(models, weights, reference=reference)
        yield MergedModel(merged, {"reference": reference})
    else:
        shape: Shape = "diagonal" if method == "fedfisher_diagonal" else "kfac"
        for done, merged in fedfisher_models(
            shape, models, statistics, weights, steps=steps, device=device
        ):
            yield MergedModel(merged, {"steps": done})
