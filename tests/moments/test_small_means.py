"""Classes too small for a covariance: what goes of them, in which form, and what they come to."""

import dataclasses

import numpy as np
import pytest
import torch

from gems_flwr.errors import SpaceError
from gems_flwr.intersect.cones import solve_cones
from gems_flwr.intersect.head_moments import HeadMoments
from gems_flwr.intersect.pooled_moments import pool_moments
from gems_flwr.intersect.screen_spaces import screen_spaces
from gems_flwr.intersect.small_classes import lend_covariances
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.moments.group_means import build_means
from gems_flwr.moments.small_means import MEAN_COUNT, MeanRule, shown_numbers, whole_count
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.spaces.output_layer import unflatten_linear
from gems_flwr.spaces.space_files import load_space, save_space

EXACT = MeanRule(least=2, exact=True)


def data(counts, features, seed=0, shift=4.0):
    """Clouds of unit spread, class by class."""
    generator = torch.Generator().manual_seed(seed)
    centers = shift * torch.randn(len(counts), features, generator=torch.Generator().manual_seed(5))
    x = [centers[c] + torch.randn(n, features, generator=generator) for c, n in enumerate(counts)]
    y = [torch.full((n,), c) for c, n in enumerate(counts)]
    return torch.cat(x), torch.cat(y)


def cone_of(counts, features=8, seed=0, **options):
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


def test_data_without_small_classes_is_sent_as_before():
    for options in ({"rank": "full"}, {"rank": 4}, {}):
        cone = cone_of([100, 60, 40], **options)
        assert not cone.lacking.any()
        assert "means_only" not in cone.to_arrays()[0]
        assert pool_moments([cone]).low.cones in ((cone,), ())


def test_of_few_samples_no_more_numbers_are_shown_than_three_quarters_as_many():
    """Two nodes whose small classes differ outside of those directions send the same."""
    x, y = data([400, 16], 200)
    sent = mean_values(build_cone(x, y, 2, rank=4, int8=False))[1]
    others = x[y == 0].double().numpy()
    _, vectors = np.linalg.eigh(np.cov(others.T))
    numbers = shown_numbers(16, 200)
    assert numbers == 12
    shown, hidden = vectors[:, -numbers:], vectors[:, :-numbers]
    mean = x[y == 1].double().mean(dim=0).numpy()
    np.testing.assert_allclose(shown.T @ sent, shown.T @ mean, atol=1e-4)
    np.testing.assert_allclose(hidden.T @ sent, hidden.T @ others.mean(axis=0), atol=1e-4)


def test_a_mean_of_many_samples_is_whole_and_rounded_or_exact():
    x, y = data([400, 30], 20)
    exact = mean_values(build_cone(x, y, 2, rank="full"))[1]
    np.testing.assert_allclose(exact, x[y == 1].mean(dim=0), atol=1e-5)
    x, y = data([400, 31], 60)
    rounded = mean_values(build_cone(x, y, 2, rank="full"))[1]
    steps = np.unique(np.round(np.abs(rounded[:, None] - rounded[None, :]), 5))
    assert 0 < np.abs(rounded - x[y == 1].double().mean(dim=0).numpy()).max() <= steps[1] / 2 + 1e-4


def test_a_mean_of_fewer_samples_than_the_node_allows_is_withheld():
    cone = cone_of([100, MEAN_COUNT - 1, MEAN_COUNT], rank="full")
    assert cone.labels.tolist() == [0, 2]
    assert (cone.withheld, cone.withheld_count) == ((1,), MEAN_COUNT - 1)
    assert cone_of([100, 50, 49], rank=8, mean_rule=MeanRule(60)).withheld == ()
    assert cone_of([100, 20, 19], rank=30, mean_rule=MeanRule(20)).withheld == (2,)


def test_a_node_with_nothing_but_small_classes_still_takes_part():
    cone = cone_of([12, 10], features=4, rank="full")
    assert (cone.covariance.form, cone.lacking.all()) == ("means", True)
    other = cone_of([200, 200], features=4, seed=1, rank="full")
    layer = solve_cones([cone, other])
    assert layer.feasible


def test_nothing_that_is_sent_of_it_depends_on_chance():
    first, second = (cone_of([300, 20], 100, rank=4) for _ in range(2))
    assert np.array_equal(mean_values(first), mean_values(second))


def test_noise_for_differential_privacy_is_not_given_away_by_means():
    from gems_flwr.moments.private_release import PrivateRelease

    release = PrivateRelease(5.0, 1e-5, 5.0)
    cone = cone_of([3000, 2], 3, rank="full", private=release, noise_seed=0)
    assert not cone.lacking.any()


# --- what the server makes of it --------------------------------------------------------------


@pytest.mark.parametrize("options", [{"rank": "full"}, {"rank": 4, "int8": False}])
def test_a_small_class_is_known_to_the_model(options):
    """Twelve samples on each of three nodes; nobody sends its covariance."""
    cones = [cone_of([200, 150, 12], seed=s, mean_rule=EXACT, **options) for s in range(3)]
    assert all(cone.lacking[2] for cone in cones)
    weight, bias = unflatten_linear(solve_cones(cones).point, 3, 8)
    x, y = data([200, 200, 200], 8, seed=9)
    predicted = (x.double().numpy() @ weight.T + bias).argmax(axis=1)
    right = predicted == y.numpy()
    assert right[y.numpy() == 2].mean() > 0.9


