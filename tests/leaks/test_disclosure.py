"""What follows from counts, directions, rounding and noise alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from gems_flwr.errors import SpaceError
from gems_flwr.leaks.disclosure import (
    common_step,
    exposures,
    information,
    known_auc,
    mean_information,
    mean_steps,
    private_auc,
)
from gems_flwr.leaks.inspection import TOLD_BY_FORMULA, ClassFinding
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.moments.group_means import build_means
from gems_flwr.moments.private_release import SENSITIVITY, gaussian_noise
from gems_flwr.moments.small_means import MeanRule


def normal(count, features, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, features))).float()


def cone_of(counts, features, build=build_cone, **options):
    labels = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    return build(normal(sum(counts), features), labels, max(2, len(counts)), **options)


@pytest.mark.parametrize("step", [0.0, 1.0])
def test_the_formula_is_what_one_who_knows_the_distribution_reaches(step):
    """The likelihood ratio of a normal class, 4,000 times: 12 samples of 9 features.

    A member moves the mean by (x - mu) / n; given the rounded mean the ratio is a linear function
    of the inner product of both, divided by the variance of the mean with its rounding.
    """
    rng, n, features = np.random.default_rng(0), 12, 9
    deviations = np.linspace(0.5, 2, features)
    variances = deviations**2
    noise = variances / n + step**2 / 12
    scores, truth = [], []
    for _ in range(4000):
        samples = rng.normal(size=(n + 1, features)) * deviations
        mean = samples[:n].mean(axis=0)
        if step:
            # Dithered, so that rounding is as even as the formula takes it to be.
            shift = rng.uniform(0, step, features)
            mean = np.rint((mean - shift) / step) * step + shift
        for row, member in ((0, 1), (n, 0)):
            moved = samples[row] / n
            scores.append((mean * moved / noise).sum() - (moved**2 / noise).sum() / 2)
            truth.append(member)
    expected = known_auc(information(variances, np.full(features, step), n))
    assert roc_auc_score(truth, scores) == pytest.approx(expected, abs=0.03)


def test_of_exact_means_the_formula_is_that_of_the_automatic_rule():
    """Phi(sqrt(k / 2n)): k = 20 features that vary, n = 40."""
    assert known_auc(information(np.ones(20), np.zeros(20), 40)) == pytest.approx(
        norm.cdf(math.sqrt(20 / 80))
    )
    cone = cone_of([40, 40], 20, rank="full")
    assert exposures(cone)[0].mean_auc == pytest.approx(norm.cdf(math.sqrt(20 / 80)))


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 400), st.integers(1, 120), st.booleans())
def test_the_default_is_never_alarming_by_the_file_alone(count, features, int8):
    """From three samples on: two are themselves, whatever their rounding."""
    try:
        cone = cone_of([count, count], features, int8=int8)
    except SpaceError:
        return
    for exposure in exposures(cone):
        assert exposure.exact is None
        assert exposure.mean_auc < TOLD_BY_FORMULA
        assert ClassFinding(exposure).level == "fine"


def test_as_many_directions_as_samples_less_one_are_the_samples():
    """33 samples have 32 directions; rank 32 of 33 samples says it as well, rank 31 does not."""
    full, all_of_them, one_less = (
        exposures(cone_of([33, 200], 50, rank=rank))[0] for rank in ("full", 32, 31)
    )
    assert "32 directions of 33 samples" in full.exact
    assert full.exact == all_of_them.exact
    assert one_less.exact is None


def test_many_samples_of_few_features_are_not():
    assert exposures(cone_of([33, 33], 5, rank="full"))[0].exact is None


@pytest.mark.parametrize("count", [1, 2])
def test_one_and_two_samples_are_given_away_by_anything(count):
    labels = torch.from_numpy(np.repeat([0, 1], [count, 50]))
    cone = build_cone(normal(50 + count, 4), labels, 2, rank="full", min_count=1)
    assert [each.exact is not None for each in exposures(cone)] == [True, False]


def test_clusters_are_judged_by_the_worst():
    cone = cone_of([60, 300], 40, rank="full", clusters=3, min_count=2)
    small = [int(n) for label, n in zip(cone.labels, cone.counts, strict=True) if label == 0]
    found = exposures(cone)[0]
    assert len(small) > 1
    assert (found.count, found.total) == (min(small), 60)
    assert found.exact is not None


def test_exact_means_of_few_samples_tell_more_than_rounded_ones():
    """Exact: 100 / 40. The rule's step is .64 * 3 * 10 / 40 = .48 deviations, and 40 * .48^2 / 12
    = .768.
    """
    exact = cone_of([40, 40], 100, build_means, rule=MeanRule(exact=True))
    rounded = cone_of([40, 40], 100, build_means)
    assert mean_steps(exact, 0).max() == 0
    assert mean_steps(rounded, 0).min() > 0
    assert mean_information(exact, 0) == pytest.approx(100 / 40)
    assert mean_information(rounded, 0) == pytest.approx(2.5 / 1.768)


def test_means_that_are_shown_in_part_count_as_many_numbers():
    """10 samples of 120 features: 7 numbers, three quarters of ten."""
    cone = cone_of([10, 200], 120)
    assert cone.lacking.tolist() == [True, False]
    assert mean_information(cone, 0) == pytest.approx(7 / 10)


def test_a_common_step_is_found_and_none_is_invented():
    rng = np.random.default_rng(0)
    values = rng.normal(size=200)
    assert common_step((np.rint(values / 0.3) * 0.3).astype(np.float32)) == pytest.approx(0.3)
    assert common_step(values.astype(np.float32)) == 0
    assert common_step(np.zeros(5)) == 0


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 10.0])
def test_noise_bounds_every_attacker(epsilon):
    """The best attacker sees N(0, 1) or N(mu, 1); its advantage is within that of any mechanism."""
    auc = private_auc(epsilon, 1e-5)
    mu = SENSITIVITY / gaussian_noise(epsilon, 1e-5, SENSITIVITY)
    rng = np.random.default_rng(0)
    seen = np.concatenate([rng.normal(mu, 1, 20000), rng.normal(0, 1, 20000)])
    assert roc_auc_score(np.repeat([1, 0], 20000), seen) == pytest.approx(auc, abs=0.01)
    advantage = 2 * norm.cdf(mu / 2) - 1
    assert advantage <= (math.exp(epsilon) - 1 + 2e-5) / (math.exp(epsilon) + 1)


def test_less_epsilon_is_less_told():
    bounds = [private_auc(epsilon, 1e-5) for epsilon in (10, 3, 1, 0.1)]
    assert bounds == sorted(bounds, reverse=True)
    assert private_auc(0, 1e-5) == 1.0
