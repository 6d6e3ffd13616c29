"""What differential privacy hides, held against an accountant that others wrote."""

import math
import sys

import absl.logging
import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy.stats import kstest

from gems_flwr.moments.cone_building import build_cone
from gems_flwr.moments.private_release import (
    PrivateRelease,
    PrivateScore,
    gaussian_noise,
    private_sums,
    secret_normal,
    spent_epsilon,
)

DELTA = 1e-5

# The accountant's logging keeps what was sys.stderr when it was imported, pytest's own file, and
# closes it as soon as somebody configures logging anew, as Hydra does.
absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)


def accounted(*multipliers):
    """Return epsilon by privacy loss distributions; a multiplier is noise over sensitivity."""
    accountant = PLDAccountant()
    for multiplier in multipliers:
        accountant.compose(dp_event.GaussianDpEvent(multiplier))
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0, 10.0])
def test_noise_spends_what_was_asked_for(epsilon):
    for sensitivity in (math.sqrt(2), math.sqrt(3)):
        noise = gaussian_noise(epsilon, DELTA, sensitivity)
        assert accounted(noise / sensitivity) == pytest.approx(epsilon, rel=0.01)


@pytest.mark.parametrize("count", [1, 4, 25])
def test_releases_compose_as_the_accountant_says(count):
    release, score = PrivateRelease(1.0, DELTA, 2.0), PrivateScore(0.5, DELTA)
    ours = spent_epsilon(count * release.squared_mu + score.squared_mu, DELTA)
    moments, accuracy = release.noise / math.sqrt(3), score.noise / math.sqrt(2)
    assert ours == pytest.approx(accounted(*[moments] * count, accuracy), rel=0.01)


def test_nothing_spent_is_nothing():
    assert spent_epsilon(0.0, DELTA) == 0
    assert spent_epsilon(1e-12, DELTA) == 0


def test_secret_noise_is_normal_and_never_the_same():
    draws = secret_normal((200, 100))
    assert draws.shape == (200, 100)
    assert kstest(draws.ravel(), "norm").pvalue > 1e-6
    assert not np.array_equal(secret_normal(50), secret_normal(50))
    x, y = torch.ones(40, 3), torch.zeros(40)
    release = PrivateRelease(1.0, DELTA, 1.0)
    assert private_sums(x, y, 2, release).counts[0] != private_sums(x, y, 2, release).counts[0]
    seeded = [private_sums(x, y, 2, release, seed=5).counts[0] for _ in range(2)]
    assert seeded[0] == seeded[1]


def shown_classes(labels, draws, **options):
    """Return how often class 2 is sent, and how often it is named as withheld."""
    x = torch.zeros(len(labels), 2)
    release = PrivateRelease(1.0, DELTA, 1.0)
    cones = [
        build_cone(x, torch.tensor(labels), 3, private=release, noise_seed=seed, **options)
        for seed in range(draws)
    ]
    sent = np.mean([2 in cone.labels for cone in cones])
    return sent, np.mean([2 in cone.withheld for cone in cones])


@pytest.mark.parametrize("options", [{}, {"min_count": 1}, {"min_count": 10}])
def test_one_sample_of_a_new_class_does_not_show(options):
    """Adding one sample may change the chance to be sent, or withheld, by at most a factor e.

    Classes used to be those of the data: 176 of 400 replies against none.
    """
    draws = 400
    without = shown_classes([0] * 100 + [1] * 100, draws, **options)
    with_one = shown_classes([0] * 100 + [1] * 100 + [2], draws, **options)
    for before, after in zip(without, with_one, strict=True):
        # Three deviations of a share of 400 draws.
        slack = 3 * math.sqrt(0.25 / draws)
        assert after <= math.e * before + slack
        assert before <= math.e * after + slack
    if options == {"min_count": 1}:
        assert without[0] > 0.3


def test_a_node_without_samples_answers_like_one_with_a_sample():
    release = PrivateRelease(1.0, DELTA, 1.0)
    empty, single = (
        private_sums(torch.zeros(n, 2), torch.zeros(n, dtype=torch.long), 3, release, seed=1)
        for n in (0, 1)
    )
    assert empty.labels.tolist() == single.labels.tolist() == [0, 1]
    assert single.counts - empty.counts == pytest.approx([1, 0])


def test_classes_in_a_release_can_be_named():
    x, y = torch.ones(600, 2), torch.arange(600) % 3
    release = PrivateRelease(5.0, DELTA, 2.0, classes=(0, 2))
    assert build_cone(x, y, 3, private=release).labels.tolist() == [0, 2]


def test_a_noised_score_is_near_the_true_one_for_many_samples():
    score = PrivateScore(1.0, DELTA)
    draws = [score.noised(700, 1000, seed) for seed in range(300)]
    # Both numbers have noise: sqrt(1 + 0.7^2) deviations over 1000.
    assert np.mean(draws) == pytest.approx(0.7, abs=0.002)
    assert np.std(draws) == pytest.approx(score.noise * math.hypot(1, 0.7) / 1000, rel=0.15)
    few = [score.noised(1, 1, seed) for seed in range(100)]
    assert min(few) >= 0
    assert max(few) <= 1
