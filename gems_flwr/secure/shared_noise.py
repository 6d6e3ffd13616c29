"""Differential privacy of a sum to which every node adds its share of the noise.

The server of a secure sum sees the total alone, so the noise of the total is what counts: with h
shares of deviation ``s`` in it, ``s sqrt(h)``. What is promised, to everybody but the nodes'
own machines, is (epsilon, delta) for one sample more or less on any node, where h is the number of
nodes that are sure to be in the sum and to add noise that nobody else knows: the fewest that a sum
is opened with, less those who collude with the server (who know their own shares and subtract
them). `SharedNoise` finds the share for that, and says what is left if there are more of them.

Accounting. Sums are whole numbers whose sensitivity is exact (`gems_flwr.moments.whole_sums`), and
the noise is that of `gems_flwr.secure.discrete_gaussian`. A release is taken for one with a
Gaussian that is rounded afterwards: rounding is post-processing, and such releases compose by their
squared mu (see `gems_flwr.moments.private_release`). The difference are factors next to 1:

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

import numpy as np

from gems_flwr.errors import OptionError
from gems_flwr.moments.private_release import gaussian_noise, spent_epsilon

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
    """Noise that several nodes make together.

    Parameters
    ----------
    epsilon : float
        Privacy loss of all releases together, above 0.
    delta : float
        Chance of a larger loss, in (0, 1).
    nodes : int
        How many are asked, at least 1.
    colluders : int, default 0
        How many of them may tell the server their noise, or add none.
    fewest : int, optional
        How many nodes there are at least in a sum that is opened; all of them if left out.

    Raises
    ------
    OptionError
        If nobody is left whose noise counts, or a number is out of range.

    Examples
    --------
    Ten nodes, of which three may be lost and two may collude: five shares make the noise.

    >>> from gems_flwr.secure.shared_noise import SharedNoise
    >>> noise = SharedNoise(epsilon=1.0, delta=1e-5, nodes=10, colluders=2, fewest=7)
    >>> noise.honest
    5
    >>> round(noise.epsilon_left(honest=5), 2), round(noise.epsilon_left(honest=4), 2)
    (1.0, 1.13)
    """

    epsilon: float
    delta: float
    nodes: int
    colluders: int = 0
    fewest: int | None = None

    def __post_init__(self) -> None:
        rules = {
            "epsilon": (0 < self.epsilon < math.inf, "above 0"),
            "delta": (0 < self.delta < 1, "in (0, 1)"),
            "nodes": (self.nodes >= 1, "at least 1"),
            "colluders": (self.colluders >= 0, "at least 0"),
            "fewest": (self.fewest is None or 1 <= self.fewest <= self.nodes, "1 to all nodes"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise OptionError(f"{name} must be {allowed}, got {getattr(self, name)!r}")
        if self.honest < 1:
            raise OptionError(
                f"with {self.colluders} colluders a sum over {self.nodes - self.colluders + 1} "
                f"nodes and more has noise that counts; this one may have {self.least_in_sum}"
            )

    @property
    def least_in_sum(self) -> int:
        """How many nodes there are at least in a sum that is opened."""
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
        """Return the deviation of one node's noise in a release, in units of its sensitivity.

        Parameters
        ----------
        part : float
            The release's part of what may be spent, in (0, 1].
        """
        return 1 / math.sqrt(self.squared_mu * part * self.honest)

    def epsilon_left(self, honest: int) -> float:
        """Return the epsilon that holds if so many shares of the noise count, at least 1."""
        spent = self.squared_mu * self.honest / honest
        return spent_epsilon(spent, (1 - DELTA_PART) * self.delta) / (1 - EPSILON_PART)

    def check_cost(self, cost: float) -> None:
        """Refuse noise that is too coarse on its grid to count as Gaussian.

        Parameters
        ----------
        cost : float
            Of all releases together; see `epsilon_cost`.

        Raises
        ------
        OptionError
            If the part of epsilon that is set aside does not pay for it.
        """
        if not (cost <= EPSILON_PART * self.epsilon and self.epsilon <= _TAIL / 2):
            raise OptionError(
                f"epsilon must be at most {_TAIL / 2:g}, and noise above a few steps of the grid, "
                f"got {self.epsilon:g} and noise whose rounding costs {cost:.2g} of it"
            )


def squared_mu_of(share: float, honest: int) -> float:
    """Return what a release spends.

    Parameters
    ----------
    share : float
        Deviation of each node's noise in units of the release's sensitivity, above 0.
    honest : int
        How many shares count, at least 1.
    """
    return 1 / (honest * share**2)


def epsilon_cost(numbers: int, share: float, nodes: int) -> float:
    """Return what it costs of epsilon that a total's noise is not a rounded Gaussian, at most.

    Parameters
    ----------
    numbers : int
        In the total.
    share : float
        Deviation of every node's share, in steps of the grid; the least of them.
    nodes : int
        How many shares count.

    Raises
    ------
    OptionError
        If shares are smaller than two steps.
    """
    if share < SMALLEST_SHARE:
        raise OptionError(
            f"a node's share of the noise must be at least {SMALLEST_SHARE:g} steps of the grid, "
            f"got {share:.3g}"
        )
    k = np.arange(1, nodes)
    summed = 20 * numbers * float(np.exp(-2 * (math.pi * share) ** 2 * k / (k + 1)).sum())
    variance = nodes * share**2
    squares = numbers + 2 * math.sqrt(numbers * _TAIL) + 2 * _TAIL
    # Rounding moves each number by half a step at most.
    longest = math.sqrt(squares) + math.sqrt(numbers / variance) / 2
    norm = 4 * numbers * math.exp(-2 * math.pi**2 * variance)
    return summed + norm + (numbers + longest**2) / (24 * variance)


def tail(numbers: int, deviation: float) -> float:
    """Return what no number of a total's noise exceeds, but with a chance of `WRAP_CHANCE`.

    Parameters
    ----------
    numbers : int
        In the total, at least 1.
    deviation : float
        Of the total's noise. Discrete Gaussians have no heavier tails than the Gaussian.
    """
    return deviation * math.sqrt(2 * math.log(2 * numbers / WRAP_CHANCE))
