"""Differential privacy of a sum to which every node adds its share of the noise.

The server of a secure sum sees the total alone, so the noise of the total is what counts: with h
shares of deviation ``s`` in it, ``s sqrt(h)``. The promise, to all but the nodes' own machines, is
(epsilon, delta) for one sample more or less on any node, where h is the fewest nodes that a sum is
opened with, less those who collude with the server (who subtract their own shares). `SharedNoise`
finds the share for that, and what is left if more of them collude.

Accounting. Sums are whole numbers whose sensitivity is exact, and the noise is that of
`discrete_gaussian`. A release is taken for one with a Gaussian that is rounded afterwards: rounding
is post-processing, and such releases compose by their squared mu (see
`gems_flwr.spaces.cone.private`). The difference are factors next to 1:

- A sum of n discrete Gaussians of deviation s is within a factor of ``exp(10 sum_k exp(-2 pi^2 s^2
  k / (k + 1)))`` of one of n times the variance (Kairouz, Liu and Steinke 2021, *The Distributed
  Discrete Gaussian Mechanism*); the exponent is below 1e-15 for s from 2 on.
- With u uniform on a cell around x, the rounded Gaussian has there the density at x times
  ``E cosh(x u / s^2) exp(-u^2 / 2 s^2)``, from ``exp(-1 / 24 s^2)`` (Jensen; cosh is above 1) to
  ``exp(x^2 / 24 s^4)`` (``sinh(a/2) / (a/2) <= exp(a^2 / 24)``), and the sum of squares of d
  Gaussians is below ``d + 2 sqrt(d t) + 2 t`` but with a chance of ``exp(-t)`` (Laurent and Massart
  2000). By Poisson's formula the discrete Gaussian's norm is that of the density but for 1e-15.

`epsilon_cost` adds these up; a thousandth of epsilon and a hundredth of delta pay for them. Whether
a number wraps in its ring is post-processing, too: it costs digits, never privacy.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from gems_flwr.errors import OptionError, check_options
from gems_flwr.spaces.cone import gaussian_noise, spent_epsilon

# Of a node's share, on the grid: below, a sum of discrete Gaussians is something else.
SMALLEST_SHARE = 2.0
# Parts that pay for what noise is not exactly Gaussian.
EPSILON_PART, DELTA_PART = 0.001, 0.01
# Minus the logarithm of the chance that squares add up to more than is assumed.
_TAIL = 60.0
# Chance that any number of a total leaves its ring because of the noise.
WRAP_CHANCE = 1e-12


@dataclasses.dataclass(frozen=True)
class SharedNoise:
    """Noise that several nodes make together; there must be a node whose noise counts."""

    # Of all releases together.
    epsilon: float
    delta: float
    # How many are asked, and how many of them may give the server their noise, or add none.
    nodes: int
    colluders: int = 0
    # Fewest nodes in a sum that is opened; all of them if left out.
    fewest: int | None = None

    def __post_init__(self) -> None:
        rules = {
            "epsilon": (0 < self.epsilon < math.inf, "above 0"),
            "delta": (0 < self.delta < 1, "in (0, 1)"),
            "nodes": (self.nodes >= 1, "at least 1"),
            "colluders": (self.colluders >= 0, "at least 0"),
            "fewest": (self.fewest is None or 1 <= self.fewest <= self.nodes, "1 to all nodes"),
        }
        check_options(self, rules)
        if self.honest < 1:
            least = f"{self.colluders + 1} nodes and more has noise that counts"
            raise OptionError(
                f"with {self.colluders} colluders a sum over {least}; this one may have "
                f"{self.least_in_sum}"
            )

    @property
    def least_in_sum(self) -> int:
        """Fewest nodes in a sum that is opened."""
        return self.nodes if self.fewest is None else self.fewest

    @property
    def honest(self) -> int:
        """How many shares of noise the server cannot know, at least."""
        return self.least_in_sum - self.colluders

    @property
    def squared_mu(self) -> float:
        """What all releases together may spend."""
        epsilon, delta = (1 - EPSILON_PART) * self.epsilon, (1 - DELTA_PART) * self.delta
        return 1 / gaussian_noise(epsilon, delta, 1.0) ** 2

    def share(self, part: float) -> float:
        """Return a node's deviation, in sensitivities, in a release that spends this part."""
        return 1 / math.sqrt(self.squared_mu * part * self.honest)

    def epsilon_left(self, honest: int) -> float:
        """Return the epsilon that holds if so many shares of the noise count, at least 1."""
        spent = self.squared_mu * self.honest / honest
        return spent_epsilon(spent, (1 - DELTA_PART) * self.delta) / (1 - EPSILON_PART)

    def check_cost(self, cost: float) -> None:
        """Refuse noise so coarse that the part set aside does not pay the `epsilon_cost` of all."""
        if not (cost <= EPSILON_PART * self.epsilon and self.epsilon <= _TAIL / 2):
            raise OptionError(
                f"epsilon must be at most {_TAIL / 2:g}, and noise above a few steps of the grid, "
                f"got {self.epsilon:g} and noise whose rounding costs {cost:.2g} of it"
            )


def squared_mu_of(share: float, honest: int) -> float:
    """Return what a release spends: `honest` shares count, in units of its sensitivity."""
    return 1 / (honest * share**2)


