"""Class sums, and differentially private releases: of class moments, and of right answers.

2018, Section 3.3, names differential privacy as future work. Inputs are clipped to length B; then
one sample changes, in its class, the count by 1, the sum over B by at most 1 and the outer product
over B^2 by at most 1 (Frobenius): together at most sqrt(3). Gaussian noise of the exact standard
deviation for (epsilon, delta) (Balle and Wang 2018, Theorem 8) is added to all three, for *all*
classes that are released, and whether one is sent is decided by its noisy count; what follows is
post-processing. The guarantee is for one sample of one node more or less, and that of real numbers:
the lowest bits of floating-point noise are known to weaken it (Mironov 2012).

A Gaussian release whose sensitivity is mu deviations of its noise is mu-GDP, and squares of mu of
several releases add up, exactly (Dong, Roth and Su 2022, Corollary 3.3).
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

from gems_flwr.devices import exact_device
from gems_flwr.errors import OptionError
from gems_flwr.typing import Float

# Of count, scaled sum and scaled outer product together, for one sample more or less.
SENSITIVITY = math.sqrt(3)


@dataclasses.dataclass(frozen=True, eq=False)
class ClassSums:
    """Counts, sums and sums of outer products of some classes, with noise."""

    num_classes: int
    labels: NDArray[np.int64]
    counts: Float  # (classes,)
    sums: Float  # of the inputs (classes, D)
    outers: Float  # of their outer products (classes, D, D)
    privacy: tuple[float, float] | None = None  # epsilon and delta

    def moments(self) -> tuple[Float, Float]:
        """Return means (classes, D) and covariances (classes, D, D)."""
        counts = np.maximum(self.counts, 1)[:, None]
        means = self.sums / counts
        covariances = self.outers / counts[..., None] - means[:, :, None] * means[:, None, :]
        return means, (covariances + covariances.transpose(0, 2, 1)) / 2


# --- releases -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _GaussianRelease:
    """What releases have in common: (epsilon, delta), and noise in proportion to a sensitivity."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        for name, high in (("epsilon", math.inf), ("delta", 1.0), ("clip", math.inf)):
            value = getattr(self, name, 0.5)
            if not 0 < value < high:
                raise OptionError(f"{name}: expected a number in (0, {high:g}), got {value}")

    @property
    def sensitivity(self) -> float:
        """Length by which one sample changes the numbers of a release."""
        return SENSITIVITY

    @property
    def noise(self) -> float:
        """Standard deviation of the noise of every number."""
        return gaussian_noise(self.epsilon, self.delta, self.sensitivity)

    @property
    def squared_mu(self) -> float:
        """What a release adds to the privacy spent; see `spent_epsilon`."""
        return (self.sensitivity / self.noise) ** 2


@dataclasses.dataclass(frozen=True)
class PrivateRelease(_GaussianRelease):
    """Parameters of differentially private class moments.

    Privacy loss epsilon and chance delta of a larger one; inputs are clipped to length `clip`.
    Released `classes` are public knowledge; all classes of the task if left out.
    """

    clip: float
    classes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class PrivateChoice(_GaussianRelease):
    """Parameters of a differentially private judgement of one model or several.

    One sample changes the number of samples of its class by 1 and the number of right answers of
    each of k candidates by at most 1: together at most sqrt(k + 1), whatever the number of classes.
    """

    candidates: int = 1

    @property
    def sensitivity(self) -> float:
        """Of the counts."""
        return math.sqrt(self.candidates + 1)

    def noised(self, seen: Float, right: Float, seed: int | None = None) -> tuple[Float, Float]:
        """Return noisy counts of samples (K,) and of right answers (candidates, K) per class.

        None is negative, and there are no more right answers than samples.
        """
        normal = normal_source(seed)
        total = np.maximum(0.0, seen + self.noise * normal(seen.shape))
        return total, np.clip(right + self.noise * normal(right.shape), 0.0, total)


def spent_epsilon(squared_mu: float, delta: float) -> float:
    """Return the epsilon, at a delta, of Gaussian releases whose squared mu add up to a number."""
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


def normal_source(seed: int | None) -> Callable[..., NDArray[np.float64]]:
    """Return what draws normal noise: from a seed for simulations, else unpredictably."""
    return secret_normal if seed is None else np.random.default_rng(seed).standard_normal


def secret_normal(shape: int | tuple[int, ...]) -> NDArray[np.float64]:
    """Return standard normal numbers that cannot be repeated.

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

    Sums are computed on `device`, noise never is; for its `seed` see `build_cone`.
    """
    # A refusal would tell of single samples: what is not a number counts as zero.
    inputs = torch.nan_to_num(inputs, 0.0, 0.0, 0.0)
    where = exact_device(inputs.device if device is None else device)
    lengths = inputs.norm(dim=1, keepdim=True).clamp_min(1e-30)
    clipped = inputs * (release.clip / lengths).clamp_max(1.0)
    classes = np.array(sorted(release.classes or range(num_classes)), dtype=np.int64)
    normal, width = normal_source(seed), inputs.shape[1]
    sigma, clip = release.noise, release.clip
    counts, sums = np.zeros(len(classes)), np.zeros((len(classes), width))
    outers = np.zeros((len(classes), width, width))
    for row, label in enumerate(classes.tolist()):
        # A node without any sample answers like one with a single sample.
        mine = clipped[labels == label].to(where).double()
        counts[row] = len(mine) + sigma * float(normal(1)[0])
        sums[row] = mine.sum(dim=0).cpu().numpy() + sigma * clip * normal(width)
        # Symmetrised noise: variance sigma^2 on the diagonal, sigma^2 / 2 off it, which is
        # what the Frobenius norm of a symmetric matrix asks for.
        square = normal((width, width))
        upper = np.triu(square, 1) / math.sqrt(2)
        noise = upper + upper.T + np.diag(np.diag(square))
        outers[row] = (mine.T @ mine).cpu().numpy() + sigma * clip**2 * noise
    keep = counts >= 1
    noisy = ClassSums(num_classes, classes[keep], counts[keep], sums[keep], outers[keep])
    means, covariances = noisy.moments()
    repaired = np.empty_like(noisy.outers)
    for row, covariance in enumerate(covariances):
        values, vectors = (t.numpy() for t in torch.linalg.eigh(torch.from_numpy(covariance)))
        positive = (vectors * np.maximum(values, 0)) @ vectors.T
        repaired[row] = noisy.counts[row] * (positive + np.outer(means[row], means[row]))
    privacy = (release.epsilon, release.delta)
    return dataclasses.replace(noisy, outers=repaired, privacy=privacy)
