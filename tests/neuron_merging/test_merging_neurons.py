"""Merging hidden neurons: every ball is covered, whatever the method, numbering and radii."""

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from gems_flwr.moments.class_clusters import k_means
from gems_flwr.neuron_merging.common_point import common_point, inner_ball, inside
from gems_flwr.neuron_merging.distinct import distinct_neurons
from gems_flwr.neuron_merging.may_meet import pairs_that_may_meet
from gems_flwr.neuron_merging.merge_neurons import merge_neurons
from gems_flwr.neuron_merging.neuron_clusters import merge_in_clusters, split_greedily
from gems_flwr.neuron_merging.one_pass import merge_in_one_pass
from gems_flwr.spaces.neuron_balls import NeuronBalls

METHODS = ("kmeans", "verified", "concat")
MERGES = settings(max_examples=60, deadline=None)


def balls(centers, radii, importance=None):
    centers = np.asarray(centers, dtype=np.float32)
    radii = np.broadcast_to(np.asarray(radii, dtype=np.float64), len(centers))
    return NeuronBalls(centers, radii, "worst", importance=importance)


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


def renumbered(layer, order):
    return NeuronBalls(
        layer.centers[order], layer.radii[order], "worst", importance=layer.importance[order]
    )


def all_neurons(layers):
    return sorted((node, i) for node, layer in enumerate(layers) for i in range(len(layer)))


def as_set(rows):
    return {row.tobytes() for row in np.asarray(rows, dtype=np.float64) + 0.0}


@MERGES
@given(
    any_layers, st.sampled_from(METHODS), st.integers(1, 10), st.sampled_from([None, True, False])
)
def test_every_neuron_has_a_merged_one_in_its_ball(layers, method, clusters, within_node):
    merged = merge_neurons(layers, method, clusters=clusters, within_node=within_node, seed=1)
    merged.verify(layers)
    assert merged.uncovered(layers) == []
    assert merged.dropped == ()
    assert sorted(m for members in merged.origins for m in members) == all_neurons(layers)
    for row, members in zip(merged.weights, merged.origins, strict=True):
        assert all(layers[node].contains(neuron, row) for node, neuron in members)
    total = sum(float(layer.importance.sum()) for layer in layers)
    assert merged.importance.sum() == pytest.approx(total, rel=1e-5)


@MERGES
@given(
    any_layers, st.sampled_from(METHODS), st.integers(1, 6), st.sampled_from(["drop", "cluster"])
)
def test_within_a_budget_every_neuron_is_covered_or_listed_as_dropped(
    layers, method, limit, budget
):
    merged = merge_neurons(layers, method, clusters=8, max_neurons=limit, budget=budget, seed=1)
    merged.verify(layers)
    assert 1 <= len(merged) <= limit
    assert set(merged.uncovered(layers)) <= set(merged.dropped)
    members = [m for group in merged.origins for m in group]
    assert sorted([*members, *merged.dropped]) == all_neurons(layers)
    assert (np.diff(merged.importance) <= 0).all()


@MERGES
@given(any_layers, st.sampled_from(METHODS), st.integers(0, 100))
def test_how_a_node_numbers_its_neurons_changes_nothing(layers, method, seed):
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(layer)) for layer in layers]
    other = [renumbered(*pair) for pair in zip(layers, orders, strict=True)]
    first = merge_neurons(layers, method, clusters=3, seed=1)
    second = merge_neurons(other, method, clusters=3, seed=1)
    assert first.weights.tobytes() == second.weights.tobytes()
    assert first.importance.tobytes() == second.importance.tobytes()
    translated = [
        tuple(sorted((node, int(orders[node][neuron])) for node, neuron in members))
        for members in second.origins
    ]
    assert list(first.origins) == translated


@MERGES
@given(any_layers, st.sampled_from(METHODS))
def test_the_order_of_the_nodes_changes_only_their_indices(layers, method):
    first = merge_neurons(layers, method, clusters=3, seed=1)
    second = merge_neurons(layers[::-1], method, clusters=3, seed=1)
    assert first.weights.tobytes() == second.weights.tobytes()


