"""Low-rank moments without D x D matrices are those by way of full moments."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gems_flwr.errors import SpaceError
from gems_flwr.moments import cone_streaming, sample_covariance
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.moments.cone_streaming import STREAMED_FEATURES, Components, streams
from gems_flwr.moments.low_rank import factor
from gems_flwr.moments.sample_covariance import SampleCovariance, factor_samples
from gems_flwr.spaces.cone import mean_values
from gems_flwr.spaces.covariance import dense


def decaying(count, features, seed=0, power=0.7):
    """Samples whose variances fall as a power along rotated axes, far from the origin."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=source) * torch.arange(1, features + 1) ** -power
    turned, _ = torch.linalg.qr(torch.randn(features, features, generator=source))
    return x @ turned + 3


def covariance_of(x):
    return np.cov(x.double().numpy().T, bias=True)


# More samples than features, fewer, and chunks of either that do not come out even.
@pytest.mark.parametrize(("count", "features"), [(150, 300), (700, 120), (700, 600)])
@pytest.mark.parametrize("rank", [1, 20])
def test_the_factor_is_that_of_the_whole_matrix(count, features, rank, monkeypatch):
    """Columns up to their sign, and the inflated residual, within 1e-4 of the largest number."""
    monkeypatch.setattr(sample_covariance, "CHUNK", 64 if features < 500 else 256)
    x = decaying(count, features)
    columns, deviations = factor(covariance_of(x), rank)
    order = np.argsort((columns**2).sum(axis=0))
    found, found_deviations, trace = factor_samples(SampleCovariance(x, torch.arange(count)), rank)
    expected = columns[:, order] * np.sign((columns[:, order] * found).sum(axis=0))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_allclose(found_deviations, deviations, atol=1e-4 * deviations.max())
    assert trace == pytest.approx(np.trace(covariance_of(x)), rel=1e-6)


def test_eigenvalues_that_are_all_alike_give_as_good_a_factor():
    """White noise has no directions of its own: compared is what a factor leaves over."""
    x = torch.randn(900, 300, generator=torch.Generator().manual_seed(0))
    full = covariance_of(x)
    columns, deviations = factor(full, 20)
    found, found_deviations, _ = factor_samples(SampleCovariance(x, torch.arange(900)), 20)
    left, expected = (np.linalg.norm(full - f @ f.T) for f in (found, columns))
    assert left == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(found_deviations, deviations, rtol=1e-3)


def test_samples_of_fewer_dimensions_than_the_rank_leave_no_residual():
    x = decaying(200, 5) @ torch.randn(5, 80, generator=torch.Generator().manual_seed(1))
    found, deviations, _ = factor_samples(SampleCovariance(x, torch.arange(200)), 8)
    np.testing.assert_allclose(found @ found.T, covariance_of(x), atol=1e-4 * np.abs(found).max())
    assert deviations.max() < 1e-3 * np.abs(found).max()


def test_equal_samples_have_no_spread():
    x = torch.full((40, 60), 7.0)
    columns, deviations, trace = factor_samples(SampleCovariance(x, torch.arange(40)), 3)
    assert columns.shape == (60, 3)
    assert not columns.any()
    assert not deviations.any()
    assert trace == 0


