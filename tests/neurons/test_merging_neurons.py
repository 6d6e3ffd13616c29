"""Merging hidden neurons: every ball is covered, whatever the numbering and radii."""

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from gems_flwr.neurons import NeuronBalls, merge_neurons
from gems_flwr.neurons.merge import (
    common_point,
    distinct_neurons,
    in_ball,
    inside,
    pairs_that_may_meet,
    split_greedily,
)

MERGES = settings(max_examples=30)


def balls(centers, radii, importance=None):
    centers = np.asarray(centers, dtype=np.float32)
    radii = np.broadcast_to(np.asarray(radii, dtype=np.float64), len(centers))
    return NeuronBalls(centers, radii, importance)


def random_layers(seed, nodes=3, neurons=6, dimension=3, size=0.5, repeats=0.3):
    """Noisy copies of common prototypes, some of them equal to the bit, of unequal radii."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(neurons, dimension))
    found = []
    for _ in range(nodes):
        count = int(rng.integers(1, neurons + 1))
        pick = rng.integers(0, neurons, count)
        noise = 0.3 * rng.normal(size=(count, dimension)) * (rng.random((count, 1)) > repeats)
        radii = size * rng.uniform(0, 1.5, count) * (rng.random(count) > 0.1)
        importance = rng.choice([0.0, 0.1, 0.3, 1.0], count)
        found.append(balls(common[pick] + noise, radii, importance))
    return found


any_layers = st.builds(
    random_layers,
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 6),
    neurons=st.integers(1, 8),
    dimension=st.sampled_from([1, 2, 3, 40]),
    size=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 1.0, 3.0, 1e5]),
)


def all_neurons(layers):
    return [(node, i) for node, layer in enumerate(layers) for i in range(len(layer))]


def uncovered(merged, layers):
    """Return all neurons with no merged neuron in their ball."""
    return [
        (node, i)
        for node, i in all_neurons(layers)
        if not any(in_ball(layers[node], i, row) for row in merged.weights)
    ]


def as_set(rows):
    return {row.tobytes() for row in np.asarray(rows, dtype=np.float64) + 0.0}


def check_members(merged, layers):
    """Every merged neuron lies in the balls of its members."""
    for row, members in zip(merged.weights, merged.origins, strict=True):
        for node, neuron in members:
            assert in_ball(layers[node], neuron, row)


@MERGES
@given(any_layers, st.integers(1, 10))
def test_every_neuron_has_a_merged_one_in_its_ball(layers, clusters):
    merged = merge_neurons(layers, clusters=clusters, seed=1)
    check_members(merged, layers)
    assert uncovered(merged, layers) == []
    assert merged.dropped == ()
    assert sorted(m for members in merged.origins for m in members) == all_neurons(layers)
    assert (np.diff(merged.importance) <= 0).all()
    total = sum(float(layer.importance.sum()) for layer in layers)
    assert merged.importance.sum() == pytest.approx(total, rel=1e-5)


@MERGES
@given(any_layers, st.integers(1, 12))
def test_a_layer_of_one_width_has_it_and_each_neuron_is_covered_or_dropped(layers, width):
    merged = merge_neurons(layers, clusters=width, width=width, seed=1)
    assert len(merged) == width
    check_members(merged, layers)
    assert set(uncovered(merged, layers)) <= set(merged.dropped)
    everyone = [member for members in (*merged.origins, merged.dropped) for member in members]
    assert sorted(everyone) == all_neurons(layers)
    if len(distinct_neurons(layers)) <= width:
        assert merged.dropped == ()


@MERGES
@given(any_layers, st.integers(0, 100))
def test_how_a_node_numbers_its_neurons_changes_nothing(layers, seed):
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(layer)) for layer in layers]
    other = [
        balls(layer.centers[order], layer.radii[order], layer.importance[order])
        for layer, order in zip(layers, orders, strict=True)
    ]
    first = merge_neurons(layers, clusters=3, seed=1)
    second = merge_neurons(other, clusters=3, seed=1)
    assert first.weights.tobytes() == second.weights.tobytes()
    assert first.importance.tobytes() == second.importance.tobytes()
    assert list(first.origins) == [
        tuple(sorted((node, int(orders[node][neuron])) for node, neuron in members))
        for members in second.origins
    ]
    assert (
        first.weights.tobytes() == merge_neurons(layers[::-1], clusters=3, seed=1).weights.tobytes()
    )


@MERGES
@given(any_layers, st.integers(1, 5))
def test_equal_nodes_give_back_their_layer_and_without_radii_only_equal_neurons_merge(
    layers, nodes
):
    layer = layers[0]
    merged = merge_neurons([layer] * nodes, clusters=len(layer), seed=1)
    assert as_set(merged.weights) == as_set(layer.centers)
    points = [balls(each.centers, 0, each.importance) for each in layers]
    merged = merge_neurons(points, clusters=2, seed=1)
    centers = np.concatenate([each.centers for each in layers])
    assert as_set(merged.weights) == as_set(centers)
    assert len(merged) == len(as_set(centers))


def test_huge_balls_give_the_means_of_the_clusters():
    """As with the papers' large epsilon; inertia as low as scikit-learn's, within 10 percent."""
    layers = random_layers(0, nodes=6, neurons=80, dimension=10, size=1e5, repeats=0)
    layers = [balls(layer.centers, 1e5) for layer in layers]
    merged = merge_neurons(layers, clusters=25, seed=3)
    assert len(merged) == 25
    inertia = 0.0
    for row, members in zip(merged.weights, merged.origins, strict=True):
        mine = np.stack([layers[node].centers[i] for node, i in members]).astype(np.float64)
        np.testing.assert_allclose(row, mine.mean(axis=0), rtol=0, atol=1e-12)
        inertia += float(((mine - row) ** 2).sum())
    everyone = np.concatenate([layer.centers for layer in layers]).astype(np.float64)
    other = KMeans(25, n_init=1, random_state=0).fit(everyone).inertia_
    assert inertia == pytest.approx(other, rel=0.1)


# --- of one width -------------------------------------------------------------------------------


def test_groups_are_taken_apart_from_the_most_important_neuron_on():
    """One ball holds all four; two places more go to the two that matter most."""
    layer = balls([[0.0], [1.0], [2.0], [3.0]], 9.0, np.array([0.1, 0.4, 0.2, 0.3]))
    merged = merge_neurons([layer], clusters=1, width=3, seed=0)
    pairs = zip(merged.weights, merged.origins, strict=True)
    alone = {members[0][1]: row.tolist() for row, members in pairs if len(members) == 1}
    assert alone == {1: [1.0], 3: [3.0]}
    assert ((0, 0), (0, 2)) in merged.origins


def test_clusters_of_merged_neurons_are_weighted_means_and_list_whom_they_lose():
    """Zeros of two nodes merge; 10 and 20, of importance 1 and 2, meet at 50/3: in no ball."""
    layers = [
        balls([[0.0], [10.0]], 1.0, np.array([3.0, 1.0])),
        balls([[0.0], [20.0]], 1.0, np.array([4.0, 2.0])),
    ]
    merged = merge_neurons(layers, clusters=9, seed=0)
    np.testing.assert_array_equal(merged.weights, [[0], [20], [10]])
    np.testing.assert_array_equal(merged.importance, [7, 2, 1])
    tried = [merge_neurons(layers, clusters=9, width=2, seed=seed) for seed in range(5)]
    small = next(each for each in tried if each.weights[0, 0] == 0)
    np.testing.assert_allclose(small.weights, [[0], [50 / 3]])
    assert small.origins == (((0, 0), (1, 0)), ())
    assert small.dropped == tuple(uncovered(small, layers)) == ((0, 1), (1, 1))
    np.testing.assert_array_equal(small.importance, [7, 3])
    idle = [balls([[0.0], [1.0], [9.0]], 0.0, np.zeros(3))]
    np.testing.assert_allclose(merge_neurons(idle, clusters=1, width=1, seed=0).weights, [[10 / 3]])


# --- what balls have in common ------------------------------------------------------------------


def smallest_violation(centers, radii):
    """Return min_w max_k |w - c_k| - r_k by an interior-point solver."""
    w, t = cp.Variable(centers.shape[1]), cp.Variable()
    constraints = [cp.norm(w - c) <= r + t for c, r in zip(centers, radii, strict=True)]
    problem = cp.Problem(cp.Minimize(t), constraints)
    problem.solve(solver=cp.CLARABEL)
    return float(problem.value)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 6), st.sampled_from([1, 2, 5]), st.floats(0.3, 2.5))
def test_a_common_point_is_found_if_an_independent_solver_finds_one(seed, count, dimension, size):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(count, dimension))
    radii = size * rng.uniform(0.3, 1.5, count)
    truth = smallest_violation(centers, radii)
    point = common_point(centers, radii)
    if abs(truth) > 1e-6:
        assert (point is not None) == (truth < 0)
    if point is not None:
        assert inside(point, centers, radii)


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.floats(0.5, 1.5))
def test_greedy_groups_cannot_take_one_more(seed, size):
    """A group has a common point; no neuron of a later group fits into an earlier one."""
    rng = np.random.default_rng(seed)
    centers, radii = rng.normal(size=(6, 2)), size * rng.uniform(0.5, 1.0, 6)
    found = split_greedily(centers, radii, pairs_that_may_meet(centers, radii))
    assert sorted(i for _, group in found for i in group) == list(range(6))
    for place, (point, group) in enumerate(found):
        assert inside(point, centers[group], radii[group])
        for later in (i for _, other in found[place + 1 :] for i in other):
            assert smallest_violation(centers[[*group, later]], radii[[*group, later]]) > -1e-6
