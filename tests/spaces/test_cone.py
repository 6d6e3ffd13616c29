"""Class-moment cones: the set, and how a node builds it from its samples."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gems_flwr.errors import SpaceError
from gems_flwr.spaces import flatten_linear
from gems_flwr.spaces.cone import (
    ClassMomentCone,
    FullCovariance,
    LowRankCovariance,
    PrivateRelease,
    QuantizedArray,
    build_cone,
    build_means,
    cluster_classes,
    factor,
    factor_samples,
    k_means,
    private_sums,
    quantize,
)

# --- the set ----------------------------------------------------------------------------------


def a_cone(seed=0, classes=3, features=2, epsilon=0.8, **changes):
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(classes, features, features))
    fields = {
        "num_classes": classes,
        "labels": np.arange(classes),
        "counts": np.full(classes, 50),
        "means": rng.normal(size=(classes, features)) * 3,
        "covariance": FullCovariance(roots @ roots.transpose(0, 2, 1)),
        "epsilon": epsilon,
    }
    return ClassMomentCone(**(fields | changes))


def test_margins_are_those_of_the_definition():
    """One class with mean (2, 0) and covariance diag(4, 1), W = [[1, 0], [0, 0]], b = [1, 0].

    m = (1, 0).(2, 0) + 1 = 3, v = 4, so t = 3 / 2; the normal quantile of 0.9 is 1.28.
    """
    cone = ClassMomentCone(
        2, [0], [10], [[2.0, 0.0]], FullCovariance(np.diag([4.0, 1.0])[None]), epsilon=0.9
    )
    w = flatten_linear([[1, 0], [0, 0]], [1, 0])
    margins = cone.margins(w)
    assert margins.mean[0, 0] == pytest.approx(3)
    assert margins.deviation[0, 0] == pytest.approx(2)
    assert cone.contains(w)
    # 1.645 deviations for 95 in a hundred are more than the margin of 1.5.
    assert not dataclasses.replace(cone, epsilon=0.95).contains(w)


def test_the_zero_layer_is_never_good_enough():
    cone = a_cone(epsilon=0.5)
    assert not cone.contains(np.zeros(cone.dimension))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_int8_is_off_by_at_most_half_a_step(seed, round_up):
    rng = np.random.default_rng(seed)
    values = np.abs(rng.normal(size=(3, 40))) * 10.0 ** rng.integers(-6, 6)
    stored = quantize(values, axis=1, round_up=round_up)
    step = values.max(axis=1, keepdims=True) / 127
    error = stored.dense() - values
    assert np.all(np.abs(error) <= (1.0 if round_up else 0.5) * step * (1 + 1e-4))
    if round_up:
        assert np.all(error >= -1e-5 * step)
    assert stored.nbytes == values.size + 3 * 4


def test_low_rank_gives_the_same_margins_as_its_dense_matrix():
    rng = np.random.default_rng(3)
    low = LowRankCovariance(rng.normal(size=(3, 2, 1)), rng.uniform(0, 1, (3, 2)))
    full = FullCovariance(np.stack([low.dense_matrix(e) for e in range(3)]))
    w = rng.normal(size=9)
    one = a_cone(covariance=low).margins(w).deviation
    other = a_cone(covariance=full).margins(w).deviation
    np.testing.assert_allclose(one, other, rtol=1e-5)


SKEW = np.array([[[1.0, 2.0], [0.0, 1.0]]] * 3)
INDEFINITE = np.array([[[1.0, 2.0], [2.0, 1.0]]] * 3)
INT8 = np.zeros((2, 2), dtype=np.int8)


WRONG_CONES = [
    *(("labels", {"labels": each}) for each in ([0, 1, 3], [0, 1, -1], [0.0, 1.0, 2.0])),
    *(("counts", {"counts": each}) for each in ([1, 2], [1, 2, 0])),
    *(("means", {"means": each}) for each in (np.full((3, 2), 1e9), np.ones((3, 3)))),
    *(("labels", {"withheld": (7,)}), ("total_count", {"total_count": 151})),
    *(("epsilon", {"epsilon": 0.4}), ("num_classes", {"num_classes": 1})),
    ("dp_epsilon", {"privacy": (-1.0, 0.1)}),
]


@pytest.mark.parametrize(
    ("key", "build"),
    [
        ("matrices[0]", lambda: FullCovariance(SKEW)),
        ("matrices[0]", lambda: FullCovariance(INDEFINITE)),
        ("matrices", lambda: FullCovariance(np.full((1, 2, 2), np.nan))),
        ("matrices", lambda: FullCovariance(np.ones((2, 2)))),
        ("deviations", lambda: LowRankCovariance(np.ones((1, 2, 1)), -np.ones((1, 2)))),
        ("deviations", lambda: LowRankCovariance(np.ones((1, 2, 1)), np.ones((1, 3)))),
        ("w", lambda: a_cone().margin(np.zeros(4))),
        ("codes", lambda: QuantizedArray(np.zeros((2, 2)), np.ones((2, 1)))),
        ("scales", lambda: QuantizedArray(INT8, np.ones((3, 1)))),
        ("scales", lambda: QuantizedArray(INT8, -np.ones((2, 1)))),
        *((key, partial(a_cone, **changes)) for key, changes in WRONG_CONES),
    ],
)
def test_malformed_cones_are_refused_by_key(key, build):
    with pytest.raises(SpaceError, match="expected") as caught:
        build()
    assert caught.value.key == key


# --- built from samples -----------------------------------------------------------------------


def samples(seed=0, n=300, features=5, classes=3):
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=rng)
    mix = torch.randn(features, features, generator=rng)
    x = torch.randn(n, features, generator=rng) @ mix + 3 * y[:, None]
    return x, y


def test_an_entry_never_has_fewer_samples_than_its_rank():
    x, y = samples(n=60)
    y[:] = (torch.arange(60) < 4).long()
    cone = build_cone(x, y, 2, rank=4, min_count=1)
    assert cone.withheld == (1,)
    with pytest.raises(SpaceError, match="rank"):
        build_cone(x, y, 2, rank=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.sampled_from([6, 80]))
def test_the_factor_is_the_best_and_the_inflation_keeps_the_residual_s_size(seed, rank, side):
    """By definition d_i / R_ii is the ratio of squares; 80 features take the iterative path."""
    root = np.random.default_rng(seed).normal(size=(side, side)) * np.linspace(0.1, 2, side)
    covariance = root @ root.T
    top, deviations = factor(covariance, rank)
    values = np.linalg.eigvalsh(covariance)
    residual = covariance - top @ top.T
    least = np.linalg.norm(values[: side - rank])
    assert np.linalg.norm(residual) == pytest.approx(least, rel=1e-6)
    ratio = (residual**2).sum() / (np.diag(residual) ** 2).sum()
    np.testing.assert_allclose(deviations**2, ratio * np.diag(residual), rtol=1e-5, atol=1e-9)


def test_clusters_are_seeded_and_never_small():
    x, y = samples(n=500)
    one, two = (cluster_classes(x, y, 6, 30, seed=5) for _ in range(2))
    assert torch.equal(one, two)
    for label in range(3):
        counts = torch.bincount(one[y == label])
        assert int(counts.min()) >= 30
        assert len(counts) <= 6
    cone = build_cone(x, y, 3, clusters=6, min_count=30, rank=2)
    assert len(cone.labels) > 3
    assert int(cone.counts.sum()) == 500


def test_k_means_finds_well_separated_blobs():
    centers = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    truth = torch.arange(90) % 3
    points = centers[truth] + torch.randn(90, 2, generator=torch.Generator().manual_seed(0))
    labels, _ = k_means(points, 3, seed=1)
    assert len({(int(a), int(b)) for a, b in zip(truth, labels, strict=True)}) == 3
    same, found = k_means(torch.zeros(10, 2), 4, seed=0)
    assert len(found) == 1
    assert int(same.max()) == 0


def test_a_private_release_says_so_and_hides_one_sample():
    x, y = samples(n=2000)
    release = PrivateRelease(epsilon=5.0, delta=1e-5, clip=20.0, classes=(0, 1, 2))
    cone = build_cone(x, y, 4, private=release, noise_seed=3)
    assert cone.privacy == (5.0, 1e-5)
    assert set(cone.labels.tolist()) == {0, 1, 2}
    for component, label in enumerate(cone.labels):
        mine = x[y == int(label)].numpy()
        error = np.abs(np.asarray(cone.means)[component] - mine.mean(0)).max()
        # Noise of the mean: sigma * clip / n, here about 0.05; six times that.
        assert error < 6 * release.noise * 20.0 / len(mine)
    # One far outlier moves the sums by no more than the clipping length allows.
    far = x.clone()
    far[0] *= 1e4
    one = private_sums(x, y, 4, release, seed=9)
    other = private_sums(far, y, 4, release, seed=9)
    moved = np.abs(one.sums - other.sums)
    assert np.linalg.norm(moved) <= 2 * 20.0 + 1e-6
    with pytest.raises(SpaceError, match="clusters"):
        build_cone(x, y, 3, private=release, clusters=2)
    with pytest.raises(ValueError, match="delta"):
        PrivateRelease(1.0, 1.5, 1.0)


def decaying(count, features, seed=0, power=0.7):
    """Samples whose variances fall as a power along rotated axes, far from the origin."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=source) * torch.arange(1, features + 1) ** -power
    turned, _ = torch.linalg.qr(torch.randn(features, features, generator=source))
    return x @ turned + 3