def epsilon_cost(numbers: int, share: float, nodes: int) -> float:
    """Return what it costs of epsilon that a total's noise is not a rounded Gaussian, at most.

    `share` is the least deviation of a node's share, in steps of the grid; `nodes` shares count.
    """
    if share < SMALLEST_SHARE:
        least = f"at least {SMALLEST_SHARE:g} steps of the grid"
        raise OptionError(f"a node's share of the noise must be {least}, got {share:.3g}")
    k = np.arange(1, nodes)
    summed = 20 * numbers * float(np.exp(-2 * (math.pi * share) ** 2 * k / (k + 1)).sum())
    variance = nodes * share**2
    squares = numbers + 2 * math.sqrt(numbers * _TAIL) + 2 * _TAIL
    # Rounding moves each number by half a step at most.
    longest = math.sqrt(squares) + math.sqrt(numbers / variance) / 2
    norm = 4 * numbers * math.exp(-2 * math.pi**2 * variance)
    return summed + norm + (numbers + longest**2) / (24 * variance)


def tail(numbers: int, deviation: float) -> float:
    """Return what none of a total's numbers' noise exceeds, but with a chance of `WRAP_CHANCE`."""
    # Discrete Gaussians have no heavier tails than the Gaussian.
    return deviation * math.sqrt(2 * math.log(2 * numbers / WRAP_CHANCE))


# --- the sampler ----------------------------------------------------------------------------

SMALLEST, LARGEST = 0.5, 2.0**40
# Candidates at a time: more would not fit a processor's cache.
_CHUNK = 2**17

_Source = Callable[[int], NDArray[np.uint64]]


def discrete_gaussian(size: int, sigma: float, seed: int | None = None) -> NDArray[np.int64]:
    """Return independent draws of the discrete Gaussian distribution around 0.

    ``P(x) ~ exp(-x^2 / (2 sigma^2))`` on the whole numbers, by Algorithm 3 of Canonne, Kamath and
    Steinke 2020, *The Discrete Gaussian for Differential Privacy*: a discrete Laplace number of
    scale ``t = floor(sigma) + 1`` is taken with probability ``exp(-(|y| - sigma^2 / t)^2 / (2
    sigma^2))``; it is ``u + t v`` with a uniform ``u`` below t, taken with probability
    ``exp(-u / t)``, and a geometric ``v``. Whole numbers have no lowest bits that could show
    anything, which floating-point noise has (Mironov 2012). `sigma`, from 0.5 to 2^40, is above 1
    the standard deviation to 7 digits.

    The three exponentials are in floating point and compared with 53 random bits, where the
    authors compute with fractions: a number's distribution is off by less than 2^-50 in total
    variation, which no account includes; over three million numbers that is 3e-9.

    A `seed`, of NumPy's PCG64, is for simulations: whoever knows it can subtract the noise. By
    default bits are those of ChaCha20 under a key of the operating system's.
    """
    if not SMALLEST <= sigma <= LARGEST:
        raise OptionError(f"sigma must be from {SMALLEST:g} to {LARGEST:g}, got {sigma}")
    source = _secret_words() if seed is None else _seeded_words(seed)
    found: list[NDArray[np.int64]] = []
    lacking = size
    while lacking > 0:
        # About half of the candidates are taken.
        taken = _candidates(min(_CHUNK, 2 * lacking + 64), sigma, source)[:lacking]
        found.append(taken)
        lacking -= len(taken)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _candidates(count: int, sigma: float, source: _Source) -> NDArray[np.int64]:
    """Return those of some candidates that are taken."""
    scale = int(sigma) + 1
    below = _below(scale, count, source)
    below = below[_unit(source(len(below))) < np.exp(-below / scale)]
    # The whole part of an exponential number: geometric, with a ratio of 1 / e.
    above = np.floor(-np.log(_unit(source(len(below))))).astype(np.int64)
    length = below + scale * above
    # Lowest bits say the sign: what `_unit` reads are the upper 53.
    words = source(len(length))
    negative = (words & np.uint64(1)).astype(bool)
    chance = np.exp(-(((length - sigma**2 / scale) / sigma) ** 2) / 2)
    # 0 has two signs, and counts once.
    keep = (_unit(words) < chance) & ~(negative & (length == 0))
    return np.asarray(np.where(negative, -length, length)[keep], dtype=np.int64)


def _below(scale: int, count: int, source: _Source) -> NDArray[np.int64]:
    """Return uniform whole numbers below a scale, `count` at most: those that are too large go."""
    bits = max(1, (scale - 1).bit_length())
    drawn = (source(count) >> np.uint64(64 - bits)).astype(np.int64)
    return drawn[drawn < scale]


def _unit(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the upper 53 bits as numbers in (0, 1)."""
    return np.asarray(((words >> np.uint64(11)) + 0.5) * 2.0**-53, dtype=np.float64)


def _secret_words() -> _Source:
    stream = Cipher(ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()
    return lambda count: np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8")


def _seeded_words(seed: int) -> _Source:
    generator = np.random.PCG64(seed)
    return lambda count: np.asarray(generator.random_raw(count), dtype=np.uint64)
