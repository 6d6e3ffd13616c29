"""Which mean replaces the models of several nodes, and how many liars it bears.

====================  ===========================  =================================================
rule                  models for f liars           what replaces the models
====================  ===========================  =================================================
``none``              no liar at all               the weighted mean
``median``            2f + 1                       the median of every number
``geometric_median``  2f + 1                       the model nearest to all, by sum of distances
``trimmed_mean``      f / `trim`                   the mean of every number, without its extremes
``multi_krum``        2f + 3                       the weighted mean of the n − f best of Krum
====================  ===========================  =================================================

Yin et al. 2018, Weiszfeld's steps, Blanchard et al. 2017. On the same models in the same order
results are those of Flower's FedMedian, FedTrimmedAvg and MultiKrum, bit for bit; integer arrays
keep their dtype. Decided here:

- Where there are too few models for a rule, the coordinate-wise median stands in, which bears every
  minority. With fewer than three models none can be outvoted, and the result says so.
- Weights are the nodes' word, and no rule bears liars that outweigh the honest: only ``multi_krum``
  weighs, among the models that it has chosen, and there no node weighs more than twice the median.
- Distances are added up in double precision, where Flower's single precision overflows at weights
  of 1e19, over *all* floating-point arrays: a liar could hide in what is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gems_flwr.averaging.means import weighted_mean
from gems_flwr.averaging.steps import flat, unflat
from gems_flwr.errors import OptionError
from gems_flwr.typing import Arrays

RobustKind = Literal["none", "median", "trimmed_mean", "geometric_median", "multi_krum"]

# A majority needs three.
LEAST_MODELS = 3
# A node counts for at most so many times the median.
HEAVY = 2.0
# Weiszfeld's steps at most, and the share of the spread below which a step ends them.
_STEPS = 100
_TOLERANCE = 1e-7


@dataclass(frozen=True)
class RobustRule:
    """A rule of the table above.

    Examples
    --------
    >>> from gems_flwr import RobustRule
    >>> RobustRule("multi_krum", liars=2).models_needed(2)
    7
    """

    kind: RobustKind = "none"
    # How many nodes may lie, at least 0; by default as many as the rule bears.
    liars: int | None = None
    # Share of the values that ``trimmed_mean`` cuts off at either end, above 0 and below 0.5.
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
        return 2 * liars + (3 if self.kind == "multi_krum" else 1)

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
    """What several models were replaced by."""

    arrays: dict[str, NDArray]
    # The rule that was applied: the one asked for, or the median in its stead.
    applied: RobustKind
    # Positions of the models that the rule did not choose, where it chooses.
    left_out: tuple[int, ...] = ()
    # Whether there were enough models for one to be outvoted.
    checked: bool = True


def combine(rule: RobustRule, models: Sequence[Arrays], weights: Sequence[float]) -> Combined:
    """Return the mean that a rule makes of at least one model, all of the same shapes."""
    count = len(models)
    if not rule.is_on:
        return Combined(weighted_mean(models, weights), "none")
    if count < LEAST_MODELS:
        return Combined(coordinate_median(models), "median", checked=False)
    if rule.kind == "geometric_median":
        return Combined(geometric_median(models), rule.kind)
    cut = int(rule.trim * count)
    if rule.kind == "trimmed_mean" and cut:
        return Combined(trimmed_mean(models, cut), rule.kind)
    liars = max(1, (count - 3) // 2) if rule.liars is None else rule.liars
    if rule.kind != "multi_krum" or count < rule.models_needed(liars):
        return Combined(coordinate_median(models), "median")
    order, fair = krum_order(models, liars), rule.fair(weights)
    chosen, left_out = order[: count - liars], order[count - liars :]
    mean = weighted_mean([models[i] for i in chosen], [fair[i] for i in chosen])
    return Combined(mean, rule.kind, tuple(sorted(left_out)))


def coordinate_median(models: Sequence[Arrays]) -> dict[str, NDArray]:
    """Return the median of every single number; fewer than half of the models cannot break it."""
    return by_coordinate(models, lambda stack: np.median(stack, axis=0))


def trimmed_mean(models: Sequence[Arrays], cut: int) -> dict[str, NDArray]:
    """Return the mean of every single number without the `cut` largest and smallest values."""
    kept = len(models) - 2 * cut

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


def geometric_median(models: Sequence[Arrays]) -> dict[str, NDArray]:
    """Return the model with the smallest sum of distances to all (Weiszfeld's steps).

    A model on which it lands counts as if it were a little away, which keeps the step finite
    (smoothed Weiszfeld). Scales are medians, too: bad models must not blur what counts as near.
    Integer arrays are their coordinate-wise median.
    """
    like = models[0]
    points = np.stack([flat({n: m[n] for n in like}).astype(np.float64) for m in models])
    centre = np.median(points, axis=0)
    spread = float(np.median(np.linalg.norm(points - centre, axis=1)))
    for _ in range(_STEPS if spread > 0 else 0):
        distances = np.linalg.norm(points - centre, axis=1)
        pulls = 1 / np.maximum(distances, _TOLERANCE * spread)
        before, centre = centre, pulls @ points / pulls.sum()
        if np.linalg.norm(centre - before) <= _TOLERANCE * spread:
            break
    integers = [name for name, array in like.items() if array.dtype.kind != "f"]
    median = coordinate_median([{n: m[n] for n in integers} for m in models]) if integers else {}
    median |= unflat(centre, like)
    return {name: median[name] for name in like}


def krum_order(models: Sequence[Arrays], liars: int) -> list[int]:
    """Return the positions of all models, at least two, the lowest score first."""
    products = np.zeros((len(models), len(models)))
    for name, array in models[0].items():
        if array.dtype.kind == "f":
            rows = np.stack([np.ravel(model[name]) for model in models]).astype(np.float64)
            products += rows @ rows.T
    squares = np.diag(products)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0)
    np.fill_diagonal(distances, np.inf)
    nearest = max(1, len(models) - liars - 2)
    scores = np.sort(distances, axis=1)[:, :nearest].sum(axis=1)
    return [int(index) for index in np.argsort(scores, kind="stable")]
