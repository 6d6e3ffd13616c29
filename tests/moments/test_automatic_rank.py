"""What a class shows of itself follows from how many samples stand behind it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from gems_flwr.errors import SpaceError
from gems_flwr.moments.automatic_rank import (
    NUMBERS_PER_SAMPLE,
    PUSHES,
    allowed_rank,
    coarseness,
    feature_units,
    may_send_full,
    smallest_count,
)
from gems_flwr.moments.cone_building import build_cone, least_count
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance, QuantizedArray, dense
from gems_flwr.wire.space_requests import Cone


def normal(count, features, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, features))).float()


def cone_of(counts, features, **options):
    """Return the cone of a node with so many samples of each class."""
    x = normal(sum(counts), features)
    y = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    return build_cone(x, y, max(2, len(counts)), **options)


@settings(max_examples=200)
@given(st.integers(2, 100_000), st.integers(1, 2000))
def test_more_samples_never_show_less(count, features):
    assert 0 <= allowed_rank(count, features) <= allowed_rank(count + 1, features) <= features
    assert may_send_full(count, features) <= may_send_full(count + 1, features)
    rank = allowed_rank(count, features)
    assert coarseness(count + 1, features, rank) <= coarseness(count, features, rank)


@pytest.mark.parametrize(
    ("count", "features", "rank"),
    [(8, 784, 0), (64, 784, 2), (256, 784, 10), (5400, 784, 216), (10, 4, 0), (16, 4, 4)],
)
def test_directions_are_a_share_of_the_samples(count, features, rank):
    assert allowed_rank(count, features) == rank


def test_full_moments_need_clearly_more_samples_than_features():
    """30 for each feature; or few features, so that D (D + 3) / 2 = 14 numbers are no more."""
    assert not may_send_full(784 * 30 - 1, 784)
    assert may_send_full(784 * 30, 784)
    assert (may_send_full(15, 4), may_send_full(16, 4)) == (False, True)
    assert isinstance(cone_of([16, 16], 4).covariance, FullCovariance)
    assert isinstance(cone_of([16, 15], 4).covariance, LowRankCovariance)


def test_a_class_of_nine_tenths_as_many_numbers_is_exact_and_one_of_fewer_samples_is_not():
    """Mean and variances of 20 features are 40 numbers: 45 samples hide them, 44 do not quite."""
    assert coarseness(45, 20, 0) == pytest.approx(1 - NUMBERS_PER_SAMPLE * 45 / 40, abs=0.02)
    assert coarseness(45, 20, 0) == 0
    assert coarseness(44, 20, 0) > 0


def test_small_classes_take_part_without_options_and_the_smallest_are_withheld():
    """3 sqrt(D / 12) samples: 25 of 784 pixels, 2 of the four lengths of an iris."""
    assert (smallest_count(784), smallest_count(4)) == (25, 2)
    cone = cone_of([100, 25, 24, 7], 784)
    assert cone.labels.tolist() == [0, 1, 2]
    assert cone.lacking.tolist() == [False, False, True]
    assert (cone.withheld, cone.withheld_count) == ((3,), 7)
    assert cone.covariance.own.ranks.tolist() == [4, 1]
    assert cone_of([5, 3], 4).labels.tolist() == [0, 1]
    assert not cone_of([5, 3], 4).lacking.any()


def test_without_a_larger_class_to_take_directions_from_small_ones_are_withheld():
    with pytest.raises(SpaceError, match="at least 25"):
        cone_of([24, 3], 784)


def test_values_are_rounded_to_steps_of_three_pushes_of_one_sample():
    cone = cone_of([50], 300, min_count=2)
    assert isinstance(cone.means, QuantizedArray)
    spread = np.sqrt(np.trace(np.cov(normal(50, 300).numpy().T, bias=True)))
    blur = coarseness(50, 300, 2)
    assert float(cone.means.scales[0, 0]) == pytest.approx(blur * PUSHES * spread / 50, rel=1e-4)
    steps = dense(cone.means) / cone.means.scales
    assert steps == pytest.approx(np.rint(steps), abs=1e-5)


def test_a_variance_that_was_never_seen_looks_like_the_others():
    """A pixel that is black on all samples would tell who is not among them."""
    x = normal(40, 300)
    x[:, :7] = 0
    deviations = dense(build_cone(x, torch.zeros(40), 2).covariance.deviations)[0]
    assert deviations[:7].min() > 0
    assert deviations[:7].max() <= deviations[7:].max()


def test_asking_again_tells_nothing_new():
    one, two = (cone_of([60, 300], 100, seed=seed) for seed in (0, 1))
    assert np.array_equal(dense(one.means), dense(two.means))
    assert np.array_equal(dense(one.covariance.factors), dense(two.covariance.factors))


def test_columns_of_other_orders_of_magnitude_keep_their_digits():
    """Metres beside millimetres: one step for both would leave nothing of the metres."""
    x = normal(40, 6) * torch.tensor([1.0, 1, 1, 1000, 0.001, 1]) + torch.tensor([0, 0, 0, 0, 1, 0])
    assert feature_units(x).tolist() == [1, 1, 1, 1000, 0.001, 1]
    cone = build_cone(x, torch.zeros(40), 2)
    assert dense(cone.means)[0, 4] == pytest.approx(1, abs=0.001)
    apart = (dense(cone.means)[0] - x.mean(dim=0).numpy()) / x.std(dim=0).numpy()
    assert np.abs(apart).max() < 0.5


def test_ranks_that_differ_take_no_more_bytes_than_they_need():
    cone = cone_of([500, 30], 100)
    assert cone.covariance.ranks.tolist() == [20, 1]
    # Per direction, mean and deviations a byte for each feature and 4 for the scale; rank 4 each.
    assert cone.covariance.size_bytes == 21 * 104 + 2 * 104 + 2 * 4
    again = LowRankCovariance.from_arrays(cone.covariance.to_arrays())
    for component in range(2):
        assert np.array_equal(
            again.dense_matrix(component), cone.covariance.dense_matrix(component)
        )
    assert again.select(np.array([False, True])).dense_matrix(0) == pytest.approx(
        cone.covariance.dense_matrix(1)
    )


def test_without_any_direction_only_mean_and_variances_travel():
    cone = cone_of([12, 12], 16)
    assert cone.covariance.ranks.tolist() == [0, 0]
    arrays = cone.covariance.to_arrays()
    assert not any(key.startswith("factors") for key in arrays)
    again = LowRankCovariance.from_arrays(arrays)
    assert np.array_equal(again.dense_matrix(1), cone.covariance.dense_matrix(1))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3, 0], "factors: expected shape"),
        ([-1, 4], "ranks"),
        ([5, 5], "ranks"),
        ([1.5, 1], "ranks"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(ranks, words):
    with pytest.raises(SpaceError, match=words):
        LowRankCovariance(np.ones((2, 4)), np.ones((2, 4)), np.array(ranks))


def test_a_fixed_rank_or_full_moments_are_as_before():
    """More samples than columns, 32 by default; nothing is rounded but to eight bits."""
    assert least_count(40, 784) == 41
    assert least_count("full", 784) == 32
    assert least_count("auto", 784, 3) == 25
    with pytest.raises(ValueError, match="rank must be 'auto', 'full' or a whole number from 1"):
        Cone(rank=0)
    with pytest.raises(ValueError, match="rank"):
        Cone(rank=None)


def test_an_attacker_who_knows_a_normal_distribution_gets_the_auc_that_counting_promises():
    """K exact numbers of n samples: Phi(sqrt(k / 2n)), the bound behind 0.9 numbers per sample.

    The best test for a mean is the inner product of the candidate with the mean: for a member it
    is D / n larger, with a variance of D / n either way.
    """
    features, count, rng = 200, 100, np.random.default_rng(0)
    scores = []
    for _ in range(60):
        members, others = rng.normal(size=(2, count, features))
        mean = members.mean(axis=0)
        scores.append((members @ mean, others @ mean))
    inside, outside = (np.concatenate(part) for part in zip(*scores, strict=True))
    auc = np.mean(rng.choice(inside, 100_000) > rng.choice(outside, 100_000))
    assert auc == pytest.approx(norm.cdf(np.sqrt(features / count / 2)), abs=0.02)
    assert norm.cdf(np.sqrt(NUMBERS_PER_SAMPLE / 2)) == pytest.approx(0.75, abs=0.005)
