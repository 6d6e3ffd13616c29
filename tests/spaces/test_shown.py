"""What a class shows of itself follows from its samples; small classes go as means alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.errors import SpaceError
from gems_flwr.spaces import load_space, save_space, screen_spaces, unflatten_linear
from gems_flwr.spaces.cone import (
    MEAN_COUNT,
    NUMBERS_PER_SAMPLE,
    ClassMomentCone,
    HeadMoments,
    MeanRule,
    PrivateRelease,
    allowed_rank,
    build_cone,
    build_means,
    coarseness,
    least_count,
    lend_covariances,
    may_send_full,
    mean_values,
    solve_cones,
    whole_count,
)
from gems_flwr.spaces.cone.question import Cone

EXACT = MeanRule(least=2, exact=True)


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


def test_a_class_of_nine_tenths_as_many_numbers_is_exact_and_one_of_fewer_samples_is_not():
    """Mean and variances of 20 features are 40 numbers: 45 samples hide them, 44 do not quite."""
    assert coarseness(45, 20, 0) == pytest.approx(1 - NUMBERS_PER_SAMPLE * 45 / 40, abs=0.02)
    assert coarseness(45, 20, 0) == 0
    assert coarseness(44, 20, 0) > 0


def test_a_fixed_rank_or_full_moments_are_as_before():
    """More samples than columns, 32 by default; nothing is rounded but to eight bits."""
    assert least_count(40, 784) == 41
    assert least_count("full", 784) == 32
    assert least_count("auto", 784, 3) == 25
    with pytest.raises(ValueError, match="rank must be 'auto', 'full' or a whole number from 1"):
        Cone(rank=0)
    with pytest.raises(ValueError, match="rank"):
        Cone(rank=None)


# --- small classes ----------------------------------------------------------------------------


def data(counts, features, seed=0, shift=4.0):
    """Clouds of unit spread, class by class."""
    generator = torch.Generator().manual_seed(seed)
    centers = shift * torch.randn(len(counts), features, generator=torch.Generator().manual_seed(5))
    x = [centers[c] + torch.randn(n, features, generator=generator) for c, n in enumerate(counts)]
    y = [torch.full((n,), c) for c, n in enumerate(counts)]
    return torch.cat(x), torch.cat(y)


def cloud_cone(counts, features=8, seed=0, **options):
    return build_cone(*data(counts, features, seed), len(counts), **options)


@pytest.mark.parametrize(("rank", "form"), [("full", "full+means"), (3, "low_rank+means")])
def test_a_class_below_min_count_goes_as_count_and_mean(rank, form):
    x, y = data([100, 60, 12], 8)
    cone = build_cone(x, y, 3, rank=rank, int8=False, mean_rule=EXACT)
    assert cone.labels.tolist() == [0, 1, 2]
    assert cone.counts.tolist() == [100, 60, 12]
    assert cone.lacking.tolist() == [False, False, True]
    assert (cone.withheld, cone.covariance.form) == ((), form)
    np.testing.assert_allclose(mean_values(cone)[2], x[y == 2].mean(dim=0), atol=1e-5)


def test_a_mean_of_many_samples_is_whole_and_rounded_or_exact():
    x, y = data([400, 30], 20)
    exact = mean_values(build_cone(x, y, 2, rank="full"))[1]
    np.testing.assert_allclose(exact, x[y == 1].mean(dim=0), atol=1e-5)
    x, y = data([400, 31], 60)
    rounded = mean_values(build_cone(x, y, 2, rank="full"))[1]
    steps = np.unique(np.round(np.abs(rounded[:, None] - rounded[None, :]), 5))
    assert 0 < np.abs(rounded - x[y == 1].double().mean(dim=0).numpy()).max() <= steps[1] / 2 + 1e-4


def test_a_mean_of_fewer_samples_than_the_node_allows_is_withheld():
    cone = cloud_cone([100, MEAN_COUNT - 1, MEAN_COUNT], rank="full")
    assert cone.labels.tolist() == [0, 2]
    assert (cone.withheld, cone.withheld_count) == ((1,), MEAN_COUNT - 1)
    assert cloud_cone([100, 50, 49], rank=8, mean_rule=MeanRule(60)).withheld == ()
    assert cloud_cone([100, 20, 19], rank=30, mean_rule=MeanRule(20)).withheld == (2,)


def test_a_node_with_nothing_but_small_classes_still_takes_part():
    cone = cloud_cone([12, 10], features=4, rank="full")
    assert (cone.covariance.form, cone.lacking.all()) == ("means", True)
    other = cloud_cone([200, 200], features=4, seed=1, rank="full")
    layer = solve_cones([cone, other])
    assert layer.feasible


def test_under_differential_privacy_small_classes_are_no_means():
    release = PrivateRelease(5.0, 1e-5, 5.0)
    cone = cloud_cone([3000, 2], 3, rank="full", private=release, noise_seed=0)
    assert not cone.lacking.any()


# --- what the server makes of it --------------------------------------------------------------


@pytest.mark.parametrize("options", [{"rank": "full"}, {"rank": 4, "int8": False}])
def test_a_small_class_is_known_to_the_model(options):
    """Twelve samples on each of three nodes; nobody sends its covariance."""
    cones = [cloud_cone([200, 150, 12], seed=s, mean_rule=EXACT, **options) for s in range(3)]
    assert all(cone.lacking[2] for cone in cones)
    weight, bias = unflatten_linear(solve_cones(cones).point, 3, 8)
    x, y = data([200, 200, 200], 8, seed=9)
    predicted = (x.double().numpy() @ weight.T + bias).argmax(axis=1)
    right = predicted == y.numpy()
    assert right[y.numpy() == 2].mean() > 0.9


def test_it_is_lent_the_covariance_of_its_class_elsewhere_or_that_within_all():
    wide = cloud_cone([200, 200, 12, 12], rank="full", mean_rule=EXACT)
    other = cloud_cone([200, 200, 300, 12], seed=1, rank="full", mean_rule=EXACT)
    regular = HeadMoments.of([c.without_components(c.lacking) for c in (wide, other)])
    *_, lent = lend_covariances([wide, other])
    assert lent.labels.tolist() == [2, 3]
    assert lent.counts.tolist() == [12, 24]
    matrices = [lent.covariance.dense_matrix(place) for place in range(2)]
    np.testing.assert_allclose(matrices[0], regular.class_covariance(2), atol=1e-5)
    np.testing.assert_allclose(matrices[1], regular.within, atol=1e-5)


def test_screening_does_not_take_a_missing_spread_for_a_lie():
    cones = [cloud_cone([200, 150, 40 if s else 20], seed=s, rank="full") for s in range(6)]
    assert cones[0].lacking.any()
    result = screen_spaces(cones)
    assert result.reasons == ("",) * 6


# --- on the wire and in files -----------------------------------------------------------------


@pytest.mark.parametrize(
    "cone",
    [
        cloud_cone([100, 60, 12], rank="full"),
        cloud_cone([100, 60, 12], rank=5),
        cloud_cone([400, 60, 12], features=100),
        build_means(*data([40, 30, 9], 5), 3, groups=2, int8=True),
    ],
)
def test_a_file_gives_back_what_was_sent(cone, tmp_path):
    save_space(tmp_path / "a.safetensors", cone)
    back = load_space(tmp_path / "a.safetensors")
    larger = back.with_samples_at_most(50).without_components(cone.lacking)
    assert larger is None or not larger.lacking.any()
    assert back.covariance.form == cone.covariance.form
    assert back.lacking.tolist() == cone.lacking.tolist()
    assert np.array_equal(mean_values(back), mean_values(cone))
    for component in range(len(cone.labels)):
        one, two = (c.covariance.dense_matrix(component) for c in (back, cone))
        assert np.array_equal(one, two)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        *(([0, 0, 0], "flags that fit"), ([1, 1, 1], "flags that fit"), ([1, 1, 0], "covariance")),
        *(([0, 1], "covariance"), ([0, 0, 7], "means_only")),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, reason):
    arrays, meta = cloud_cone([100, 60, 12], rank="full").to_arrays()
    with pytest.raises(SpaceError, match=reason):
        ClassMomentCone.from_arrays(arrays | {"means_only": np.array(flags, np.uint8)}, meta)


def test_a_hostile_node_cannot_make_the_server_hold_matrices_of_zeros():
    """A thousand means of 500 features are two megabytes; their matrices would be a gigabyte."""
    cone = build_means(torch.randn(2000, 500), torch.arange(2000) % 1000, 1000, rule=EXACT)
    arrays, meta = cone.to_arrays()
    back = ClassMomentCone.from_arrays(arrays, meta)
    assert back.covariance.own is None
    assert sum(a.nbytes for a in back.covariance.to_arrays().values()) == 1000


# --- groups of means --------------------------------------------------------------------------


def test_groups_are_parts_of_a_class_and_no_sample_is_in_two():
    x, y = data([40, 25], 6)
    cone = build_means(x, y, 2, groups=4, rule=EXACT, seed=3)
    assert cone.labels.tolist() == [0] * 4 + [1] * 4
    for label in (0, 1):
        mine = cone.labels == label
        assert cone.counts[mine].sum() == int((y == label).sum())
        whole = cone.counts[mine] @ mean_values(cone)[mine] / cone.counts[mine].sum()
        np.testing.assert_allclose(whole, x[y == label].mean(dim=0), atol=1e-5)


def test_groups_are_not_smaller_than_a_mean_may_be():
    cone = build_means(*data([40, 17, 5], 4), 3, groups=10)
    assert cone.counts.min() >= MEAN_COUNT
    assert np.bincount(cone.labels).tolist() == [5, 2]
    assert (cone.withheld, cone.withheld_count) == ((2,), 5)
    with pytest.raises(SpaceError, match="at least 8"):
        build_means(*data([7, 3], 4), 2)
    # 113 samples of 64 features: 24 (1 - 0.9 n / 64) <= n holds from 18 samples on.
    assert whole_count(64, MeanRule()) == 18
    assert build_means(*data([113], 64), 2, groups=8).counts.min() >= 18
