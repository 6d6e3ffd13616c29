"""The 2018 paper's merge against a plain reading of its Algorithm 2."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.neuron_merging.all_pairs import merge_all_pairs
from gems_flwr.neuron_merging.distinct import distinct_neurons
from gems_flwr.neuron_merging.merge_neurons import merge_neurons
from gems_flwr.spaces.neuron_balls import NeuronBalls


def layer(seed, neurons, dimension, size):
    rng = np.random.default_rng(seed)
    radii = size * rng.uniform(0, 1.5, neurons) * (rng.random(neurons) > 0.2)
    return NeuronBalls(rng.normal(size=(neurons, dimension)).astype(np.float32), radii, "sampled")


two_layers = st.builds(
    lambda seed, a, b, d, size: [layer(seed, a, d, size), layer(seed + 1, b, d, size)],
    st.integers(0, 10_000),
    st.integers(1, 7),
    st.integers(1, 7),
    st.sampled_from([1, 3, 40]),
    st.sampled_from([0.0, 0.2, 1.0, 5.0]),
)


def algorithm_2(one, two):
    """Lines 10 to 12 as they stand: loops over all pairs, then over the rest."""
    rows, met_1, met_2 = [], set(), set()
    for i in range(len(one)):
        for j in range(len(two)):
            c1, c2 = one.centers[i].astype(float), two.centers[j].astype(float)
            r1, r2 = float(one.radii[i]), float(two.radii[j])
            if np.sqrt(((c1 - c2) ** 2).sum()) <= r1 + r2:
                rows.append((c1 * r2 + c2 * r1) / (r1 + r2))
                met_1.add(i)
                met_2.add(j)
    rows += [one.centers[i].astype(float) for i in range(len(one)) if i not in met_1]
    rows += [two.centers[j].astype(float) for j in range(len(two)) if j not in met_2]
    return np.array(rows)


def by_value(rows):
    return rows[np.lexsort(rows.T[::-1].round(9))]


@settings(max_examples=80, deadline=None)
@given(two_layers)
def test_pairs_are_those_of_algorithm_2(layers):
    merged = merge_neurons(layers, "pairs", seed=0)
    wanted = algorithm_2(*layers)
    assert merged.weights.shape == wanted.shape
    np.testing.assert_allclose(by_value(merged.weights), by_value(wanted), rtol=1e-9, atol=1e-9)
    merged.verify(layers)
    assert merged.uncovered(layers) == []


@settings(max_examples=40, deadline=None)
@given(two_layers, st.integers(1, 5), st.sampled_from(["drop", "cluster"]), st.booleans())
def test_within_a_budget_nobody_is_both_kept_and_lost(layers, budget, how, exact):
    merged = merge_neurons(layers, "pairs", max_neurons=budget, budget=how, exact=exact, seed=0)
    assert len(merged) == budget if exact else len(merged) <= budget
    kept = {member for members in merged.origins for member in members}
    assert not kept & set(merged.dropped)
    assert len(set(merged.dropped)) == len(merged.dropped)
    everybody = {(node, i) for node, each in enumerate(layers) for i in range(len(each))}
    assert kept | set(merged.dropped) == everybody


def test_neurons_of_one_node_make_no_pair_and_of_three_nodes_all_others_do():
    rows = np.array([[0.0, 0], [0.1, 0]], np.float32)
    one = NeuronBalls(rows, np.ones(2), "sampled")
    assert len(merge_neurons([one], "pairs", seed=0)) == 2
    three = [
        NeuronBalls(np.array([[x, 0.0]], np.float32), np.ones(1), "sampled") for x in (0, 1, 2)
    ]
    # 0 with 1, 1 with 2, and 0 with 2, whose balls touch.
    merged = merge_neurons(three, "pairs", seed=0)
    assert sorted(merged.weights[:, 0].tolist()) == [0.5, 1.0, 1.5]


def test_a_node_whose_balls_meet_everything_cannot_make_a_layer_without_end():
    rng = np.random.default_rng(0)
    honest = NeuronBalls(rng.normal(size=(30, 4)).astype(np.float32), np.full(30, 0.1), "sampled")
    hostile = NeuronBalls(rng.normal(size=(30, 4)).astype(np.float32), np.full(30, 1e6), "sampled")
    items = distinct_neurons([honest, hostile])
    points, groups = merge_all_pairs(items, max_pairs=50)
    assert sum(len(group) == 2 for group in groups) == 50
    assert {item for group in groups for item in group} == set(range(60))
    assert np.isfinite(points).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_a_merged_pair_lies_between_the_two_by_their_radii(scale):
    """Radii 1 and 3, two apart: (0 * 3 + 2 * 1) / 4 = 0.5 from the first."""
    ones = [np.zeros((1, 3), np.float32), np.array([[2 * scale, 0, 0]], np.float32)]
    layers = [
        NeuronBalls(rows, np.array([radius * scale]), "sampled")
        for rows, radius in zip(ones, (1.0, 3.0), strict=True)
    ]
    merged = merge_neurons(layers, "pairs", seed=0)
    np.testing.assert_allclose(merged.weights, [[0.5 * scale, 0, 0]], rtol=1e-6)
