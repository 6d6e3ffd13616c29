"""How much of a class its samples can hide, and so how much of its moments a node shows.

A covariance of no more samples than features determines the samples up to a rotation, and what is
known of the features (the range of pixels, say) undoes the rotation. A mean of few samples shows
who is among them: k exact numbers from n samples separate members from others with an AUC of
Phi(sqrt(k / 2n)). So ``rank="auto"`` sends of n samples of D features

- the exact moments while they are at most 0.9 n numbers: mean, variances and as many directions of
  the covariance as that leaves; all directions from 30 samples for each feature;
- with more features one direction for every 25 samples, but all values *rounded* to steps of up to
  three times the length by which one typical sample moves the mean, ``sqrt(trace) / n``, and
  variances drawn towards their average as if up to 50 more samples had just that;
- no covariance of fewer than ``3 sqrt(D / 12)`` samples, of all classes of the node together.

A class of fewer than `MEAN_COUNT` samples is not sent at all. Where a step would be longer than the
class is wide, `gems_flwr.spaces.cone.covariance` rounds in fewer directions.

A feature that too few of its samples move (a rare word, a unit that one sample switches on) shows
nothing of its own, however many samples the class has: as variance the least of the others', as
mean that of the middle half of the samples. How many move it is ``(sum |x - median|)^2 / sum
(x - median)^2``, one where a single one does; at least `FEATURE_COUNT` are wanted.

Nothing is random, so asking again reveals nothing new. Decided here: the numbers, on MNIST and on
features of CIFAR-10, so that an attacker who has 2,500 other samples of the class separates members
from others with an AUC of at most 0.75 (``python -m simulations.reproduce leaks``). That is a
measurement; for a proof there is `gems_flwr.spaces.cone.private`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from gems_flwr.errors import SpaceError
from gems_flwr.typing import Float, Rank

# Fewest samples of a class with a fixed rank or full moments; the automatic rule has its own.
MIN_COUNT = 32
# Fewest samples of a mean, unless a node's own limits say otherwise.
MEAN_COUNT = 8
# See the module's docstring.
NUMBERS_PER_SAMPLE = 0.9
SAMPLES_PER_DIRECTION = 25
FULL_SAMPLES_PER_FEATURE = 30
PUSHES = 3.0
# Of the covariance common to all classes, in whose coordinates no direction hides another's steps.
WHITE_PUSHES = 4.0
SMOOTHING = 50
# Longest step of a mean that is not shown in all directions, in deviations of its class.
LONGEST_STEP = 2.0
# Fewest samples that move a feature whose moments are shown; from 4 to 32 tried on tweets.
FEATURE_COUNT = 4


@dataclasses.dataclass(frozen=True)
class MeanRule:
    """From how many samples on a node shows means of small classes, and whether exactly."""

    least: int = MEAN_COUNT
    exact: bool = False


def least_count(rank: Rank, features: int, min_count: int | None = None) -> int:
    """Return how many samples a class must have for a covariance.

    A fixed rank needs more samples than columns, or the samples themselves would be sent.
    """
    if rank == "auto":
        default = enforced = smallest_count(features)
    else:
        default, enforced = MIN_COUNT, rank + 1 if isinstance(rank, int) else 1
    return max(default if min_count is None else min_count, enforced)


def smallest_count(features: int) -> int:
    """Return the fewest samples of a class of which anything is sent."""
    return max(MEAN_COUNT, math.ceil(PUSHES * math.sqrt(features / 12)))


def may_send_full(count: int, features: int) -> bool:
    """Return whether a class has clearly more samples than its full moments reveal."""
    few_numbers = features * (features + 3) / 2 <= NUMBERS_PER_SAMPLE * count
    return few_numbers or count >= FULL_SAMPLES_PER_FEATURE * features


def allowed_rank(count: int, features: int) -> int:
    """Return how many directions the covariance of so many samples may show."""
    if may_send_full(count, features):
        return features
    exact = int(NUMBERS_PER_SAMPLE * count / features) - 2
    return min(features, max(exact, count // SAMPLES_PER_DIRECTION, 0))


def samples_for(directions: int, features: int) -> int:
    """Return how many samples a class must have for so many directions of its covariance."""
    count = 1
    while allowed_rank(count, features) < directions:
        count += 1
    return count


def coarseness(count: int, features: int, rank: int) -> float:
    """Return how much a class has to be rounded, from 0 (not at all) to nearly 1."""
    return max(0.0, 1 - NUMBERS_PER_SAMPLE * count / ((2 + rank) * features))


def few_move(samples: Tensor) -> Tensor:
    """Return which features of samples (n, D) too few of them move to be shown."""
    off = (samples - samples.median(dim=0).values).abs()
    behind = off.sum(dim=0).square() / off.square().sum(dim=0).clamp_min(1e-300)
    return behind < max(2, min(FEATURE_COUNT, len(samples) // 4))  # a mean may be of eight


def middle_mean(samples: Tensor) -> Tensor:
    """Return the means (D,) of the middle half of the values of each feature."""
    quarter = len(samples) // 4
    return samples.sort(dim=0).values[quarter : len(samples) - quarter].mean(dim=0)


def directions_of_mean(count: int, features: int) -> int:
    """Return in how many directions steps of a mean are not too long."""
    return min(int((LONGEST_STEP * count / WHITE_PUSHES) ** 2), features)


def mean_step(count: int, features: int, variance: float) -> float:
    """Return to which step a mean of samples with a total variance is rounded; 0 for not at all."""
    blur = max(0.0, 1 - NUMBERS_PER_SAMPLE * count / features)
    return blur * PUSHES * math.sqrt(variance) / count


def sum_steps(parts: Float, labels: Float, numbers: int) -> Float:
    """Return to which steps sums over samples are rounded, in a reply with so many numbers.

    `parts` (n, K) is how much each sample adds to each of K sums, in length. What counts is the
    *effective* number of a class's samples, the square of the sum of squares over that of fourth
    powers: a few that a layer singles out do not pass for all. The longest step decides.
    """
    steps = np.zeros(parts.shape[1])
    for label in np.unique(labels):
        squares = parts[labels == label] ** 2
        second, fourth = squares.sum(axis=0), np.maximum((squares**2).sum(axis=0), 1e-300)
        blur = np.maximum(1 - NUMBERS_PER_SAMPLE * second**2 / fourth / numbers, 0)
        typical = np.sqrt(fourth / np.maximum(second, 1e-300))
        steps = np.maximum(steps, np.where(second > 0, PUSHES * blur * typical, 0))
    return steps


def whole_count(features: int, rule: MeanRule) -> int:
    """Return the fewest samples of which all of a mean is shown, rounded if need be."""
    if rule.exact:
        return max(1, rule.least)
    root = PUSHES * math.sqrt(features)
    # Where blur * root is no more than the count.
    return max(rule.least, math.ceil(root / (1 + root * NUMBERS_PER_SAMPLE / features)))


def check_batch(inputs: Tensor, labels: Tensor, num_classes: int) -> None:
    """Refuse inputs that are not finite, and labels of no class."""
    if not bool(torch.isfinite(inputs).all()):
        raise SpaceError("inputs", "finite values", "NaN or inf")
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < num_classes):
        got = f"{int(labels.min())} to {int(labels.max())}"
        raise SpaceError("labels", f"0 to {num_classes - 1}", got)


def is_rank(value: object) -> bool:
    """Return whether something can be a `Rank`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value >= 1 if whole else value in ("auto", "full")  # type: ignore[operator]
