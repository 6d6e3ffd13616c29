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
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.moments.automatic_rank import NUMBERS_PER_SAMPLE, PUSHES
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.moments.low_rank import top_eigenpairs
from gems_flwr.moments.sample_covariance import SampleCovariance
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


class ClassSource(Protocol):
    """What the means of small components are made from."""

    counts: NDArray[Any]
    features: int

    def mean_and_variance(self, component: int) -> tuple[Float, float]:
        """Return the mean (D,) of a component, and its total variance."""
        ...

    def frame(self, large: NDArray[np.bool_]) -> Frame:
        """Return what some components, at least one, have in common."""
        ...


class Frame(Protocol):
    """The mean of a node's larger classes, and the directions in which they vary."""

    center: Float

    def leading(self, numbers: int) -> Float:
        """Return the directions (D, numbers) in which they vary most, falling."""
        ...


def small_means(
    source: ClassSource, small: NDArray[np.bool_], rule: MeanRule
) -> tuple[NDArray[np.bool_], Float]:
    """Return which of the small components are shown, and the means of those.

    Parameters
    ----------
    source : ClassSource
        The sums of one node (`SummedClasses`), or its samples (`SampledClasses`).
    small : bool array of shape (components,)
        Which components are too small for a covariance.
    rule : MeanRule
        How much is shown.

    Returns
    -------
    tuple
        A bool array of shape (components,), and means of shape (shown, D).
    """
    shown = small & (source.counts >= max(1, rule.least))
    found: dict[int, Float] = {}
    partly: dict[int, Float] = {}
    for component in np.flatnonzero(shown).tolist():
        mean, variance = source.mean_and_variance(component)
        whole = whole_mean(mean, float(source.counts[component]), variance, rule)
        if whole is None:
            partly[component] = mean
        else:
            found[component] = whole
    if partly and not small.all():
        found |= _in_frame(partly, source, source.frame(~small))
    for component in partly.keys() - found.keys():
        shown[component] = False
    means = [found[component] for component in np.flatnonzero(shown).tolist()]
    return shown, np.reshape(means, (-1, source.features))


def _in_frame(means: Mapping[int, Float], source: ClassSource, frame: Frame) -> dict[int, Float]:
    """Return means as they are in as many directions as may be shown, the others' in the rest."""
    numbers = {c: shown_numbers(int(source.counts[c]), source.features) for c in means}
    directions = frame.leading(max(numbers.values()))
    seen = {}
    for component, mean in means.items():
        own = directions[:, : numbers[component]]
        seen[component] = np.asarray(frame.center + own @ (own.T @ (mean - frame.center)))
    return seen


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


class SummedClasses:
    """Components of which the sums are known."""

    def __init__(self, sums: ClassSums) -> None:
        self.sums, self.counts, self.features = sums, sums.counts, sums.sums.shape[1]

    def mean_and_variance(self, component: int) -> tuple[Float, float]:
        """Return the mean (D,) of a component, and its total variance."""
        count = float(self.counts[component])
        mean = self.sums.sums[component] / count
        squares = np.diag(self.sums.outers[component]) / count
        return mean, float(np.maximum(squares - mean**2, 0).sum())

    def frame(self, large: NDArray[np.bool_]) -> Frame:
        """Return what some components, at least one, have in common."""
        return _SummedFrame(self.sums, large)


class _SummedFrame:
    def __init__(self, sums: ClassSums, large: NDArray[np.bool_]) -> None:
        counts = sums.counts[large]
        means = sums.sums[large] / counts[:, None]
        self.center: Float = means.mean(axis=0)
        within = sums.outers[large].sum(axis=0) - (means * counts[:, None]).T @ means
        self._within = (within + within.T) / (2 * counts.sum())

    def leading(self, numbers: int) -> Float:
        values, vectors, _ = top_eigenpairs(self._within, numbers)
        return vectors[:, np.argsort(-values)]


class SampledClasses:
    """Components of which the samples are there: no D x D matrix is made.

    Parameters
    ----------
    inputs : tensor of shape (all, D)
        Samples.
    rows : sequence of int tensors
        Which of them belong to each component.
    device : torch.device, optional
        Where to compute; by default where the samples are.
    """

    def __init__(
        self, inputs: Tensor, rows: Sequence[Tensor], device: torch.device | None = None
    ) -> None:
        self.inputs, self.rows, self.features = inputs, rows, inputs.shape[1]
        self.device = device
        self.counts = np.array([len(each) for each in rows], dtype=np.int64)

    def mean_and_variance(self, component: int) -> tuple[Float, float]:
        """Return the mean (D,) of a component, and its total variance."""
        covariance = SampleCovariance(self.inputs, self.rows[component], device=self.device)
        return covariance.mean, float(covariance.variances.sum())

    def frame(self, large: NDArray[np.bool_]) -> Frame:
        """Return what some components, at least one, have in common."""
        classes = [self.inputs[self.rows[c]] for c in np.flatnonzero(large).tolist()]
        return _SampledFrame(classes, self.device)


class _SampledFrame:
    def __init__(self, classes: Sequence[Tensor], device: torch.device | None = None) -> None:
        self._device = device
        means = [samples.double().mean(dim=0) for samples in classes]
        self.center: Float = np.stack([mean.cpu().numpy() for mean in means]).mean(axis=0)
        self._centered = torch.cat([s - m.to(s) for s, m in zip(classes, means, strict=True)])

    def leading(self, numbers: int) -> Float:
        rows = torch.arange(len(self._centered), device=self._centered.device)
        covariance = SampleCovariance(self._centered, rows, device=self._device)
        _, vectors = covariance.leading(numbers)
        return np.asarray(vectors.flip(1).cpu().numpy())
