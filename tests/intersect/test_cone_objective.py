"""The cone objective: split-independent, close to pooled training, and what it says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import approx_fprime

from gems_flwr.intersect.cone_objective import ConeObjective, ConeOptions, balanced_shares
from gems_flwr.intersect.cones import solve_cones
from gems_flwr.intersect.intersect import intersect
from gems_flwr.intersect.pooled_moments import pool_moments
from gems_flwr.intersect.tuning import fine_tune_linear, public_weight, tune_cones
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.spaces.output_layer import unflatten_linear


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


def test_nodes_with_one_class_each_reach_the_pooled_accuracy():
    """No node has ever seen a second class, yet the layer tells all four apart."""
    x, y = samples(seed=3)
    cones = [build_cone(x[y == c], y[y == c], 4, rank=3) for c in range(4)]
    result = intersect(cones)
    assert not result.is_average
    assert accuracy(result.point, x, y) > 0.93
    assert result.feasible
    assert len(result.margins) == 4


def test_an_impossible_demand_is_not_called_feasible():
    x, y = samples(seed=3)
    cones = [build_cone(x, y, 4, epsilon=1 - 1e-9)]
    result = solve_cones(cones)
    assert result.status == "undecided"
    assert min(result.margins) < 0


def test_the_objective_is_the_expected_pairwise_loss():
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
        draws = rng.multivariate_normal(
            cone.means[component], cone.covariance.dense_matrix(component), 400_000
        )
        scores = draws @ weight.T + bias
        losses = np.logaddexp(0, scores - scores[:, [label]])
        rivals = np.delete(losses, label, axis=1).sum(axis=1)
        expected += rivals.mean() * cone.counts[component] / cone.total_count
    assert value == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("rank", [None, 2])
def test_the_gradient_is_that_of_differences(rank):
    x, y = samples(seed=5, classes=3)
    cone = build_cone(x, y, 3, rank=rank, clusters=2)
    objective = ConeObjective(pool_moments([cone]), ConeOptions())
    layer = np.random.default_rng(0).normal(size=3 * 7)

    def value_and_gradient(flat):
        w = torch.from_numpy(flat)
        value, *parts = objective.value_and_gradient(w[:18].reshape(3, 6), w[18:])
        return value, torch.cat([part.reshape(-1) for part in parts]).numpy()

    numeric = approx_fprime(layer, lambda flat: value_and_gradient(flat)[0], 1e-7)
    np.testing.assert_allclose(value_and_gradient(layer)[1], numeric, atol=1e-5)


def test_a_late_node_continues_from_what_was_there():
    x, y = samples()
    cones = [build_cone(x[y == c], y[y == c], 4) for c in range(4)]
    early = solve_cones(cones[:3])
    warm = solve_cones(cones, start=early.point)
    cold = solve_cones(cones)
    np.testing.assert_allclose(warm.point, cold.point, atol=5e-3 * np.abs(cold.point).max())


def test_a_public_sample_joins_the_objective():
    """With three of four classes at the nodes only the public sample knows the fourth."""
    x, y = samples(seed=3)
    cones = [build_cone(x[y == c], y[y == c], 4, rank=3) for c in range(3)]
    without = solve_cones(cones)
    joint = tune_cones(cones, x[:100], y[:100], factor=5.0)
    assert accuracy(joint.point, x, y) > accuracy(without.point, x, y) + 0.1
    assert public_weight(500) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="factor"):
        public_weight(10, -1.0)


def test_fine_tuning_is_seeded_and_learns():
    x, y = samples(seed=3)
    start = np.zeros(4 * 7)
    one, two = (fine_tune_linear(start, x, y, 4, rate=1e-2, seed=4) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert accuracy(one, x, y) > 0.9
    assert not np.array_equal(one, fine_tune_linear(start, x, y, 4, rate=1e-2, seed=5))


def test_options_out_of_range_are_refused():
    for bad in ({"ridge": -1.0}, {"iterations": 0}, {"class_weight": "none"}):
        with pytest.raises(ValueError, match="expected"):
            ConeOptions(**bad)


def test_balanced_classes_weigh_the_same_however_rare_they_are():
    """Shares .6 and .3 of class 0 and .1 of class 2: a half for each class."""
    shares = balanced_shares(np.array([0, 0, 2]), np.array([0.6, 0.3, 0.1]))
    assert shares == pytest.approx([1 / 3, 1 / 6, 1 / 2])


def test_balanced_weights_serve_a_rare_class_better():
    """Overlapping clouds, 20 to 1: by counts the rare class is given up, balanced it is not."""
    rng = np.random.default_rng(0)
    common, rare = rng.normal(size=(4000, 2)), rng.normal((1.0, 0.0), size=(200, 2))
    inputs = torch.from_numpy(np.concatenate([common, rare]))
    labels = torch.from_numpy(np.repeat([0, 1], [4000, 200]))
    cone = build_cone(inputs, labels, 2)

    def recall(weight):
        point = solve_cones([cone], ConeOptions(class_weight=weight)).point
        w, b = point[:4].reshape(2, 2), point[4:]
        return float((rare @ (w[1] - w[0]) + b[1] - b[0] > 0).mean())

    assert recall("counts") < 0.1
    assert recall("balanced") > 0.6
