"""Class moments: exact, addable, compressible, withheld when few, and private when asked."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from gems_flwr.errors import SpaceError
from gems_flwr.moments.class_clusters import cluster_classes, k_means
from gems_flwr.moments.class_sums import in_chunks, sum_classes
from gems_flwr.moments.cone_building import build_cone, cone_from_sums
from gems_flwr.moments.low_rank import compress, factor
from gems_flwr.moments.private_release import PrivateRelease, gaussian_noise, private_sums
from gems_flwr.moments.small_means import MeanRule
from gems_flwr.spaces.covariance import LowRankCovariance, QuantizedArray


def samples(seed=0, n=300, features=5, classes=3):
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=rng)
    mix = torch.randn(features, features, generator=rng)
    x = torch.randn(n, features, generator=rng) @ mix + 3 * y[:, None]
    return x, y


def test_moments_are_those_of_numpy():
    x, y = samples()
    cone = build_cone(x, y, 4, rank="full")
    assert cone.labels.tolist() == [0, 1, 2]
    for component, label in enumerate(cone.labels):
        mine = x[y == int(label)].numpy().astype(float)
        assert cone.counts[component] == len(mine)
        np.testing.assert_allclose(cone.means[component], mine.mean(0), rtol=1e-5)
        expected = np.cov(mine.T, bias=True)
        np.testing.assert_allclose(cone.covariance.dense_matrix(component), expected, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_sums_over_any_split_are_the_sums_of_the_whole(seed, nodes):
    x, y = samples(seed)
    owner = torch.from_numpy(np.random.default_rng(seed).integers(nodes, size=len(x)))
    parts = [
        sum_classes(in_chunks(x[owner == k], y[owner == k], 37), 3)
        for k in range(nodes)
        if bool((owner == k).any())
    ]
    added = parts[0]
    for part in parts[1:]:
        added = added + part
    whole = sum_classes([(x, y)], 3)
    for one, other in zip(added.moments(), whole.moments(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_a_class_with_few_samples_is_withheld_and_listed():
    x, y = samples()
    y[:] = torch.where(torch.arange(len(y)) < 5, 2, y.clamp_max(1))
    cone = build_cone(x, y, 3, rank="full", min_count=20)
    assert cone.labels.tolist() == [0, 1]
    assert cone.withheld == (2,)
    assert cone.withheld_count == 5
    assert cone.total_count == len(x)
    with pytest.raises(SpaceError, match="at least 1000"):
        build_cone(x, y, 3, min_count=1000, mean_rule=MeanRule(least=1000))


def test_an_entry_never_has_fewer_samples_than_its_rank():
    x, y = samples(n=60)
    y[:] = (torch.arange(60) < 4).long()
    cone = build_cone(x, y, 2, rank=4, min_count=1)
    assert cone.withheld == (1,)
    with pytest.raises(SpaceError, match="rank"):
        compress(build_cone(x, y, 2, rank="full", min_count=1), rank=4)
    with pytest.raises(SpaceError, match="rank"):
        compress(cone, rank=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5))
def test_the_factor_is_the_best_and_the_inflation_keeps_the_residual_s_size(seed, rank):
    """|d|^2 = |R|_F^2 / |diag R|_F^2 * ... by definition: d_i / R_ii is that one ratio."""
    root = np.random.default_rng(seed).normal(size=(6, 6))
    covariance = root @ root.T
    top, deviations = factor(covariance, rank)
    values = np.linalg.eigvalsh(covariance)
    residual = covariance - top @ top.T
    assert np.linalg.norm(residual) == pytest.approx(np.linalg.norm(values[: 6 - rank]), rel=1e-6)
    ratio = (residual**2).sum() / (np.diag(residual) ** 2).sum()
    np.testing.assert_allclose(deviations**2, ratio * np.diag(residual), rtol=1e-6, atol=1e-9)


def test_full_rank_loses_nothing():
    x, y = samples()
    full, low = (build_cone(x, y, 3, rank=rank, int8=False) for rank in ("full", 5))
    for component in range(3):
        np.testing.assert_allclose(
            low.covariance.dense_matrix(component),
            full.covariance.dense_matrix(component),
            atol=1e-3,
        )


def test_int8_takes_a_byte_per_number():
    x, y = samples()
    cone = build_cone(x, y, 3, rank=2)
    assert isinstance(cone.covariance, LowRankCovariance)
    assert isinstance(cone.means, QuantizedArray)
    # Per component: mean and deviations 5 + 4 each, factor 10 + 8, label 4, count 8.
    assert cone.size_bytes == 3 * (9 + 9 + 18 + 4 + 8)


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


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (1.0, 1e-5), (8.0, 1e-6)])
def test_the_noise_is_exactly_private(epsilon, delta):
    """Delta is the integral of (p(x) - e^eps q(x))_+ for p = N(1, s), q = N(0, s)."""
    sigma = gaussian_noise(epsilon, delta, 1.0)

    def excess(x):
        return max(norm.pdf(x, 1, sigma) - math.exp(epsilon) * norm.pdf(x, 0, sigma), 0.0)

    edge = sigma**2 * epsilon + 0.5
    spent, _ = quad(excess, edge, edge + 12 * sigma, epsabs=1e-14, limit=500)
    assert spent <= delta * (1 + 1e-6)
    assert spent >= 0.99 * delta


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


def test_bad_inputs_are_refused():
    x, y = samples()
    broken = x.clone()
    broken[3, 1] = torch.nan
    with pytest.raises(SpaceError, match="finite"):
        build_cone(broken, y, 3)
    with pytest.raises(SpaceError, match="0 to 1"):
        build_cone(x, y, 2)
    with pytest.raises(SpaceError, match="at least one"):
        sum_classes([], 3)
    with pytest.raises(SpaceError, match="features"):
        sum_classes([(x, y)], 3) + sum_classes([(x[:, :2], y)], 3)
    with pytest.raises(SpaceError, match="counts"):
        cone_from_sums(sum_classes([(x[:3], y[:3])], 3))


def test_lanczos_gives_the_factor_of_a_dense_decomposition():
    """80 features take the iterative path; eigenvectors are compared by what they span."""
    root = np.random.default_rng(0).normal(size=(80, 80)) * np.linspace(0.1, 2, 80)
    covariance = root @ root.T
    top, deviations = factor(covariance, 5)
    values, vectors = np.linalg.eigh(covariance)
    expected = (vectors[:, -5:] * values[-5:]) @ vectors[:, -5:].T
    np.testing.assert_allclose(top @ top.T, expected, atol=1e-7 * values[-1])
    residual = covariance - expected
    ratio = (residual**2).sum() / (np.diag(residual) ** 2).sum()
    np.testing.assert_allclose(deviations**2, ratio * np.diag(residual), rtol=1e-6)
