"""One covariance for all classes of a node: what is sent, what is shown, what the server makes."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from gems_flwr.errors import SpaceError
from gems_flwr.spaces import intersect, unflatten_linear
from gems_flwr.spaces.cone import (
    WHITE_PUSHES,
    ClassMomentCone,
    CommonCovariance,
    ConeOptions,
    HeadMoments,
    MeanRule,
    allowed_rank,
    build_cone,
    coarseness,
    dense,
    mean_values,
    smallest_count,
    solve_cones,
)


def clouds(counts, features, seed=0, apart=1.0):
    """Classes that share one covariance, of a few large directions and unit spread."""
    fixed = np.random.default_rng(5)
    centers = apart * fixed.normal(size=(len(counts), features))
    mixing = np.eye(features) + 3 * fixed.normal(size=(features, 3)) @ fixed.normal(
        size=(3, features)
    ) / np.sqrt(features)
    labels = np.repeat(np.arange(len(counts)), counts)
    noise = np.random.default_rng(seed).normal(size=(len(labels), features)) @ mixing
    return torch.from_numpy(centers[labels] + noise), torch.from_numpy(labels)


def common_cone(counts, features=30, seed=0, **options):
    cone = build_cone(*clouds(counts, features, seed), max(2, len(counts)), **options)
    assert isinstance(cone.covariance, CommonCovariance)
    return cone


def test_means_and_covariances_are_those_of_the_samples():
    """Of 30 features 4,000 samples show all directions; of 100 samples a class has its own."""
    counts = [2000, 1500, 400, 100, 20]
    x, y = (each.numpy() for each in clouds(counts, 30))
    cone = common_cone(counts)
    allowed = [allowed_rank(n, 30) for n in (4016, *counts[:-1])]
    assert (cone.covariance.ranks[:-1] <= allowed).all()
    assert min(cone.covariance.ranks[:4]) > 14
    assert cone.covariance.ranks[-1] == 0
    within = sum(n * np.cov(x[y == c].T, bias=True) for c, n in enumerate(counts)) / sum(counts)
    for c, n in enumerate(counts):
        own = n / (n + 30) if n > 30 else 0
        spread = np.cov(x[y == c].T, bias=True)
        expected = own * spread + (1 - own) * within
        sent = cone.covariance.dense_matrix(c)
        # Rounding, smoothing, and what is left of few directions, made up for on the diagonal.
        whitened = np.linalg.eigvals(np.linalg.solve(expected, sent)).real
        assert whitened.min() > 0.6
        assert np.median(whitened) < 2
        assert c > 1 or whitened.max() < 2
        off = mean_values(cone)[c] - x[y == c].mean(axis=0)
        assert np.sqrt(off @ np.linalg.solve(within, off) / 30) < 0.05 + 5 / n


def test_small_classes_take_part_and_the_smallest_are_withheld():
    assert (smallest_count(784), smallest_count(4)) == (25, 8)
    cone = common_cone([100, 25, 24, 7], 784)
    assert (cone.labels.tolist(), cone.withheld, cone.withheld_count) == ([0, 1, 2], (3,), 7)
    assert not cone.lacking.any()
    # Of the samples in all, less one for each mean.
    assert 0 < cone.covariance.ranks[0] <= allowed_rank(147, 784)
    assert not cone.covariance.ranks[1:].any()


def test_a_node_with_too_few_samples_in_all_sends_nothing_of_them():
    with pytest.raises(SpaceError, match="at least 25"):
        build_cone(*clouds([12, 13], 784), 2)


def test_a_mean_is_rounded_to_steps_of_four_pushes_of_one_sample():
    """In the coordinates in which it is sent a typical sample has length sqrt(D)."""
    cone = common_cone([100, 100], 300)
    step = coarseness(100, 300, 0) * WHITE_PUSHES * np.sqrt(300) / 100
    assert cone.means.scales.ravel().tolist() == pytest.approx([step] * 2, rel=1e-5)


def test_a_mean_of_few_samples_is_shown_in_directions_of_the_others_first():
    """10 samples of 300 features: (2 * 10 / 4) ** 2 = 25 directions, 11 those of 12 means first."""
    x, y = clouds([200] * 12 + [10], 300)
    cone = build_cone(x, y, 13)
    others = dense(cone.means)[:12].astype(float)
    _, _, directions = np.linalg.svd(others - others.mean(axis=0), full_matrices=False)
    z, spanned = dense(cone.means)[12].astype(float), directions[:11]
    shown = np.linalg.norm(spanned @ z) / np.linalg.norm(z)
    assert shown > 2 * np.sqrt(11 / 300)


def test_a_variance_that_was_never_seen_looks_like_the_others():
    """A pixel that is black on all samples would tell who is not among them."""
    x, y = clouds([40, 40], 300)
    x[:, :7] = 0
    variances = np.diag(build_cone(x, y, 2).covariance.dense_matrix(0))
    assert variances[:7].min() > 0
    assert variances[:7].max() <= variances[7:].max()


def test_asking_again_tells_nothing_new():
    one, two = (common_cone([60, 300], 100, seed=3) for _ in range(2))
    arrays = zip(one.to_arrays()[0].values(), two.to_arrays()[0].values(), strict=True)
    assert all(np.array_equal(a, b) for a, b in arrays)


def solved(nodes, classes):
    found = intersect([build_cone(x, y, classes) for x, y in nodes])
    return unflatten_linear(found.point, classes, nodes[0][0].shape[1])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    logs=st.lists(st.floats(-6, 6), min_size=6, max_size=6),
    shifts=st.lists(st.floats(-1e4, 1e4), min_size=6, max_size=6),
    counts=st.sampled_from([(12, 12, 12), (300, 200, 9), (2000, 300, 100)]),
)
def test_scales_and_offsets_of_columns_change_no_prediction(seed, logs, shifts, counts):
    """Years beside millimetres: margins stay the same, but for rounding."""
    scale, shift = 10.0 ** np.array(logs), np.array(shifts) * 10.0 ** np.array(logs)
    nodes = [clouds(counts, 6, seed + k, apart=2.0) for k in range(2)]
    moved = [(x * torch.from_numpy(scale) + torch.from_numpy(shift), y) for x, y in nodes]
    x = clouds((50, 50, 50), 6, seed + 9, apart=2.0)[0].numpy()
    one, two = solved(nodes, 3), solved(moved, 3)
    plain = x @ one[0].T + one[1]
    scores = (x * scale + shift) @ two[0].T + two[1]
    plain, scores = (each - each.mean(axis=1, keepdims=True) for each in (plain, scores))
    # Units are quarters of octaves, so what is rounded falls differently, the more so if coarse.
    if counts[0] > 12:
        assert np.abs(plain - scores).mean() < 0.05 * np.abs(plain).mean()
    assert (plain.argmax(axis=1) == scores.argmax(axis=1)).mean() > 0.9


def test_a_feature_that_only_differs_between_classes_or_not_at_all_is_no_obstacle():
    x, y = clouds([100, 100, 100], 10)
    x = torch.cat([x, y[:, None].double(), torch.full((300, 1), 2024.0)], dim=1)
    weight, bias = solved([(x, y), (x + 1e-3, y)], 3)
    assert ((x.numpy() @ weight.T + bias).argmax(axis=1) == y.numpy()).mean() > 0.95


def test_many_classes_of_few_samples_get_the_discriminant_of_all_samples():
    """60 classes of 30 samples, 40 features, sites that hold different classes."""
    parts = [clouds([30] * 60, 40, seed, apart=0.9) for seed in range(3)]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    cones = [build_cone(x[y % 3 == k], y[y % 3 == k], 60) for k in range(3)]
    weight, bias = unflatten_linear(intersect(cones).point, 60, 40)
    new, labels = (each.numpy() for each in clouds([30] * 60, 40, 7, apart=0.9))
    pooled = LinearDiscriminantAnalysis(solver="lsqr").fit(x.numpy(), y.numpy())
    ours = ((new @ weight.T + bias).argmax(axis=1) == labels).mean()
    assert ours > pooled.score(new, labels) - 0.04


def test_the_covariance_within_all_classes_is_the_weighted_sum_of_the_common_ones():
    cones = [common_cone([30, 40, 50], 20, seed) for seed in range(2)]
    moments = HeadMoments.of(cones)
    means = sum(np.array([30, 40, 50])[:, None] * mean_values(cone) for cone in cones)
    means /= 2 * np.array([30, 40, 50])[:, None]
    within = np.zeros((20, 20))
    for cone in cones:
        rows, deviations = cone.covariance.common
        within += 0.5 * (rows.T @ rows + np.diag(deviations**2))
        for place, count in enumerate([30, 40, 50]):
            off = mean_values(cone)[place] - means[place]
            within += np.outer(off, off) * count / 240
    np.testing.assert_allclose(moments.within, within, rtol=1e-9, atol=1e-9)


def test_margins_are_those_of_dense_matrices():
    cone = common_cone([100, 40, 9], 12)
    weight, bias = np.random.default_rng(0).normal(size=(3, 12)), np.zeros(3)
    margins = cone.margins(np.concatenate([weight.ravel(), bias]))
    for component, label in enumerate(cone.labels.tolist()):
        matrix = cone.covariance.dense_matrix(component)
        for place, rival in enumerate(margins.rivals[component].tolist()):
            along = weight[label] - weight[rival]
            expected = along @ matrix @ along
            assert margins.deviation[component, place] ** 2 == pytest.approx(expected, rel=1e-6)


def test_of_large_classes_the_cone_is_solved_and_of_others_a_closed_form_is_found():
    small, large = common_cone([25, 25, 25]), common_cone([500, 500, 500])
    assert intersect([small]).method.startswith("head: lda")
    assert intersect([small, large]).method == solve_cones([small, large]).method
    by_ridge = intersect([small], cone_options=ConeOptions(ridge=1e-3))
    assert by_ridge.method.startswith("cones")


# --- on the wire ------------------------------------------------------------------------------


def test_what_is_sent_comes_back_in_few_bytes():
    cone = common_cone([100] * 50, 200)
    arrays, meta = cone.to_arrays()
    back = ClassMomentCone.from_arrays(arrays, meta)
    assert np.array_equal(mean_values(back), mean_values(cone))
    assert back.without_components(np.arange(50) > 1).labels.tolist() == [0, 1]
    for component in (0, 49):
        one, two = (each.covariance.dense_matrix(component) for each in (back, cone))
        assert np.array_equal(one, two)
    # Eight bits for each number of 50 means and 160 directions are 42,000 bytes.
    assert cone.size_bytes < 25_000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shares": [2.0, 0, 0]}, "shares"),
        ({"shares": [-0.1, 0, 0]}, "shares"),
        ({"ranks": [2, 1, 0, 0]}, "shares"),
        ({"ranks": [-1, 0, 0, 0]}, "shares"),
        ({"octaves": [10**4] * 30}, "octaves"),
        ({"center": [np.nan] * 30}, "center"),
        ({"rows.codes": np.zeros(9, np.uint8)}, "rows"),
        ({"means.scales": np.ones((2, 1))}, "means"),
        ({"deviations.scales": np.zeros((1, 1))}, "deviations"),
    ],
)
def test_what_no_samples_have_is_refused(change, reason):
    arrays, meta = common_cone([20, 20, 20]).to_arrays()
    changed = {key: np.asarray(value) for key, value in change.items()}
    with pytest.raises(SpaceError, match=reason):
        ClassMomentCone.from_arrays(arrays | changed, meta)


def test_a_bomb_is_not_unpacked():
    import zlib

    arrays, meta = common_cone([20, 20, 20]).to_arrays()
    bomb = np.frombuffer(zlib.compress(bytes(10**8)), np.uint8)
    for key in ("rows.codes", "means.codes", "deviations.codes"):
        with pytest.raises(SpaceError, match="codes"):
            ClassMomentCone.from_arrays(arrays | {key: bomb}, meta)
    many = {"rows.codes": bomb, "rows.scales": np.ones((10**7, 1), np.float32)}
    with pytest.raises(SpaceError, match="codes"):
        ClassMomentCone.from_arrays(arrays | many, meta)


def test_a_cap_on_directions_holds_for_both_covariances():
    cone = common_cone([500, 400], 30, largest_rank=4, mean_rule=MeanRule())
    assert cone.covariance.ranks.tolist() == [4, 4, 4]
    with pytest.raises(SpaceError):
        dataclasses.replace(cone, means=mean_values(cone).astype(np.float32))
