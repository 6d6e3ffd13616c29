"""The cone objective: what it says, the layer it gives, and blocks of components."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import approx_fprime
from torch.nn.functional import one_hot, softplus

from gems_flwr.spaces import intersect, unflatten_linear
from gems_flwr.spaces.cone import (
    POINTS,
    RIDGE_LOW_RANK,
    ConeObjective,
    ConeOptions,
    LowRankComponents,
    QuantizedArray,
    balanced_shares,
    build_cone,
    mean_values,
    pool_moments,
    solve,
    solve_cones,
)
from gems_flwr.stages import fine_tune_linear, public_weight, tune_cones


def samples(seed=0, n=900, features=6, classes=4):
    rng = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(classes, features, generator=rng)
    y = torch.randint(classes, (n,), generator=rng)
    mix = torch.randn(features, features, generator=rng) / 2
    return means[y] + torch.randn(n, features, generator=rng) @ mix, y


def accuracy(point, x, y, classes=4):
    weight, bias = unflatten_linear(point, classes, x.shape[1])
    scores = x.double().numpy() @ weight.T + bias
    return float((scores.argmax(1) == y.numpy()).mean())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8), st.booleans())
def test_full_moments_give_the_same_model_for_any_split(seed, nodes, by_label):
    x, y = samples()
    whole = solve_cones([build_cone(x, y, 4, rank="full", min_count=1)])
    rng = np.random.default_rng(seed)
    owner = torch.from_numpy(rng.integers(nodes, size=len(x)))
    if by_label:
        owner = torch.from_numpy(rng.integers(nodes, size=4))[y]
    held = [owner == k for k in range(nodes) if bool((owner == k).any())]
    split = solve_cones([build_cone(x[m], y[m], 4, rank="full", min_count=1) for m in held])
    np.testing.assert_allclose(split.point, whole.point, atol=2e-3 * np.abs(whole.point).max())


def test_pooled_moments_are_those_of_the_pooled_data():
    x, y = samples()
    parts = [build_cone(x[i::3], y[i::3], 4, rank="full", min_count=1) for i in range(3)]
    pooled = pool_moments(parts)
    for component, label in enumerate(pooled.labels):
        mine = x[y == int(label)].double().numpy()
        np.testing.assert_allclose(pooled.means[component], mine.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            pooled.matrices[component], np.cov(mine.T, bias=True), rtol=1e-3, atol=1e-4
        )
    assert pooled.shares.sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="classes and features"):
        pool_moments([parts[0], build_cone(x, y, 5)])


def test_an_impossible_demand_is_not_called_feasible():
    x, y = samples(seed=3)
    cones = [build_cone(x, y, 4, epsilon=1 - 1e-9)]
    result = solve_cones(cones)
    assert result.status == "undecided"
    assert min(result.margins) < 0


def test_the_objective_is_the_expected_pairwise_loss_and_its_gradient_that_of_differences():
    """Against 400,000 draws from the Gaussians of the same moments."""
    x, y = samples(seed=5, classes=3)
    cone = build_cone(x, y, 3)
    objective = ConeObjective(pool_moments([cone]), ConeOptions(ridge=0.0))
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(3, 6)) * 0.3, rng.normal(size=3)
    scaled = torch.from_numpy(weight) * objective.scale
    value, *_ = objective.value_and_gradient(scaled, torch.from_numpy(bias))
    expected = 0.0
    for component, label in enumerate(cone.labels):
        mean = mean_values(cone)[component] - objective.moments.center
        draws = rng.multivariate_normal(mean, cone.covariance.dense_matrix(component), 400_000)
        scores = draws @ weight.T + bias
        losses = np.logaddexp(0, scores - scores[:, [label]])
        rivals = np.delete(losses, label, axis=1).sum(axis=1)
        expected += rivals.mean() * cone.counts[component] / cone.total_count
    assert value == pytest.approx(expected, rel=5e-3)

    def flat_value(flat):
        layer = torch.from_numpy(flat)
        return objective.value_and_gradient(layer[:18].reshape(3, 6), layer[18:])

    flat = np.append(scaled.numpy().ravel(), bias)
    numeric = approx_fprime(flat, lambda layer: flat_value(layer)[0], 1e-7)
    found = torch.cat([part.reshape(-1) for part in flat_value(flat)[1:]])
    np.testing.assert_allclose(found.numpy(), numeric, atol=1e-5)


def test_nodes_with_one_class_each_reach_the_pooled_accuracy_from_any_start():
    """No node has ever seen a second class, yet the layer tells all four apart."""
    x, y = samples(seed=3)
    cones = [build_cone(x[y == c], y[y == c], 4) for c in range(4)]
    cold = intersect(cones)
    assert accuracy(cold.point, x, y) > 0.93
    assert (cold.feasible, cold.is_average, len(cold.margins)) == (True, False, 4)
    warm = solve_cones(cones, start=solve_cones(cones[:3]).point)
    np.testing.assert_allclose(warm.point, cold.point, atol=5e-3 * np.abs(cold.point).max())


def test_a_public_sample_joins_the_objective():
    """With three of four classes at the nodes only the public sample knows the fourth."""
    x, y = samples(seed=3)
    cones = [build_cone(x[y == c], y[y == c], 4, rank=3) for c in range(3)]
    without = solve_cones(cones)
    joint = tune_cones(cones, x[:100], y[:100], factor=5.0)
    assert accuracy(joint.point, x, y) > accuracy(without.point, x, y) + 0.1
    assert public_weight(500) == pytest.approx(0.1)


def test_fine_tuning_is_seeded_and_learns():
    x, y = samples(seed=3)
    start = np.zeros(4 * 7)
    one, two = (fine_tune_linear(start, x, y, 4, rate=1e-2, seed=4) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert accuracy(one, x, y) > 0.9
    assert not np.array_equal(one, fine_tune_linear(start, x, y, 4, rate=1e-2, seed=5))


def test_balanced_classes_weigh_the_same_however_rare_they_are():
    """Shares .6 and .3 of class 0 and .1 of class 2: a half for each class."""
    shares = balanced_shares(np.array([0, 0, 2]), np.array([0.6, 0.3, 0.1]))
    assert shares == pytest.approx([1 / 3, 1 / 6, 1 / 2])


# --- blocks of components ---------------------------------------------------------------------

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


class PlainObjective:
    """The objective as one would write it first: all components at once, by autograd."""

    def __init__(self, nodes):
        moments = pool_moments(nodes)
        self.scale = torch.from_numpy(moments.feature_scale)
        self.labels, self.shares = map(torch.from_numpy, (moments.labels, moments.shares))
        means = np.concatenate([mean_values(cone) for cone in nodes])
        spreads = [c.covariance.dense_matrix(e) for c in nodes for e in range(len(c.labels))]
        self.means = torch.from_numpy(means - moments.center) / self.scale
        self.spreads = torch.from_numpy(np.stack(spreads)) / torch.outer(self.scale, self.scale)
        nodes, weights = np.polynomial.hermite_e.hermegauss(POINTS)
        self.nodes, self.weights = map(torch.from_numpy, (nodes, weights / weights.sum()))

    def value_and_gradient(self, weight, bias):
        weight, bias = (tensor.detach().requires_grad_() for tensor in (weight, bias))
        scores = self.means @ weight.T + bias
        rows = torch.arange(len(self.labels))
        margin = scores[rows, self.labels][:, None] - scores
        differences = weight[self.labels][:, None, :] - weight
        variance = torch.einsum("ejd,edf,ejf->ej", differences, self.spreads, differences)
        deviation = (variance + 1e-12).sqrt()[..., None]
        terms = softplus(-(margin[..., None] + deviation * self.nodes)) @ self.weights
        loss = self.shares @ (terms * (1.0 - one_hot(self.labels, CLASSES))).sum(dim=1)
        value = loss + RIDGE_LOW_RANK * (weight**2).sum()
        return float(value.detach()), *torch.autograd.grad(value, (weight, bias))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of one component."""
    monkeypatch.setattr(solve, "_SMALLEST_BLOCK_BYTES", 1)
    monkeypatch.setattr(solve, "_LARGEST_BLOCK_BYTES", 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("clusters", [1, 2])
def test_blocks_of_entries_give_the_plain_formula(clusters):
    """Against all components in double precision at once, differentiated automatically."""
    nodes = cones([5, 3, 1, 4, 2] * 3, clusters)
    ours, plain = ConeObjective(pool_moments(nodes), ConeOptions()), PlainObjective(nodes)
    assert len(list(ours.moments.low.blocks())) > 1
    rng = torch.Generator().manual_seed(1)
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64, generator=rng)
    bias = torch.randn(CLASSES, dtype=torch.float64, generator=rng)
    (value, *gradient), (expected, *by_torch) = (
        objective.value_and_gradient(weight, bias) for objective in (ours, plain)
    )
    assert value == pytest.approx(expected, rel=1e-12)
    for mine, theirs in zip(gradient, by_torch, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12 * float(theirs.abs().max()))


