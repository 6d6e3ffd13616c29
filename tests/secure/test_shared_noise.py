"""What shared noise promises, checked against Google's dp-accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, norm

from gems_flwr.errors import OptionError
from gems_flwr.secure import (
    LARGEST,
    SharedNoise,
    discrete_gaussian,
    epsilon_cost,
    squared_mu_of,
    tail,
)
from gems_flwr.spaces.cone import spent_epsilon

privacy_loss = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
DELTA = 1e-5
# As PrivateGems divides: two sums of the first round, then sixteen gradients.
PARTS = (0.03, 0.1, *[0.87 / 16] * 16)


def gaussian_epsilon(deviations: list[float], delta: float) -> float:
    """Return what dp-accounting says of Gaussian releases of sensitivity 1."""
    composed = None
    for deviation in deviations:
        one = privacy_loss.from_gaussian_mechanism(
            deviation, value_discretization_interval=1e-4, use_connect_dots=True
        )
        composed = one if composed is None else composed.compose(one)
    assert composed is not None
    return float(composed.get_epsilon_for_delta(delta))


@pytest.mark.parametrize(
    ("epsilon", "nodes", "colluders", "fewest"), [(1.0, 10, 0, 10), (3.0, 50, 10, 34)]
)
def test_a_single_release_is_what_dp_accounting_says(
    epsilon: float, nodes: int, colluders: int, fewest: int
) -> None:
    noise = SharedNoise(epsilon, DELTA, nodes, colluders, fewest)
    total = noise.share(1.0) * math.sqrt(fewest - colluders)
    assert gaussian_epsilon([total], DELTA) == pytest.approx(epsilon, rel=3e-3)
    assert gaussian_epsilon([total], DELTA) <= epsilon * (1 + 1e-4)


def test_rounds_of_refinement_compose_as_dp_accounting_says() -> None:
    noise = SharedNoise(1.0, DELTA, nodes=10, colluders=3, fewest=8)
    totals = [noise.share(part) * math.sqrt(8 - 3) for part in PARTS]
    assert gaussian_epsilon(totals, DELTA) == pytest.approx(1.0, rel=5e-3)


@pytest.mark.parametrize("honest", [3, 5])
def test_what_other_numbers_of_colluders_leave_is_what_dp_accounting_says(honest: int) -> None:
    noise = SharedNoise(1.0, DELTA, nodes=10, colluders=2, fewest=7)
    left = gaussian_epsilon([noise.share(1.0) * math.sqrt(honest)], DELTA)
    assert noise.epsilon_left(honest) == pytest.approx(left, rel=1e-2)
    assert (noise.epsilon_left(honest) <= 1.0 + 1e-9) == (honest >= 5)


def test_discrete_noise_is_as_private_as_gaussian_noise() -> None:
    """With a sensitivity of 20 steps of the grid, in one dimension, where PLD is exact."""
    noise, steps = SharedNoise(3.0, DELTA, nodes=1), 20
    discrete = privacy_loss.from_discrete_gaussian_mechanism(
        noise.share(1.0) * steps, sensitivity=steps, value_discretization_interval=1e-4
    )
    assert discrete.get_epsilon_for_delta(DELTA) == pytest.approx(3.0, rel=3e-3)


@pytest.mark.parametrize("sigma", [2.0, 30.0])
def test_factors_between_discrete_and_rounded_gaussian_are_bounded(sigma: float) -> None:
    """P <= exp(1 / 24 s^2) Q everywhere, and Q <= exp(x^2 / 24 s^4) P: the docstring's claims."""
    x = np.arange(int(10 * sigma))
    density = np.exp(-(x**2) / (2 * sigma**2))
    discrete = density / (2 * density.sum() - 1)
    rounded = norm.sf((x - 0.5) / sigma) - norm.sf((x + 0.5) / sigma)
    logs = np.log(discrete / rounded)
    assert (logs <= 1 / (24 * sigma**2) + 1e-9).all()
    assert (-logs <= x**2 / (24 * sigma**4) + 1e-9).all()


def test_what_rounding_costs_is_refused_where_it_is_not_paid_for() -> None:
    noise = SharedNoise(1.0, DELTA, nodes=10)
    noise.check_cost(epsilon_cost(300_000, 2.0**17, 10))
    with pytest.raises(OptionError, match="costs"):
        noise.check_cost(epsilon_cost(300_000, 100.0, 10))
    with pytest.raises(OptionError, match="at least 2 steps"):
        epsilon_cost(10, 1.9, 10)


@given(
    nodes=st.integers(1, 40),
    fewest=st.integers(1, 40),
    colluders=st.integers(0, 40),
    part=st.floats(0.001, 1.0),
)
def test_the_shares_of_those_who_count_add_up_to_the_whole_noise(
    nodes: int, fewest: int, colluders: int, part: float
) -> None:
    if fewest > nodes or colluders >= fewest:
        with pytest.raises(OptionError):
            SharedNoise(1.0, DELTA, nodes, colluders, fewest)
        return
    noise = SharedNoise(1.0, DELTA, nodes, colluders, fewest)
    spent = squared_mu_of(noise.share(part), fewest - colluders)
    assert spent == pytest.approx(part * noise.squared_mu)
    assert spent_epsilon(noise.squared_mu, DELTA) <= 1.0


def test_no_noise_leaves_the_tail() -> None:
    noise = sum(discrete_gaussian(200_000, 1000.0, seed=node) for node in range(4))
    most = tail(200_000, 2000.0)
    assert np.abs(noise).max() < most < 10 * 2000.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"delta": 1.0}, "delta must be"),
        ({"fewest": 11}, "fewest must be"),
        ({"colluders": -1}, "colluders must be"),
        ({"colluders": 10}, "noise that counts"),
    ],
)
def test_promises_that_cannot_be_kept_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        SharedNoise(**{"epsilon": 1.0, "delta": DELTA, "nodes": 10, **options})  # type: ignore[arg-type]


# --- the sampler ----------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.5, 1.7, 20.0])
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


@pytest.mark.parametrize("sigma", [1.0, 2.0**20 + 0.5, LARGEST])
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