@MERGES
@given(any_layers, st.sampled_from(METHODS), st.integers(1, 5))
def test_equal_nodes_give_back_their_layer(layers, method, nodes):
    layer = layers[0]
    merged = merge_neurons([layer] * nodes, method, clusters=len(layer), seed=1)
    assert as_set(merged.weights) == as_set(layer.centers)
    assert len(merged) == len(as_set(layer.centers))


@MERGES
@given(any_layers, st.sampled_from(METHODS))
def test_without_radii_nothing_merges_but_equal_neurons(layers, method):
    points = [balls(layer.centers, 0, layer.importance) for layer in layers]
    merged = merge_neurons(points, method, clusters=2, seed=1)
    centers = np.concatenate([layer.centers for layer in layers])
    assert len(merged) == len(as_set(centers))
    assert as_set(merged.weights) == as_set(centers)


@MERGES
@given(any_layers, st.booleans())
def test_the_inner_ball_of_a_group_lies_in_all_its_members_balls(layers, within_node):
    """Points on the surface of (z, s) are the worst ones of it."""
    items = distinct_neurons(layers)
    points, radii, groups = merge_in_one_pass(items, within_node, seed=1)
    rng = np.random.default_rng(0)
    for z, s, group in zip(points, radii, groups, strict=True):
        direction = rng.normal(size=(20, len(z)))
        surface = z + s * direction / np.linalg.norm(direction, axis=1)[:, None]
        for item in group:
            distances = np.linalg.norm(surface - items.centers[item], axis=1)
            assert distances.max() <= items.radii[item] + 1e-9 * (1 + s)


@MERGES
@given(any_layers)
def test_a_group_takes_one_different_neuron_per_node_unless_told_otherwise(layers):
    merged = merge_neurons(layers, "verified", seed=1)
    for members in merged.origins:
        for node in {node for node, _ in members}:
            mine = [layers[node].centers[i] for other, i in members if other == node]
            assert len(as_set(mine)) == 1


def smallest_violation(centers, radii):
    """Return min_w max_k |w - c_k| - r_k by an interior-point solver."""
    w, t = cp.Variable(centers.shape[1]), cp.Variable()
    constraints = [cp.norm(w - c) <= r + t for c, r in zip(centers, radii, strict=True)]
    problem = cp.Problem(cp.Minimize(t), constraints)
    problem.solve(solver=cp.CLARABEL)
    return float(problem.value)


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=15, deadline=None)
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


@MERGES
@given(st.integers(0, 10_000), st.sampled_from([0.0, 1e-3, 0.3, 10.0]), st.floats(1e-3, 1e3))
def test_pairs_are_ruled_out_only_if_they_do_not_meet(seed, size, unit):
    rng = np.random.default_rng(seed)
    centers = unit * (5 + rng.normal(size=(30, 4)))
    radii = unit * size * rng.random(30)
    apart = np.linalg.norm(centers[:, None] - centers, axis=2)
    meet = apart <= radii[:, None] + radii
    may = pairs_that_may_meet(centers, radii)
    assert (may >= meet).all()
    clearly = apart > 1.1 * (radii[:, None] + radii) + 0.1 * unit
    assert not (may & clearly).any()


def test_the_inner_ball_of_two():
    """Radii 2 and 2 around 0 and 3: between 1 and 2. Radii 3 and 1 around 0 and 1: the second."""
    zero = np.zeros(1)
    z, s = inner_ball(zero, 2.0, np.array([3.0]), 2.0)
    assert (z[0], s) == (1.5, 0.5)
    assert inner_ball(zero, 3.0, np.array([1.0]), 1.0) == (np.array([1.0]), 1.0)
    assert inner_ball(np.array([1.0]), 1.0, zero, 3.0) == (np.array([1.0]), 1.0)
    assert inner_ball(zero, 1.0, np.array([3.0]), 1.0) is None


def prototypes(seed=0, nodes=5, neurons=20, dimension=60, noise=0.05, radius=1.0):
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(neurons, dimension))
    return [
        balls(rng.permutation(common + noise * rng.normal(size=common.shape)), radius)
        for _ in range(nodes)
    ]


