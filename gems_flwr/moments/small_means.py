"""Classes of too few samples for a covariance go as count and mean, and how much of a mean that is.

A class that every node withholds is a class that the model never predicts. A mean of few samples
tells who is among them, though: k exact numbers from n samples let one who knows the distribution
tell members from others with an AUC of Phi(sqrt(k / 2n)), if it is normal (see
`gems_flwr.moments.automatic_rank`). So of the mean of n samples of D features a node shows

- all of it while D is at most 0.9 n;
- all of it, *rounded* as the automatic rule rounds, where a step is no longer than a typical
  deviation of a feature;
- of fewer samples at most 0.75 n numbers: where the mean lies in the directions in which the node's
  *other* classes vary most, around the mean of those classes. What is left says nothing about the
  small class, for it is made from other samples;
- nothing below `MEAN_COUNT` samples, or where there is no other class to take directions from.

An attacker who has 2,500 other samples of the class, and knows the directions, tells members from
others by such a mean with an AUC of Phi(sqrt(0.375)) = 0.73 by that formula, whatever n; by all of
it with 0.999 (16 samples of 784 pixels). Measured as in ``python -m simulations.reproduce leaks``.

Decided here: the directions are principal ones of all samples of the other classes around their own
means. A node whose limits open covariances to any rank (`NodeLimits(largest_rank=…)`) shows such
means exactly; it has decided to show more than that of larger classes.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from gems_flwr.moments.automatic_rank import NUMBERS_PER_SAMPLE, PUSHES
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.moments.low_rank import top_eigenpairs
from gems_flwr.spaces.covariance import rounded
from gems_flwr.typing import Float

# Fewer than of all moments, for here nothing is rounded on top of it.
MEAN_NUMBERS_PER_SAMPLE = 0.75
# Fewest samples of a mean, unless a node's own limits say otherwise.
MEAN_COUNT = 8


@dataclasses.dataclass(frozen=True)
class MeanRule:
    """How a node shows the means of small classes.

    Parameters
    ----------
    least : int
        Fewest samples of a mean, at least 1.
    exact : bool
        Whether they are shown as they are.
    """

    least: int = MEAN_COUNT
    exact: bool = False


def shown_numbers(count: int, features: int) -> int:
    """Return how many exact numbers the mean of so many samples may have."""
    return min(features, int(MEAN_NUMBERS_PER_SAMPLE * count))


def small_means(
    sums: ClassSums, small: NDArray[np.bool_], rule: MeanRule
) -> tuple[NDArray[np.bool_], Float]:
    """Return which of the small components are shown, and the means of those.

    Parameters
    ----------
    sums : ClassSums
        Of one node.
    small : bool array of shape (components,)
        Which components are too small for a covariance.
    rule : MeanRule
        How much is shown.

    Returns
    -------
    tuple
        A bool array of shape (components,), and means of shape (shown, D).
    """
    shown = small & (sums.counts >= max(1, rule.least))
    means, features = [], sums.sums.shape[1]
    frame = _Frame(sums, ~small)
    for component in np.flatnonzero(shown):
        count = float(sums.counts[component])
        mean = sums.sums[component] / count
        squares = np.diag(sums.outers[component]) / count
        whole = whole_mean(mean, count, float(np.maximum(squares - mean**2, 0).sum()), rule)
        if whole is None and frame.there:
            whole = frame.seen(mean, shown_numbers(int(count), features))
        if whole is None:
            shown[component] = False
        else:
            means.append(whole)
    return shown, np.reshape(means, (-1, features))


def whole_mean(mean: Float, count: float, variance: float, rule: MeanRule) -> Float | None:
    """Return all of a mean, rounded if need be; None where rounding would leave nothing of it.

    Parameters
    ----------
    mean : array of shape (D,)
        Of a class's samples, or of some of them.
    count : float
        How many there are.
    variance : float
        Their total variance.
    rule : MeanRule
        How much is shown.
    """
    blur = max(0.0, 1 - NUMBERS_PER_SAMPLE * count / len(mean))
    if rule.exact or blur == 0:
        return mean
    step = blur * PUSHES * math.sqrt(variance) / count
    return rounded(mean, step) if step <= math.sqrt(variance / len(mean)) else None


def whole_count(features: int, rule: MeanRule) -> int:
    """Return the fewest samples of which all of a mean is shown; see `whole_mean`."""
    if rule.exact:
        return max(1, rule.least)
    root = PUSHES * math.sqrt(features)
    # Where blur * root is no more than the count.
    return max(rule.least, math.ceil(root / (1 + root * NUMBERS_PER_SAMPLE / features)))


class _Frame:
    """The mean of a node's larger classes, and the directions in which they vary."""

    def __init__(self, sums: ClassSums, large: NDArray[np.bool_]) -> None:
        self.there = bool(large.any())
        if not self.there:
            return
        counts = sums.counts[large]
        means = sums.sums[large] / counts[:, None]
        self.center = means.mean(axis=0)
        within = sums.outers[large].sum(axis=0) - (means * counts[:, None]).T @ means
        self._within = (within + within.T) / (2 * counts.sum())
        self._vectors: Float = np.zeros((len(self.center), 0))

    def seen(self, mean: Float, numbers: int) -> Float:
        """Return a mean as it is in so many directions, and the others' in the rest."""
        if self._vectors.shape[1] < numbers:
            values, vectors, _ = top_eigenpairs(self._within, numbers)
            self._vectors = vectors[:, np.argsort(-values)]
        directions = self._vectors[:, :numbers]
        return np.asarray(self.center + directions @ (directions.T @ (mean - self.center)))
