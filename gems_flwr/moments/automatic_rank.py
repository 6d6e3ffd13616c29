"""How much of a class its samples can hide: moments whose form follows from their number.

A covariance of no more samples than features determines the samples up to a rotation, and what is
known of the features (the range of pixels, say) undoes the rotation. A mean of few samples tells
whether somebody is among them: k exact numbers from n samples let one who knows the distribution
tell members from others with an AUC of Phi(sqrt(k / 2n)), if it is normal. So ``rank="auto"``, the
default, sends of a class with n samples of D features

- the exact moments while they are at most 0.9 n numbers: mean, variances and as many directions of
  the covariance as that leaves, all of it where D (D + 3) / 2 numbers are not too many;
- with more features, more: one direction for every 25 samples, but all values *rounded* to steps
  of up to three times the length by which one typical sample moves the mean, ``sqrt(trace) / n``,
  and variances drawn towards their average as if up to 50 more samples had just that;
- full moments from 30 samples for each feature;
- nothing below ``3 sqrt(D / 12)`` samples, where rounding would be coarser than the class is wide.

Nothing is random, so asking the same again tells nothing new. Decided here: the numbers, on MNIST
and on features of CIFAR-10, so that an attacker who has 2,500 other samples of the class tells
members from others with an AUC of at most 0.75 (``python -m simulations.reproduce leaks``). That is
a measurement, not a proof: for a proof there is `gems_flwr.moments.private_release`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gems_flwr.moments.low_rank import factor
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.covariance import LowRankCovariance, Values, quantize, rounded
from gems_flwr.typing import Float

NUMBERS_PER_SAMPLE = 0.9
SAMPLES_PER_DIRECTION = 25
FULL_SAMPLES_PER_FEATURE = 30
PUSHES = 3.0
SMOOTHING = 50


def smallest_count(features: int) -> int:
    """Return the fewest samples of a class of which anything is sent."""
    return max(2, math.ceil(PUSHES * math.sqrt(features / 12)))


def may_send_full(count: int, features: int) -> bool:
    """Return whether a class has clearly more samples than its full moments tell."""
    few_numbers = features * (features + 3) / 2 <= NUMBERS_PER_SAMPLE * count
    return few_numbers or count >= FULL_SAMPLES_PER_FEATURE * features


def allowed_rank(count: int, features: int) -> int:
    """Return how many directions the covariance of so many samples may show."""
    if may_send_full(count, features):
        return features
    exact = int(NUMBERS_PER_SAMPLE * count / features) - 2
    return min(features, max(exact, count // SAMPLES_PER_DIRECTION, 0))


def coarseness(count: int, features: int, rank: int) -> float:
    """Return how much a class has to be rounded, from 0 (not at all) to nearly 1."""
    numbers = (2 + rank) * features
    return max(0.0, 1 - NUMBERS_PER_SAMPLE * count / numbers)


def feature_units(inputs: Tensor) -> Float:
    """Return a power of ten for each feature where their ranges differ by orders of magnitude.

    One step for all features suits pixels, of which few have another range than the rest: then all
    are 1. A table may have metres beside millimetres; of that nothing but the order is looked at.
    """
    rows = inputs.reshape(len(inputs), -1).double()
    ranges = (rows.amax(dim=0) - rows.amin(dim=0)).cpu().numpy()
    there = ranges > 0
    if not there.any():
        return np.ones(len(ranges))
    relative = np.where(there, ranges, np.median(ranges[there])) / np.median(ranges[there])
    # A large one drowns all others; small ones matter only if there are many.
    if relative.max() < 10 and np.mean(relative < 0.1) < 0.1:
        return np.ones(len(ranges))
    return np.asarray(10.0 ** np.rint(np.log10(relative)))


def as_counts_allow(
    cone: ClassMomentCone,
    units: Float | None = None,
    int8: bool = True,
    largest_rank: int | None = None,
) -> ClassMomentCone:
    """Return as much of a cone's moments as its counts allow; see the module's docstring.

    Parameters
    ----------
    cone : ClassMomentCone
        With full covariances, and classes below `smallest_count` withheld.
    units : array of shape (D,), optional
        See `feature_units`. Where they differ, values are sent in 32 bits: one step in eight bits
        would not do for all features.
    int8 : bool
        Whether low-rank moments are sent in eight bits where that is possible.
    largest_rank : int, optional
        Most directions, whatever the counts allow.
    """
    features = cone.num_features
    if largest_rank is None and may_send_full(int(cone.counts.min()), features):
        return cone
    units = np.ones(features) if units is None else units
    shapes = [
        _rounding(
            cone.covariance.dense_matrix(component) / (units[:, None] * units), count, largest_rank
        )
        for component, count in enumerate(cone.counts.tolist())
    ]
    means, covariance = store_shapes(mean_values(cone) / units, shapes, units, int8)
    return dataclasses.replace(cone, means=means, covariance=covariance)


@dataclasses.dataclass(frozen=True, eq=False)
class Shape:
    """A factor (D, r) and deviations (D,) of a covariance, and the step to round them to."""

    factor: Float
    deviations: Float
    step: float


def store_shapes(
    means: Float, shapes: Sequence[Shape], units: Float, int8: bool
) -> tuple[Values, LowRankCovariance]:
    """Return the means, divided by units, and the shapes of all components as they are sent."""
    features = len(units)

    def stored(rows: Sequence[Float], steps: Sequence[float], round_up: bool = False) -> Values:
        table, least = np.reshape(rows, (-1, features)), np.reshape(steps, (-1, 1))
        if int8 and (units == 1).all():
            return quantize(table, axis=1, round_up=round_up, least_step=least)
        return (rounded(table, least, round_up) * units).astype(np.float32)

    steps = [shape.step for shape in shapes]
    covariance = LowRankCovariance(
        stored(
            [column for shape in shapes for column in shape.factor.T],
            [shape.step for shape in shapes for _ in shape.factor.T],
        ),
        stored([shape.deviations for shape in shapes], steps, round_up=True),
        np.array([shape.factor.shape[1] for shape in shapes]),
    )
    return stored(list(means), steps), covariance


def chosen_rank(count: int, features: int, largest_rank: int | None) -> int:
    """Return how many directions are sent of a class."""
    rank = allowed_rank(count, features)
    return rank if largest_rank is None else min(rank, largest_rank)


def _rounding(covariance: Float, count: int, largest_rank: int | None) -> Shape:
    features = len(covariance)
    columns, deviations = factor(covariance, chosen_rank(count, features, largest_rank))
    return smoothed(columns, deviations, float(np.trace(covariance)), count)


def smoothed(columns: Float, deviations: Float, trace: float, count: int) -> Shape:
    """Return the factor (D, r) of a class, its variances drawn towards their average.

    Parameters
    ----------
    columns, deviations : arrays of shapes (D, r) and (D,)
        As `gems_flwr.moments.low_rank.factor` returns them.
    trace : float
        Of the covariance.
    count : int
        Samples of the class.
    """
    features, rank = columns.shape
    blur, squares = coarseness(count, features, rank), deviations**2
    smooth = (count * squares + blur * SMOOTHING * squares.mean()) / (count + blur * SMOOTHING)
    push = math.sqrt(max(0.0, trace)) / count
    return Shape(columns, np.sqrt(smooth), blur * PUSHES * push)
