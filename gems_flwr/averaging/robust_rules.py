"""Which mean replaces the models of several nodes, and how many liars it bears.

====================  ===========================  =================================================
rule                  models for f liars           what replaces the models
====================  ===========================  =================================================
``none``              no liar at all               the weighted mean
``median``            2f + 1                       the median of every number
``geometric_median``  2f + 1                       the model nearest to all, by sum of distances
``trimmed_mean``      f / `trim`                   the mean of every number, without its extremes
``krum``              2f + 3                       the one model with the nearest neighbours
``multi_krum``        2f + 3                       the weighted mean of the n − f best of Krum
``bulyan``            4f + 3                       means of numbers near the median of Krum's choice
====================  ===========================  =================================================

Decided here:

- Where there are too few models for a rule, the coordinate-wise median stands in, which bears every
  minority. (Flower's Bulyan skips the round then, its trimmed mean and Krum go on without
  protection.) With fewer than three models nobody can be outvoted, and the result says so.
- Weights are the nodes' word, and no rule bears liars that outweigh the honest: only ``multi_krum``
  weighs, among the models that it has chosen, and there no node weighs more than twice the median,
  as in the screening of cones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging.krum import bulyan_mean, krum_order
from gems_flwr.averaging.means import weighted_mean
from gems_flwr.averaging.robust_means import coordinate_median, geometric_median, trimmed_mean
from gems_flwr.errors import OptionError
from gems_flwr.typing import Arrays

RobustKind = Literal[
    "none", "median", "trimmed_mean", "geometric_median", "krum", "multi_krum", "bulyan"
]

# A majority needs three.
LEAST_MODELS = 3
# A node counts for at most so many times the median.
HEAVY = 2.0


@dataclass(frozen=True)
class RobustRule:
    """A rule of the table above.

    Parameters
    ----------
    kind : str
        One of `RobustKind`.
    liars : int, optional
        How many nodes may lie, at least 0; by default as many as the rule bears.
    trim : float, default 0.2
        Share of the values that ``trimmed_mean`` cuts off at either end, above 0 and below 0.5.
    """

    kind: RobustKind = "none"
    liars: int | None = None
    trim: float = 0.2

    def __post_init__(self) -> None:
        kinds = get_args(RobustKind)
        if self.kind not in kinds:
            raise OptionError(f"robust must be one of {list(kinds)}, got {self.kind!r}")
        whole = isinstance(self.liars, int) and not isinstance(self.liars, bool)
        if self.liars is not None and not (whole and self.liars >= 0):
            raise OptionError(f"liars must be a whole number of at least 0, got {self.liars!r}")
        if not 0 < self.trim < 0.5:
            raise OptionError(f"trim must be above 0 and below 0.5, got {self.trim}")

    @property
    def is_on(self) -> bool:
        """Whether this is anything but the plain mean."""
        return self.kind != "none"

    def models_needed(self, liars: int) -> int:
        """Return how many models outvote so many liars."""
        if self.kind == "trimmed_mean":
            # The same product as below, so that both round alike.
            needed = math.ceil(liars / self.trim)
            return needed if int(self.trim * needed) >= liars else needed + 1
        factor, rest = {"krum": (2, 3), "multi_krum": (2, 3), "bulyan": (4, 3)}.get(
            self.kind, (2, 1)
        )
        return factor * liars + rest

    def least_models(self, nodes: int) -> int:
        """Return how many models of so many nodes an average must have to be trusted.

        All, unless it is known how many lie: liars may be the first whose models come in.
        """
        if not self.is_on:
            return 1
        if self.liars is None:
            return nodes
        return min(nodes, max(LEAST_MODELS, self.models_needed(self.liars)))

    def fair(self, weights: Sequence[float]) -> list[float]:
        """Return weights of which none exceeds twice the median, where a rule is on."""
        if not self.is_on or not weights:
            return list(weights)
        most = HEAVY * float(np.median(weights))
        return [min(weight, most) for weight in weights]


@dataclass(frozen=True)
class Combined:
    """What several models were replaced by.

    Parameters
    ----------
    arrays : mapping from str to ndarray
        The mean.
    applied : str
        The rule that was applied: the one asked for, or the median in its stead.
    left_out : tuple of int
        Positions of the models that the rule did not choose, where it chooses.
    checked : bool
        Whether there were enough models for one to be outvoted.
    """

    arrays: dict[str, NDArray]
    applied: RobustKind
    left_out: tuple[int, ...] = ()
    checked: bool = True


def combine(rule: RobustRule, models: Sequence[Arrays], weights: Sequence[float]) -> Combined:
    """Return the mean that a rule makes of some models.

    Parameters
    ----------
    rule : RobustRule
        Which mean.
    models : sequence of mappings from str to ndarray
        At least one; all with the same names and shapes.
    weights : sequence of float
        One positive weight per model.
    """
    count = len(models)
    if not rule.is_on:
        return Combined(weighted_mean(models, weights), "none")
    if count < LEAST_MODELS:
        return Combined(coordinate_median(models), "median", checked=False)
    if rule.kind == "geometric_median":
        return Combined(geometric_median(models, [1.0] * count), rule.kind)
    cut = int(rule.trim * count)
    if rule.kind == "trimmed_mean" and cut:
        return Combined(trimmed_mean(models, cut), rule.kind)
    liars = _liars(rule, count)
    if rule.kind in ("median", "trimmed_mean") or liars is None:
        return Combined(coordinate_median(models), "median")
    kept = {"krum": 1, "multi_krum": count - liars}.get(rule.kind, count - 2 * liars)
    order = krum_order(models, liars)
    chosen = [models[index] for index in order[:kept]]
    left_out = tuple(sorted(order[kept:]))
    if rule.kind == "bulyan":
        return Combined(bulyan_mean(chosen, liars), rule.kind, left_out)
    fair = rule.fair(weights)
    mean = weighted_mean(chosen, [fair[index] for index in order[:kept]])
    return Combined(mean, rule.kind, left_out)


def _liars(rule: RobustRule, count: int) -> int | None:
    """Return the f of Krum and Bulyan among so many models; None if these are too few."""
    if rule.liars is not None:
        return rule.liars if count >= rule.models_needed(rule.liars) else None
    most = (count - 3) // (4 if rule.kind == "bulyan" else 2)
    return most if most > 0 else None
