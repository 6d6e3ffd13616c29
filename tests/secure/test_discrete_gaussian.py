"""The sampler draws from the distribution that it says."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2

from gems_flwr.errors import OptionError
from gems_flwr.secure.discrete_gaussian import LARGEST, discrete_gaussian


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.7, 3.0, 8.0, 20.0])
def test_draws_have_the_exact_probabilities(sigma: float) -> None:
    """Chi-square against exp(-x^2 / 2 sigma^2) over its sum; 1e-4 is the test's own error."""
    size = 400_000
    drawn = discrete_gaussian(size, sigma, seed=3)
    values = np.arange(-int(40 * sigma), int(40 * sigma) + 1)
    chances = np.exp(-(values**2) / (2 * sigma**2))
    expected = size * chances / chances.sum()
    counts = np.bincount(drawn - values[0], minlength=len(values))
    likely = expected >= 10
    rest = np.array([expected[~likely].sum(), counts[~likely].sum()])
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    statistic += (rest[1] - rest[0]) ** 2 / rest[0]
    assert statistic < chi2.ppf(1 - 1e-4, int(likely.sum()))


@pytest.mark.parametrize("sigma", [1.0, 1e3, 2.0**20 + 0.5, LARGEST])
def test_moments_are_those_of_a_normal_distribution(sigma: float) -> None:
    """Deviations of the estimates over n draws: 1, sqrt 2 and sqrt 96 over the root of n."""
    drawn = discrete_gaussian(300_000, sigma, seed=11) / sigma
    root = np.sqrt(len(drawn))
    assert abs(drawn.mean()) < 5 / root
    assert abs((drawn**2).mean() - 1) < 5 * np.sqrt(2) / root + 1e-6
    assert abs((drawn**4).mean() - 3) < 5 * np.sqrt(96) / root + 1e-4
    assert abs((drawn > 0).mean() - (drawn < 0).mean()) < 5 / root


def test_secret_draws_differ_and_seeded_ones_do_not() -> None:
    first, second = discrete_gaussian(50, 100.0), discrete_gaussian(50, 100.0)
    assert (first != second).any()
    repeated = discrete_gaussian(50, 100.0, seed=1), discrete_gaussian(50, 100.0, seed=1)
    assert (repeated[0] == repeated[1]).all()
    assert discrete_gaussian(0, 2.0).shape == (0,)


@pytest.mark.parametrize("sigma", [0.0, 0.4, 2.0**41, np.nan])
def test_a_deviation_out_of_range_is_refused(sigma: float) -> None:
    with pytest.raises(OptionError, match=r"sigma must be from 0\.5"):
        discrete_gaussian(3, sigma)