def test_huge_balls_give_the_means_of_the_clusters():
    """As with the papers' large epsilon; inertia as low as scikit-learn's, within 10 percent."""
    layers = random_layers(0, nodes=6, neurons=80, dimension=10, size=1e5, repeats=0)
    layers = [balls(layer.centers, 1e5) for layer in layers]
    merged = merge_neurons(layers, "kmeans", clusters=25, seed=3)
    assert len(merged) == 25
    inertia = 0.0
    for row, members in zip(merged.weights, merged.origins, strict=True):
        mine = np.stack([layers[node].centers[i] for node, i in members]).astype(np.float64)
        np.testing.assert_allclose(row, mine.mean(axis=0), rtol=0, atol=1e-12)
        inertia += float(((mine - row) ** 2).sum())
    everyone = np.concatenate([layer.centers for layer in layers]).astype(np.float64)
    other = KMeans(25, n_init=1, random_state=0).fit(everyone).inertia_
    assert inertia == pytest.approx(other, rel=0.1)


@pytest.mark.parametrize("method", ["kmeans", "verified"])
def test_copies_of_common_prototypes_find_each_other(method):
    """Copies are 0.05 * sqrt(2 * 60) = 0.55 apart, prototypes sqrt(120) = 11."""
    layers = prototypes()
    merged = merge_neurons(layers, method, clusters=20, seed=0)
    merged.verify(layers)
    assert len(merged) == 20
    assert merged.groups == 20
    assert all({node for node, _ in members} == set(range(5)) for members in merged.origins)


def test_the_layer_grows_with_the_clusters_and_as_radii_shrink():
    """Balls so large that all meet give the clusters; balls of no size give all neurons."""
    by_clusters = [
        len(merge_neurons(prototypes(radius=50.0), "kmeans", clusters=k, seed=0))
        for k in (1, 5, 10, 20)
    ]
    assert by_clusters == [1, 5, 10, 20]
    for method in ("kmeans", "verified"):
        by_radius = [
            len(merge_neurons(prototypes(radius=r), method, clusters=10, seed=0))
            for r in (50.0, 1.0, 0.25, 0.0)
        ]
        assert by_radius == sorted(by_radius)
        assert by_radius[-1] == 100
        assert by_radius[0] == (10 if method == "kmeans" else 20)


@pytest.mark.parametrize("method", METHODS)
def test_the_seed_decides_everything(method):
    layers = random_layers(5, nodes=5, neurons=30, dimension=50)
    first, second = (merge_neurons(layers, method, clusters=7, seed=11) for _ in range(2))
    assert first.weights.tobytes() == second.weights.tobytes()
    assert first.origins == second.origins


def test_only_kmeans_asked_so_keeps_a_nodes_neurons_apart():
    """Two neurons of one node with balls that meet: together as released, apart if asked."""
    layers = [balls([[0.0], [1.0]], 2.0)]
    assert len(merge_neurons(layers, "kmeans", clusters=1, seed=0)) == 1
    assert len(merge_neurons(layers, "kmeans", clusters=1, within_node=False, seed=0)) == 2
    assert len(merge_neurons(layers, "verified", seed=0)) == 2
    assert len(merge_neurons(layers, "verified", within_node=True, seed=0)) == 1


def test_a_mean_outside_of_a_ball_is_replaced_by_a_point_in_all():
    """Balls [-5, 5], [-4.9, 5.1] and [5, 7]: the mean 2.03 is not in the third, 5 is in all."""
    layers = [balls([[0.0]], 5), balls([[0.1]], 5), balls([[6.0]], 1)]
    merged = merge_neurons(layers, "kmeans", clusters=1, seed=0)
    merged.verify(layers)
    assert len(merged) == 1
    points, groups = merge_in_clusters(distinct_neurons(layers), 1, True, 0)
    assert points.shape == (1, 1)
    assert groups == [[0, 1, 2]]
    assert 5 - 1e-6 <= points[0, 0] <= 5 + 1e-6


def plain_pass(items):
    """The one pass without filter, blocks or limits, one neuron per node and group."""
    groups = []
    for item in range(len(items)):
        center, radius = items.centers[item].astype(np.float64), float(items.radii[item])
        taking = [
            g
            for g in groups
            if np.linalg.norm(g["z"] - center) <= g["s"] + radius
            and not (g["nodes"] & items.nodes[item]).any()
        ]
        if taking:
            nearest = min(taking, key=lambda g: np.linalg.norm(g["z"] - center))
            nearest["z"], nearest["s"] = inner_ball(nearest["z"], nearest["s"], center, radius)
            nearest["nodes"] = nearest["nodes"] | items.nodes[item]
            nearest["members"].append(item)
        else:
            nodes = items.nodes[item].copy()
            groups.append({"z": center, "s": radius, "nodes": nodes, "members": [item]})
    return [g["members"] for g in groups]


