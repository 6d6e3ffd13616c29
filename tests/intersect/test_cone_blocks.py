"""Cones of many nodes: computed with in blocks, as if all components were there at once."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.intersect import pooled_moments as pooled
from gems_flwr.intersect.cone_objective import ConeObjective, ConeOptions
from gems_flwr.intersect.cones import solve_cones
from gems_flwr.intersect.pooled_moments import CascadeSum, LowRankComponents, pool_moments
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.spaces.covariance import QuantizedArray
from simulations.bench.plain_cones import PlainObjective, solve_plainly

CLASSES, FEATURES = 3, 130


def cones(ranks, clusters=1):
    """One cone for each rank; every other one in float32."""
    rng = torch.Generator().manual_seed(0)
    means = torch.randn(CLASSES, FEATURES, generator=rng)
    made = []
    for node, rank in enumerate(ranks):
        y = torch.randint(CLASSES, (150,), generator=rng)
        x = means[y] + 2 * torch.randn(150, FEATURES, generator=rng)
        options = {"rank": rank, "clusters": clusters, "min_count": rank + 1}
        made.append(build_cone(x, y, CLASSES, int8=node % 2 == 0, **options))
    return made


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few components, and of a few features."""
    monkeypatch.setattr(pooled, "_SMALLEST_BLOCK_BYTES", 1)
    monkeypatch.setattr(pooled, "_LARGEST_BLOCK_BYTES", 1)
    monkeypatch.setattr(pooled, "_LEAST_BYTES", 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("clusters", [1, 2])
def test_blocks_of_entries_give_the_plain_formula(clusters):
    """Against all components in double precision at once, differentiated automatically."""
    nodes = cones([5, 3, 1, 4, 2] * 3, clusters)
    ours, plain = ConeObjective(pool_moments(nodes), ConeOptions()), PlainObjective(nodes)
    assert len(list(ours.low.blocks())) > 1
    rng = torch.Generator().manual_seed(1)
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64, generator=rng)
    bias = torch.randn(CLASSES, dtype=torch.float64, generator=rng)
    (value, *gradient), (expected, *by_torch) = (
        objective.value_and_gradient(weight, bias) for objective in (ours, plain)
    )
    assert value == pytest.approx(expected, rel=1e-13)
    for mine, theirs in zip(gradient, by_torch, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13 * float(theirs.abs().max()))


def test_the_layer_is_that_of_the_plain_way():
    nodes = cones([5, 3, 1, 4, 2])
    point, plain = solve_cones(nodes).point, solve_plainly(nodes)
    np.testing.assert_allclose(point, plain, atol=1e-4 * np.abs(plain).max())


@pytest.mark.usefixtures("small_blocks")
def test_blocks_hold_every_entry_once_and_none_alone():
    """49 components in runs of 16: the last would be alone, and joins those before it."""
    low = LowRankComponents.of(
        [*cones([2] * 16), cones([2])[0].without_components(np.arange(3) > 0)]
    )
    sizes = [len(block.means) for block in low.blocks()]
    assert sizes == [16, 16, 17]
    means = np.concatenate([block.means for block in low.blocks()])
    expected = np.concatenate([pooled.mean_values(cone) for cone in low.cones])
    np.testing.assert_array_equal(means, expected)


@pytest.mark.usefixtures("small_blocks")
def test_features_are_scaled_by_the_variance_of_all_samples():
    """Total variance is that within the components plus that between their means."""
    nodes = cones([5, 3, 1, 4, 2])
    nodes[1] = build_cone(*data_of_one_class(), CLASSES)
    moments = pool_moments(nodes)
    parts = sorted(nodes, key=lambda cone: cone.covariance.form)
    means = np.concatenate([pooled.mean_values(cone) for cone in parts])
    within = [np.diag(c.covariance.dense_matrix(e)) for c in parts for e in range(len(c.labels))]
    between = (means - moments.shares @ means) ** 2
    expected = np.sqrt(moments.shares @ (np.array(within) + between))
    np.testing.assert_allclose(moments.feature_scale, expected, rtol=1e-12)


def data_of_one_class():
    rng = torch.Generator().manual_seed(2)
    return torch.randn(300, FEATURES, generator=rng), torch.zeros(300, dtype=torch.int64)


def test_a_class_that_one_node_has_is_not_copied():
    node = build_cone(*data_of_one_class(), CLASSES, rank="full")
    assert np.shares_memory(pool_moments([node]).matrices[0], node.covariance.matrices)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 600), st.integers(0, 10_000))
def test_a_cascade_sum_does_not_depend_on_the_parts(count, seed):
    rng = np.random.default_rng(seed)
    terms = torch.from_numpy(rng.normal(size=(count, 64)) * 10 ** rng.uniform(-3, 3, (count, 1)))
    cuts = sorted({0, count, *rng.integers(0, count + 1, size=3).tolist()})
    by_parts, one_by_one = CascadeSum(), CascadeSum()
    for first, last in itertools.pairwise(cuts):
        by_parts.add(terms[first:last])
    for term in terms:
        one_by_one.add(term[None])
    assert torch.equal(by_parts.total(), one_by_one.total()) or len(cuts) == 2
    size = float(terms.abs().sum(dim=0).max())
    torch.testing.assert_close(by_parts.total(), terms.sum(dim=0), rtol=0, atol=1e-15 * size)


def test_a_part_of_int8_values_is_that_part_of_all():
    codes = np.random.default_rng(0).integers(-127, 128, size=(4, 6, 3)).astype(np.int8)
    part = (slice(1, 3), slice(2, 6))
    for shape in [(4, 1, 3), (1, 1, 1), (4, 6, 3), (1, 6, 1)]:
        scales = np.random.default_rng(1).random(shape).astype(np.float32)
        values = QuantizedArray(codes, scales)
        np.testing.assert_array_equal(values.dense(*part), values.dense()[part])