def three_classes(features):
    x, y = decaying(900, features), torch.arange(900) % 3
    return x + y[:, None], y


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 10},
        {"rank": 10, "int8": False},
        {"rank": 5, "clusters": 3, "int8": False},
        {"rank": "auto", "int8": False},
        {"rank": "auto", "largest_rank": 4, "int8": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("metres", [1.0, 1000.0])
def test_cones_are_the_same_either_way(options, metres, monkeypatch):
    """Within two steps of int8 where that is used: a value may lie where it is rounded."""
    x, y = three_classes(200)
    x[:, 0] *= metres
    plain = build_cone(x, y, 4, **options)
    monkeypatch.setattr(cone_streaming, "STREAMED_FEATURES", 10)
    streamed = build_cone(x, y, 4, **options)
    assert streamed.labels.tolist() == plain.labels.tolist()
    assert streamed.counts.tolist() == plain.counts.tolist()
    assert streamed.total_count == plain.total_count
    assert streamed.size_bytes == plain.size_bytes
    near = 2 / 127 if options.get("int8", True) else 3e-3
    means = mean_values(plain)
    np.testing.assert_allclose(mean_values(streamed), means, atol=near * np.abs(means).max())
    for component in range(len(plain.labels)):
        full = plain.covariance.dense_matrix(component)
        other = streamed.covariance.dense_matrix(component)
        np.testing.assert_allclose(other, full, atol=2 * near * np.abs(full).max())
    one, other = (np.sort(dense(c.covariance.deviations), axis=1) for c in (plain, streamed))
    np.testing.assert_allclose(other, one, atol=near * one.max())


def test_small_classes_are_withheld_and_listed_as_elsewhere(monkeypatch):
    monkeypatch.setattr(cone_streaming, "STREAMED_FEATURES", 10)
    x, y = three_classes(100)
    y[:] = torch.where(torch.arange(900) < 5, 2, y.clamp_max(1))
    cone = build_cone(x, y, 3, rank=4, min_count=20)
    assert (cone.labels.tolist(), cone.withheld, cone.withheld_count) == ([0, 1], (2,), 5)
    with pytest.raises(SpaceError, match="at least 32"):
        build_cone(x[:5], y[:5], 3, rank=4)
    with pytest.raises(SpaceError, match="0 to 1"):
        build_cone(x, y, 2, rank=4)
    with pytest.raises(SpaceError, match="finite"):
        build_cone(x / 0, y, 3, rank=4)
    with pytest.raises(SpaceError, match="at least one sample"):
        build_cone(x[:0], y[:0], 3, rank=4)


def test_the_same_samples_give_the_same_bits():
    x, y = three_classes(STREAMED_FEATURES)
    one, other = (build_cone(x, y, 3, rank=5, int8=False) for _ in range(2))
    torch.randn(3)  # the global random state does not matter
    for component in range(3):
        np.testing.assert_array_equal(
            one.covariance.factor(component), other.covariance.factor(component)
        )


def test_samples_are_streamed_where_features_are_many_and_the_rank_is_low():
    counts = np.array([5000, 800])
    assert not streams(counts, STREAMED_FEATURES - 1, 20)
    assert streams(counts, STREAMED_FEATURES, 20)
    assert not streams(counts, STREAMED_FEATURES, STREAMED_FEATURES // 8)
    # "auto" comes to one direction for every 25 samples.
    assert streams(counts, STREAMED_FEATURES, "auto")
    assert not streams(10 * counts, STREAMED_FEATURES, "auto")
    assert streams(10 * counts, STREAMED_FEATURES, "auto", largest_rank=20)


def test_components_are_sorted_by_class_and_cluster():
    labels, groups = torch.tensor([2, 0, 2, 0, 2]), torch.tensor([1, 0, 0, 0, 1])
    found = Components.of(labels, groups)
    assert found.labels.tolist() == [0, 2, 2]
    assert [rows.tolist() for rows in found.rows] == [[1, 3], [2], [0, 4]]


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
    assert largest <= features * max(600, sample_covariance.KEPT)


# A mean in a few directions of the larger classes, a rounded one, one as it is; means alone.
@pytest.mark.parametrize("small", [12, 30, 90])
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("min_count", [100, 1000])
def test_small_classes_go_as_the_same_means(small, int8, min_count, monkeypatch):
    x, y = three_classes(100)
    y[:] = torch.where(torch.arange(900) < small, 2, y.clamp_max(1))
    options = {"rank": 4, "int8": int8, "min_count": min_count}
    plain = build_cone(x, y, 3, **options)
    monkeypatch.setattr(cone_streaming, "STREAMED_FEATURES", 10)
    streamed = build_cone(x, y, 3, **options)
    assert plain.lacking[-1]
    for attribute in ("labels", "counts", "lacking"):
        np.testing.assert_array_equal(getattr(streamed, attribute), getattr(plain, attribute))
    for attribute in ("total_count", "withheld", "withheld_count", "size_bytes"):
        assert getattr(streamed, attribute) == getattr(plain, attribute)
    means, near = mean_values(plain), 1 / 127 if int8 else 1e-3
    np.testing.assert_allclose(mean_values(streamed), means, atol=near * np.abs(means).max())