@pytest.mark.parametrize("size", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("dimension", [8, 60])
def test_the_filter_loses_no_group_that_a_plain_pass_finds(dimension, size):
    """Several blocks; noise 0.3 * sqrt(d), so that some copies meet and some do not."""
    layers = random_layers(2, nodes=6, neurons=100, dimension=dimension, size=size, repeats=0.1)
    layers += random_layers(2, nodes=6, neurons=100, dimension=dimension, size=size, repeats=0.1)
    layers = [balls(layer.centers + 0.01 * k, layer.radii) for k, layer in enumerate(layers)]
    items = distinct_neurons(layers)
    assert len(items) > 256
    _, _, groups = merge_in_one_pass(items, False, seed=0)
    assert groups == plain_pass(items)


def test_more_candidates_than_are_checked_cost_width_only():
    """600 neurons in 40 dimensions, all within reach of the filter, few of each other."""
    rng = np.random.default_rng(0)
    layers = [balls(rng.normal(size=(200, 40)), 3.6) for _ in range(3)]
    merged = merge_neurons(layers, "verified", seed=0)
    merged.verify(layers)
    assert merged.groups > 0
    assert len(merged) > 128


def test_k_means_centres_are_weighted_means_at_convergence():
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(200, 3, generator=generator, dtype=torch.float64)
    weights = torch.rand(200, generator=generator, dtype=torch.float64) + 0.1
    labels, centers = k_means(points, 5, seed=0, rounds=500, weights=weights)
    for label, center in enumerate(centers.numpy()):
        mine = (labels == label).numpy()
        mean = np.average(points.numpy()[mine], axis=0, weights=weights.numpy()[mine])
        np.testing.assert_allclose(center, mean, rtol=1e-12)


# --- exactly so many -------------------------------------------------------------------------


@MERGES
@given(
    layers=any_layers,
    method=st.sampled_from(METHODS),
    budget=st.sampled_from(["drop", "cluster"]),
    width=st.integers(1, 12),
)
def test_a_layer_of_one_width_has_it_and_is_verified(layers, method, budget, width):
    merged = merge_neurons(
        layers, method, clusters=width, max_neurons=width, exact=True, budget=budget, seed=1
    )
    assert len(merged) == width
    merged.verify(layers)
    # Each neuron is a member of one merged neuron, or was dropped.
    everyone = [member for members in (*merged.origins, merged.dropped) for member in members]
    assert sorted(everyone) == [(k, i) for k, layer in enumerate(layers) for i in range(len(layer))]
    if len(distinct_neurons(layers)) <= width:
        assert merged.dropped == ()
        assert not merged.uncovered(layers)


def test_groups_are_taken_apart_from_the_most_important_neuron_on():
    """One ball holds all four; two places more go to the two that matter most."""
    centers = [[0.0], [1.0], [2.0], [3.0]]
    layer = balls(centers, 9.0, importance=np.array([0.1, 0.4, 0.2, 0.3]))
    merged = merge_neurons([layer], "kmeans", clusters=1, max_neurons=3, exact=True, seed=0)
    pairs = zip(merged.weights, merged.origins, strict=True)
    alone = {members[0][1]: row.tolist() for row, members in pairs if len(members) == 1}
    assert alone == {1: [1.0], 3: [3.0]}
    assert ((0, 0), (0, 2)) in merged.origins


def test_neurons_that_do_nothing_fill_what_is_left():
    same = [balls([[1.0, 2.0]], 0.5), balls([[1.0, 2.0]], 0.5)]
    merged = merge_neurons(same, "verified", max_neurons=3, exact=True, seed=0)
    assert merged.weights.tolist() == [[1, 2], [0, 0], [0, 0]]
    assert merged.origins == (((0, 0), (1, 0)), (), ())
    assert merged.importance[1:].tolist() == [0, 0]
