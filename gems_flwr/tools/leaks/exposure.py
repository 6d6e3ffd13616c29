"""What can be said of a cone without any data: from counts, ranks, rounding and noise alone.

- A covariance of n samples has n - 1 directions at most. Where as many were sent, the samples are
  known up to a rotation, and what is known of features undoes it (`rebuilding`). Two samples are
  their mean plus and minus one direction.
- One who knows the distribution of a class tells by a mean of n samples who is among them: if it is
  normal, the likelihood ratio is normal too, with a distance of ``sqrt(I)`` deviations between
  members and others and ``I = sum_j v_j / n^2 / (v_j / n + s_j^2 / 12)`` over features with
  variances v that were rounded to steps s. That is an AUC of ``Phi(sqrt(I / 2))``; with exact
  means of k features ``Phi(sqrt(k / 2n))``. Covariances come on top of it.
- Noise for (epsilon, delta)-privacy bounds *every* attacker, also one who has all other samples. A
  Gaussian release of that noise is mu-GDP, and its AUC is at most ``Phi(mu / sqrt 2)`` (Dong, Roth
  and Su 2022). A file says what noise it was promised to have, which it cannot prove.

Components of a class (clusters, groups) are judged one by one, and the class by the worst.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from gems_flwr.spaces.cone import (
    NUMBERS_PER_SAMPLE,
    PUSHES,
    SENSITIVITY,
    WHITE_PUSHES,
    ClassMomentCone,
    CommonCovariance,
    FullCovariance,
    LowRankCovariance,
    PartialCovariance,
    QuantizedArray,
    coarseness,
    directions_of_mean,
    gaussian_noise,
    mean_values,
)
from gems_flwr.typing import Float


@dataclass(frozen=True)
class Exposure:
    """What a file shows of a class by itself."""

    label: int
    count: int  # samples behind its smallest component
    total: int  # and behind all of them
    features: int
    directions: int | None  # of its worst component's covariance; None for means alone
    mean_auc: float  # by the mean alone, for one who knows the distribution; 0.5 is guessing
    exact: str | None  # why the samples are given away without any attack


def exposures(cone: ClassMomentCone) -> list[Exposure]:
    """Return what a cone shows of each of its classes, in the order of classes."""
    entries = [_of_entry(cone, entry) for entry in range(len(cone.labels))]
    found = []
    for label in np.unique(cone.labels).tolist():
        own = [each for each in entries if each.label == label]
        worst = max(own, key=lambda each: (each.exact is not None, each.mean_auc, -each.count))
        count, total = min(each.count for each in own), sum(each.total for each in own)
        found.append(replace(worst, count=count, total=total))
    return found


def _of_entry(cone: ClassMomentCone, entry: int) -> Exposure:
    label, count, rank = int(cone.labels[entry]), int(cone.counts[entry]), sent_rank(cone, entry)
    if cone.privacy is not None:
        auc, exact = private_auc(*cone.privacy), None
    else:
        auc, exact = known_auc(mean_information(cone, entry)), _exact(count, rank)
    return Exposure(label, count, count, cone.num_features, rank, auc, exact)


def _exact(count: int, directions: int | None) -> str | None:
    if count == 1:
        return "its mean is the sample itself"
    if directions is None:
        return "a mean of two samples: whoever has one knows the other" if count == 2 else None
    if count == 2:
        return "mean and spread of two samples are the samples, but for signs and rounding"
    if directions >= count - 1:
        return f"{count - 1} directions of {count} samples are the samples, but for a rotation"
    return None


def sent_rank(cone: ClassMomentCone, entry: int) -> int | None:
    """Return how many directions of a component's covariance were sent; None without any."""
    covariance, place = own_covariance(cone, entry)
    if isinstance(covariance, FullCovariance):
        return min(int(cone.counts[entry]) - 1, cone.num_features)
    return None if covariance is None else covariance.rank(place)


def own_covariance(
    cone: ClassMomentCone, entry: int
) -> tuple[FullCovariance | LowRankCovariance | CommonCovariance | None, int]:
    """Return what has a component's covariance, and where; None where its mean is alone."""
    covariance: Any = cone.covariance
    if not isinstance(covariance, PartialCovariance):
        return covariance, entry
    found = covariance.place(entry)
    return (None, 0) if found is None else (covariance.own, found)


def known_auc(information: float) -> float:
    """Return the AUC of one who knows the distribution; see the module's docstring."""
    return float(ndtr(math.sqrt(max(0.0, information) / 2)))


def private_auc(epsilon: float, delta: float) -> float:
    """Return the largest AUC that any attacker reaches against noise for (epsilon, delta)."""
    if not (epsilon > 0 and 0 < delta < 1):
        return 1.0
    return float(ndtr(SENSITIVITY / gaussian_noise(epsilon, delta, SENSITIVITY) / math.sqrt(2)))


def mean_information(cone: ClassMomentCone, entry: int) -> float:
    """Return I of the module's docstring for the mean of one component."""
    count, features, pushes = int(cone.counts[entry]), cone.num_features, PUSHES
    if isinstance(cone.covariance, CommonCovariance):
        blur, pushes = coarseness(count, features, cone.covariance.rank(entry)), WHITE_PUSHES
        if blur * pushes * math.sqrt(features) > count and len(cone.labels) > 1:
            features = directions_of_mean(count, features)
            blur = coarseness(count, features, 0)
    elif bool(cone.lacking[entry]):
        # A mean alone is rounded as if it were all that is sent.
        blur = max(0.0, 1 - NUMBERS_PER_SAMPLE * count / features)
        blur *= bool(mean_steps(cone, entry).any())
    else:
        variances = np.maximum(np.diag(cone.covariance.dense_matrix(entry)), 0)
        return information(variances, mean_steps(cone, entry), count)
    # Variances that were rounded up as well say little of the true ones. If all features have the
    # same one it cancels, and no other variances of that trace give a larger I.
    step = blur * pushes * math.sqrt(features) / count
    return information(np.ones(features), np.full(features, step), count)


def information(variances: Float, steps: Float, count: int) -> float:
    """Return I of the module's docstring for `count` samples; arrays of shape (D,)."""
    there = variances > 0
    shares = variances[there] / (variances[there] + count * steps[there] ** 2 / 12)
    return float(shares.sum() / count)


def mean_steps(cone: ClassMomentCone, entry: int) -> Float:
    """Return to what steps the features of a component's mean were rounded; 0 if they were not."""
    if isinstance(cone.means, QuantizedArray):
        scales = np.broadcast_to(cone.means.scales, cone.means.shape)
        return np.asarray(scales[entry], dtype=np.float64)
    return np.full(cone.num_features, common_step(mean_values(cone)[entry]))


def common_step(values: NDArray[np.floating]) -> float:
    """Return the step of which all values are multiples; 0 if there is none.

    Rounding leaves few different values; numbers that were not rounded are no multiples of the
    smallest difference between two of them.
    """
    different = np.unique(np.abs(values.astype(np.float64)))
    if len(different) < 2 or len(different) > len(values) / 2:
        return 0.0
    step = float(np.diff(different).min())
    # Within what single precision, in which means are stored, can tell.
    multiples = different / step
    fits = np.abs(multiples - np.rint(multiples)).max() < 0.01
    return step if fits and multiples.max() < 1e4 else 0.0
