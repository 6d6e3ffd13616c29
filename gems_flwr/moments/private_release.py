"""Differentially private release of class moments.

2018, Section 3.3, names differential privacy as future work. Inputs are clipped to length B;
then one sample changes, in the one class it belongs to, the count by 1, the sum over B by at
most 1 and the outer product over B^2 by at most 1 (Frobenius): together at most sqrt(3).
Gaussian noise of the exact standard deviation for (epsilon, delta) (Balle and Wang 2018,
Theorem 8) is added to all three; what follows (symmetry, eigenvalues cut at zero, low
rank) is post-processing and costs nothing.

The guarantee is for adding or removing one sample of one node. Nothing in a release depends on
which classes a node holds: noise is added to *all* classes that are released, with samples or
without, and whether one is sent is decided by its noisy count. Noise comes from the operating
system's cryptographic generator, in double precision: the guarantee is that of real numbers, and
the lowest bits of floating-point noise are known to weaken it (Mironov 2012).

Several releases compose: a Gaussian release whose sensitivity is mu deviations of its noise is
mu-GDP, and squares of mu add up, exactly (Dong, Roth and Su 2022, Corollary 3.3). `spent_epsilon`
turns their sum into an epsilon.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri
from torch import Tensor

from gems_flwr.errors import OptionError
from gems_flwr.moments.class_sums import ClassSums, in_chunks, sum_classes

# Of count, scaled sum and scaled outer product together, for one sample more or less.
SENSITIVITY = math.sqrt(3)


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
        Classes released, which then are public knowledge; all classes of the task if left out.
    """

    epsilon: float
    delta: float
    clip: float
    classes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_private(self.epsilon, self.delta)
        if not 0 < self.clip < math.inf:
            raise OptionError(f"clip: expected a number in (0, inf), got {self.clip}")

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, in units of the scaled moments."""
        return gaussian_noise(self.epsilon, self.delta, SENSITIVITY)

    @property
    def squared_mu(self) -> float:
        """What a release adds to the privacy spent; see `spent_epsilon`."""
        return (SENSITIVITY / self.noise) ** 2


@dataclasses.dataclass(frozen=True)
class PrivateScore:
    """Parameters of a differentially private accuracy.

    One sample changes the number of right answers by at most 1 and the number of answers by 1.
    Parameters as in `PrivateRelease`.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        _check_private(self.epsilon, self.delta)

    @property
    def noise(self) -> float:
        """Standard deviation of the noise of both numbers."""
        return gaussian_noise(self.epsilon, self.delta, math.sqrt(2))

    @property
    def squared_mu(self) -> float:
        """What a release adds to the privacy spent; see `spent_epsilon`."""
        return 2 / self.noise**2

    def noised(self, right: int, total: int, seed: int | None = None) -> float:
        """Return a noisy share of right answers, from 0 to 1; `seed` as in `private_sums`."""
        first, second = normal_source(seed)(2)
        share = (right + self.noise * first) / max(1.0, total + self.noise * second)
        return float(min(1.0, max(0.0, share)))


def spent_epsilon(squared_mu: float, delta: float) -> float:
    """Return the epsilon, at a delta, of Gaussian releases whose squared mu add up to a number.

    Parameters
    ----------
    squared_mu : float
        The sum, at least 0.
    delta : float
        Chance of a larger loss, in (0, 1).
    """
    mu = math.sqrt(squared_mu)
    if mu == 0 or _excess(0.0, mu, delta) <= 0:
        return 0.0
    high = 1.0
    while _excess(high, mu, delta) > 0:
        high *= 2
    return float(brentq(lambda epsilon: _excess(epsilon, mu, delta), 0.0, high, xtol=1e-10)) + 1e-9


def _excess(epsilon: float, mu: float, delta: float) -> float:
    """Return by how much mu-GDP misses (epsilon, delta) (Balle and Wang 2018, Theorem 8)."""
    first = ndtr(mu / 2 - epsilon / mu)
    second = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return float(first - second - delta)


def gaussian_noise(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the smallest noise that makes a Gaussian release (epsilon, delta)-private."""

    def excess(log_sigma: float) -> float:
        return _excess(epsilon, sensitivity / math.exp(log_sigma), delta)

    low, high = math.log(sensitivity) - 12, math.log(sensitivity) + 20
    # The upper side of the bracket, so that rounding never spends more than was promised.
    return math.exp(float(brentq(excess, low, high, xtol=1e-10)) + 1e-9)


def _check_private(epsilon: float, delta: float) -> None:
    for name, value, high in (("epsilon", epsilon, math.inf), ("delta", delta, 1.0)):
        if not 0 < value < high:
            raise OptionError(f"{name}: expected a number in (0, {high:g}), got {value}")


def normal_source(seed: int | None) -> Callable[..., NDArray[np.float64]]:
    """Return what draws normal noise: for simulations from a seed, else so that nobody can."""
    return secret_normal if seed is None else np.random.default_rng(seed).standard_normal


def secret_normal(shape: int | tuple[int, ...]) -> NDArray[np.float64]:
    """Return standard normal numbers that nobody can repeat.

    From 53 random bits each, by the inverse of the normal distribution function.
    """
    size = int(np.prod(shape))
    bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(11)
    return np.asarray(ndtri((bits + 0.5) * 2.0**-53).reshape(shape))


def private_sums(
    inputs: Tensor,
    labels: Tensor,
    num_classes: int,
    release: PrivateRelease,
    seed: int | None = None,
    device: torch.device | None = None,
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
    seed : int, optional
        Seed of the noise, for simulations: whoever knows it can subtract the noise. Without it
        noise comes from the operating system's cryptographic generator.
    device : torch.device, optional
        Where sums are computed; noise never is.
    """
    lengths = inputs.norm(dim=1, keepdim=True).clamp_min(1e-30)
    clipped = inputs * (release.clip / lengths).clamp_max(1.0)
    # A node without any sample answers like one with a single sample.
    chunks = in_chunks(clipped, labels, device=device)
    held = sum_classes(chunks, num_classes) if len(labels) else None
    classes = np.array(sorted(release.classes or range(num_classes)), dtype=np.int64)
    normal = normal_source(seed)
    width, sigma, clip = inputs.shape[1], release.noise, release.clip
    counts, sums = np.zeros(len(classes)), np.zeros((len(classes), width))
    outers = np.zeros((len(classes), width, width))
    for row, label in enumerate(classes):
        if held is not None and label in held.labels:
            component = int(np.flatnonzero(held.labels == label)[0])
            counts[row], sums[row] = held.counts[component], held.sums[component]
            outers[row] = held.outers[component]
        counts[row] += sigma * float(normal(1)[0])
        sums[row] += sigma * clip * normal(width)
        # Symmetrised noise: variance sigma^2 on the diagonal, sigma^2 / 2 off it, which is
        # what the Frobenius norm of a symmetric matrix asks for.
        square = normal((width, width))
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