def test_blocks_hold_every_entry_once(monkeypatch):
    monkeypatch.setattr(solve, "_LARGEST_BLOCK_BYTES", 8 * FEATURES * (2 + 2 + CLASSES) * 16)
    low = LowRankComponents.of(
        [*cones([2] * 16), cones([2])[0].without_components(np.arange(3) > 0)]
    )
    assert [len(block.means) for block in low.blocks()] == [16, 16, 16, 1]
    means = np.concatenate([block.means for block in low.blocks()])
    expected = np.concatenate([mean_values(cone) for cone in low.cones])
    np.testing.assert_array_equal(means, expected)


@pytest.mark.usefixtures("small_blocks")
def test_features_are_scaled_by_the_variance_of_all_samples():
    """Total variance is that within the components plus that between their means."""
    nodes = cones([5, 3, 1, 4, 2])
    nodes[1] = build_cone(*data_of_one_class(), CLASSES, rank=4)
    moments = pool_moments(nodes)
    parts = sorted(nodes, key=lambda cone: cone.covariance.form)
    means = np.concatenate([mean_values(cone) for cone in parts])
    within = [np.diag(c.covariance.dense_matrix(e)) for c in parts for e in range(len(c.labels))]
    between = (means - moments.shares @ means) ** 2
    expected = np.sqrt(moments.shares @ (np.array(within) + between))
    np.testing.assert_allclose(moments.feature_scale, expected, rtol=1e-12)


def data_of_one_class():
    rng = torch.Generator().manual_seed(2)
    return torch.randn(300, FEATURES, generator=rng), torch.zeros(300, dtype=torch.int64)


def test_a_part_of_int8_values_is_that_part_of_all():
    codes = np.random.default_rng(0).integers(-127, 128, size=(4, 6, 3)).astype(np.int8)
    part = (slice(1, 3), slice(2, 6))
    for shape in [(4, 1, 3), (1, 1, 1), (4, 6, 3), (1, 6, 1)]:
        scales = np.random.default_rng(1).random(shape).astype(np.float32)
        values = QuantizedArray(codes, scales)
        np.testing.assert_array_equal(values.dense(*part), values.dense()[part])
