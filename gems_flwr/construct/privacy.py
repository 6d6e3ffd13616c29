"""Differentially private release of class moments.

2018, Section 3.3, names differential privacy as future work. Inputs are clipped to length B;
then one sample changes, in the one class it belongs to, the count by 1, the sum over B by at
most 1 and the outer product over B^2 by at most 1 (Frobenius): together at most sqrt(3).
Gaussian noise of the exact standard deviation for (epsilon, delta) (Balle and Wang 2018,
Theorem 8) is added to all three; what follows (symmetry, eigenvalues cut at zero, low
rank) is post-processing and costs nothing.

The guarantee is for adding or removing one sample of one node. Which classes a node
releases must be fixed without looking at the data: ``classes`` is public knowledge, and a
class in it without samples is released as noise and dropped if its noisy count is low.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from torch import Tensor

from gems_flwr.construct.moments import ClassSums, in_chunks, sum_classes


@dataclasses.dataclass(frozen=True)
class PrivateRelease:
    """Parameters of a differentially private release.

    Parameters
    ----------
    epsilon : float
        Privacy loss, above 0.
    delta : float
        Chance of a larger loss, in (0, 1).
    clip : float
        Length B to which inputs are clipped, above 0.
    classes : tuple of int, optional
        Classes released; those of the data if left out, which then are public.
    """

    epsilon: float
    delta: float
    clip: float
    classes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, high in (("epsilon", math.inf), ("delta", 1.0), ("clip", math.inf)):
            value = getattr(self, name)
            if not 0 < value < high:
                raise ValueError(f"{name}: expected a number in (0, {high:g}), got {value}")

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, in units of the scaled moments."""
        return gaussian_noise(self.epsilon, self.delta, math.sqrt(3))


def gaussian_noise(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the smallest noise that makes a Gaussian release (epsilon, delta)-private."""

    def excess(log_sigma: float) -> float:
        ratio = sensitivity / math.exp(log_sigma)
        first = ndtr(ratio / 2 - epsilon / ratio)
        second = math.exp(epsilon + log_ndtr(-ratio / 2 - epsilon / ratio))
        return float(first - second - delta)

    low, high = math.log(sensitivity) - 12, math.log(sensitivity) + 20
    # The upper side of the bracket, so that rounding never spends more than was promised.
    return math.exp(float(brentq(excess, low, high, xtol=1e-10)) + 1e-9)


def private_sums(
    inputs: Tensor, labels: Tensor, num_classes: int, release: PrivateRelease, seed: int
) -> ClassSums:
    """Return clipped class sums with Gaussian noise, covariances made semi-definite.

    Parameters
    ----------
    inputs : tensor of shape (n, D)
        Inputs of the linear layer.
    labels : int tensor of shape (n,)
        True classes.
    num_classes : int
        Classes of the task.
    release : PrivateRelease
        Privacy parameters.
    seed : int
        Seed of the noise; must be secret, or there is no privacy.
    """
    lengths = inputs.norm(dim=1, keepdim=True).clamp_min(1e-30)
    clipped = inputs * (release.clip / lengths).clamp_max(1.0)
    held = sum_classes(in_chunks(clipped, labels), num_classes)
    classes = np.array(sorted(release.classes or held.labels.tolist()), dtype=np.int64)
    generator = np.random.default_rng(seed)
    width, sigma, clip = inputs.shape[1], release.noise, release.clip
    counts, sums = np.zeros(len(classes)), np.zeros((len(classes), width))
    outers = np.zeros((len(classes), width, width))
    for row, label in enumerate(classes):
        where = np.flatnonzero(held.labels == label)
        if len(where):
            counts[row], sums[row] = held.counts[where[0]], held.sums[where[0]]
            outers[row] = held.outers[where[0]]
        counts[row] += sigma * generator.standard_normal()
        sums[row] += sigma * clip * generator.standard_normal(width)
        # Symmetrised noise: variance sigma^2 on the diagonal, sigma^2 / 2 off it, which is
        # what the Frobenius norm of a symmetric matrix asks for.
        square = generator.standard_normal((width, width))
        upper = np.triu(square, 1) / math.sqrt(2)
        outers[row] += sigma * clip**2 * (upper + upper.T + np.diag(np.diag(square)))
    keep = counts >= 1
    noisy = ClassSums(num_classes, classes[keep], counts[keep], sums[keep], outers[keep])
    return _semi_definite(noisy, (release.epsilon, release.delta))


def _semi_definite(noisy: ClassSums, privacy: tuple[float, float]) -> ClassSums:
    """Cut the negative eigenvalues of the covariances and keep the privacy statement."""
    means, covariances = noisy.moments()
    outers = np.empty_like(noisy.outers)
    for row, covariance in enumerate(covariances):
        values, vectors = (t.numpy() for t in torch.linalg.eigh(torch.from_numpy(covariance)))
        repaired = (vectors * np.maximum(values, 0)) @ vectors.T
        outers[row] = noisy.counts[row] * (repaired + np.outer(means[row], means[row]))
    return dataclasses.replace(noisy, outers=outers, privacy=privacy)