def centred(x):
    return x.double() - x.double().mean(dim=0)


def covariance_of(x):
    return np.cov(x.double().numpy().T, bias=True)


def test_samples_of_fewer_dimensions_than_the_rank_leave_no_residual():
    x = decaying(200, 5) @ torch.randn(5, 80, generator=torch.Generator().manual_seed(1))
    found, deviations = factor_samples(centred(x), 8)
    np.testing.assert_allclose(found @ found.T, covariance_of(x), atol=1e-4 * np.abs(found).max())
    assert deviations.max() < 1e-3 * np.abs(found).max()


def test_equal_samples_have_no_spread():
    x = torch.full((40, 60), 7.0)
    columns, deviations = factor_samples(centred(x), 3)
    assert columns.shape == (60, 3)
    assert not columns.any()
    assert not deviations.any()


def three_classes(features):
    x, y = decaying(900, features), torch.arange(900) % 3
    return x + y[:, None], y


@pytest.mark.parametrize(("features", "clusters"), [(50, 1), (400, 3)])
def test_cones_have_the_moments_of_their_components(features, clusters):
    """Of more samples than features, and of fewer; each cluster is a component of its own."""
    x, y = three_classes(features)
    cone = build_cone(x, y, 4, rank=5, clusters=clusters, int8=False)
    groups = cluster_classes(x, y, clusters, 32, 0) if clusters > 1 else torch.zeros_like(y)
    for component, (label, group) in enumerate(
        sorted(set(zip(y.tolist(), groups.tolist(), strict=True)))
    ):
        mine = x[(y == label) & (groups == group)]
        assert (cone.labels[component], cone.counts[component]) == (int(label), len(mine))
        top, deviations = factor(covariance_of(mine), 5)
        expected = top @ top.T + np.diag(deviations**2)
        found = cone.covariance.dense_matrix(component)
        np.testing.assert_allclose(found, expected, atol=1e-4 * expected.max())
    assert cone.total_count == 900


def test_samples_that_are_none_are_refused():
    x, y = three_classes(100)
    for inputs, labels, classes, words in (
        (x[:5], y[:5], 3, "at least 32"),
        (x, y, 2, "0 to 1"),
        (x / 0, y, 3, "finite"),
        (x[:0], y[:0], 3, "at least one sample"),
    ):
        with pytest.raises(SpaceError, match=words):
            build_cone(inputs, labels, classes, rank=4)
    for inputs, labels, words in ((x / 0, y, "finite"), (x, y + 1, "0 to 2")):
        with pytest.raises(SpaceError, match=words):
            build_means(inputs, labels, 3)


def test_four_thousand_features_need_no_square_matrix():
    """Every tensor that is made on the way is looked at."""
    features, largest = 4000, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else [out]:
                if isinstance(each, torch.Tensor):
                    largest = max(largest, each.numel())
            return out

    x = torch.randn(600, features, generator=torch.Generator().manual_seed(0))
    x *= torch.arange(1, features + 1) ** -0.5
    with Watch():
        build_cone(x, torch.zeros(600, dtype=torch.long), 2, rank=10)
    assert largest <= features * 600