def test_it_is_lent_the_covariance_of_its_class_elsewhere_or_that_within_all():
    wide = cone_of([200, 200, 12, 12], rank="full", mean_rule=EXACT)
    other = cone_of([200, 200, 300, 12], seed=1, rank="full", mean_rule=EXACT)
    regular = HeadMoments.of([c.without_components(c.lacking) for c in (wide, other)])
    *_, lent = lend_covariances([wide, other])
    assert lent.labels.tolist() == [2, 3]
    assert lent.counts.tolist() == [12, 24]
    matrices = [lent.covariance.dense_matrix(place) for place in range(2)]
    np.testing.assert_allclose(matrices[0], regular.class_covariance(2), atol=1e-5)
    np.testing.assert_allclose(matrices[1], regular.within, atol=1e-5)


def test_cones_that_lack_nothing_are_left_alone():
    cones = [cone_of([100, 60, 40], rank=4)]
    assert lend_covariances(cones)[0] is cones[0]


def test_screening_does_not_take_a_missing_spread_for_a_lie():
    cones = [cone_of([200, 150, 40 if s else 20], seed=s, rank="full") for s in range(6)]
    assert cones[0].lacking.any()
    result = screen_spaces(cones)
    assert result.reasons == ("",) * 6


# --- on the wire and in files -----------------------------------------------------------------


@pytest.mark.parametrize(
    "cone",
    [
        cone_of([100, 60, 12], rank="full"),
        cone_of([100, 60, 12], rank=5),
        cone_of([100, 60, 12], rank=5, int8=False),
        cone_of([400, 60, 12], features=100),
        build_means(*data([40, 30, 9], 5), 3, groups=2),
        build_means(*data([40, 30, 9], 5), 3, int8=True),
    ],
)
def test_a_file_gives_back_what_was_sent(cone, tmp_path):
    save_space(tmp_path / "a.safetensors", cone)
    back = load_space(tmp_path / "a.safetensors")
    assert back.covariance.form == cone.covariance.form
    assert back.lacking.tolist() == cone.lacking.tolist()
    assert np.array_equal(mean_values(back), mean_values(cone))
    for component in range(len(cone.labels)):
        one, two = (c.covariance.dense_matrix(component) for c in (back, cone))
        assert np.array_equal(one, two)
    assert back.margins(np.ones(cone.dimension)).deviation.tolist() == (
        cone.margins(np.ones(cone.dimension)).deviation.tolist()
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"means_only": np.array([0, 0, 0], np.uint8)}, "flags that fit"),
        ({"means_only": np.array([1, 1, 1], np.uint8)}, "flags that fit"),
        ({"means_only": np.array([1, 1, 0], np.uint8)}, "covariance"),
        ({"means_only": np.array([0, 1], np.uint8)}, "covariance"),
        ({"means_only": np.array([0, 0, 7], np.uint8)}, "means_only"),
    ],
)
def test_flags_that_do_not_fit_are_refused(change, reason):
    arrays, meta = cone_of([100, 60, 12], rank="full").to_arrays()
    with pytest.raises(SpaceError, match=reason):
        ClassMomentCone.from_arrays(arrays | change, meta)


def test_a_server_of_before_refuses_the_form():
    """It knew two forms, and refused all others by name."""
    _, meta = cone_of([100, 60, 12], rank="full").to_arrays()
    assert meta["form"] not in ("full", "low_rank")
    arrays, meta = cone_of([100, 60, 40], rank="full").to_arrays()
    with pytest.raises(SpaceError, match="form"):
        ClassMomentCone.from_arrays(arrays, meta | {"form": "other"})


def test_a_hostile_node_cannot_make_the_server_hold_matrices_of_zeros():
    """A thousand means of 500 features are two megabytes; their matrices would be a gigabyte."""
    cone = build_means(torch.randn(2000, 500), torch.arange(2000) % 1000, 1000, rule=EXACT)
    arrays, meta = cone.to_arrays()
    back = ClassMomentCone.from_arrays(arrays, meta)
    assert back.covariance.own is None
    assert back.covariance.size_bytes == 1000


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


def test_groups_are_fewer_where_their_means_would_have_to_be_cut():
    """113 samples of 64 features: 24 (1 - 0.9 n / 64) <= n holds from 18 samples on."""
    assert whole_count(64, MeanRule()) == 18
    cone = build_means(*data([113], 64), 2, groups=8)
    assert len(cone.labels) == 6
    assert cone.counts.min() >= 18


def test_what_has_no_samples_or_no_finite_ones_is_refused():
    x, y = data([20, 20], 4)
    with pytest.raises(SpaceError, match="finite"):
        build_means(x * float("nan"), y, 2)
    with pytest.raises(SpaceError, match="labels"):
        build_means(x, y + 1, 2)


def test_capping_and_selecting_keep_the_flags():
    cone = cone_of([100, 60, 12], rank=5)
    assert cone.with_samples_at_most(50).lacking.tolist() == cone.lacking.tolist()
    larger = cone.without_components(cone.lacking)
    assert larger.covariance.form == "low_rank"
    small = cone.without_components(~cone.lacking)
    assert (small.covariance.form, len(small.labels)) == ("means", 1)
    assert dataclasses.replace(cone, epsilon=0.6).lacking.tolist() == cone.lacking.tolist()
