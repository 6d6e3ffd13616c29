"""A merged layer: what it says of itself, what verification finds, and the size budget."""

import dataclasses

import numpy as np
import pytest

from gems_flwr.neuron_merging.budget import prune, shrink
from gems_flwr.neuron_merging.merge_neurons import merge_neurons
from gems_flwr.neuron_merging.merged_layer import MergedLayer
from gems_flwr.spaces.neuron_balls import NeuronBalls


def balls(centers, radii, importance=None):
    centers = np.asarray(centers, dtype=np.float32)
    radii = np.broadcast_to(np.asarray(radii, dtype=np.float64), len(centers))
    return NeuronBalls(centers, radii, "worst", importance=importance)


# Node 0 at 0 and 10, node 1 at 0 and 20; only the zeros meet.
LAYERS = [
    balls([[0.0], [10.0]], 1.0, np.array([3.0, 1.0])),
    balls([[0.0], [20.0]], 1.0, np.array([4.0, 2.0])),
]


@pytest.fixture
def merged():
    return merge_neurons(LAYERS, "verified", seed=0)


def test_the_most_important_neuron_comes_first(merged):
    """3 + 4 for the zeros, then 2, then 1."""
    np.testing.assert_array_equal(merged.weights, [[0], [20], [10]])
    np.testing.assert_array_equal(merged.importance, [7, 2, 1])
    assert merged.origins == (((0, 0), (1, 0)), ((1, 1),), ((0, 1),))
    assert merged.method == "verified"
    assert (len(merged), merged.groups, merged.dropped) == (3, 1, ())


def test_a_neuron_outside_of_a_members_ball_is_found(merged):
    moved = merged.weights.copy()
    moved[1] += 1.5
    wrong = dataclasses.replace(merged, weights=moved)
    with pytest.raises(ValueError, match=r"node 1, neuron 1: .* 1.5 away.* radius 1"):
        wrong.verify(LAYERS)
    assert wrong.uncovered(LAYERS) == [(1, 1)]


def test_a_neuron_that_was_forgotten_is_found(merged):
    wrong = dataclasses.replace(merged, origins=(*merged.origins[:2], ()))
    with pytest.raises(ValueError, match="node 0, neuron 1: has no merged neuron"):
        wrong.verify(LAYERS)
    # Its ball has one all the same.
    assert wrong.uncovered(LAYERS) == []


def test_a_neuron_that_is_not_there_is_found(merged):
    with pytest.raises(ValueError, match="node 1, neuron 0: there is no such neuron"):
        merged.verify(LAYERS[:1])


def test_shapes_must_fit():
    with pytest.raises(ValueError, match="expected 2 of each"):
        MergedLayer(np.zeros((2, 1)), ((),), (), "concat", np.ones(2))
    with pytest.raises(ValueError, match="weights"):
        MergedLayer(np.zeros(2), (), (), "concat", np.ones(2))


def test_the_least_important_are_dropped_and_listed(merged):
    small = prune(merged, 2)
    small.verify(LAYERS)
    np.testing.assert_array_equal(small.weights, [[0], [20]])
    assert small.dropped == ((0, 1),)
    assert small.uncovered(LAYERS) == [(0, 1)]
    assert prune(merged, 3) is merged
    assert prune(small, 1).dropped == ((0, 1), (1, 1))
    assert merge_neurons(LAYERS, "verified", max_neurons=2, seed=0).dropped == small.dropped


def test_dropped_neurons_may_be_covered_by_others():
    """0 and 0.5 are neurons of one node: both kept apart, each in the other's ball."""
    layers = [balls([[0.0], [0.5]], 1.0, np.array([2.0, 1.0]))]
    small = merge_neurons(layers, "verified", max_neurons=1, seed=0)
    assert small.dropped == ((0, 1),)
    assert small.uncovered(layers) == []


def test_clusters_of_merged_neurons_are_weighted_means_and_own_up_to_whom_they_lose(merged):
    """The nearest two, 10 and 20 with importance 1 and 2, meet at 50/3: in neither's ball."""
    found = {shrink(merged, LAYERS, 2, seed).weights.tobytes() for seed in range(5)}
    expected = np.array([[0.0], [50 / 3]])
    assert expected.tobytes() in found
    small = next(
        s for s in (shrink(merged, LAYERS, 2, seed) for seed in range(5)) if s.weights[0, 0] == 0
    )
    small.verify(LAYERS)
    np.testing.assert_allclose(small.weights, expected)
    assert small.origins == (((0, 0), (1, 0)), ())
    assert small.dropped == ((0, 1), (1, 1))
    np.testing.assert_array_equal(small.importance, [7, 3])
    assert shrink(merged, LAYERS, 3, 0) is merged


def test_neurons_that_all_add_nothing_can_be_clustered():
    layers = [balls([[0.0], [1.0], [9.0]], 0.0, np.zeros(3))]
    small = merge_neurons(layers, "concat", max_neurons=1, budget="cluster", seed=0)
    np.testing.assert_allclose(small.weights, [[10 / 3]])
    assert len(small.dropped) == 3


def test_bad_input_is_refused_with_the_culprits_name():
    good = balls([[0.0, 1.0]], 1.0)
    with pytest.raises(ValueError, match="at least one, got none"):
        merge_neurons([], "concat", seed=0)
    with pytest.raises(ValueError, match="dimension 2 as of node 0, got 1 of node 2"):
        merge_neurons([good, good, balls([[0.0]], 1.0)], "concat", seed=0)
    other = dataclasses.replace(good, outgoing=1)
    with pytest.raises(ValueError, match="outgoing 0 as of node 0, got 1 of node 1"):
        merge_neurons([good, other], "concat", seed=0)
    for options in ({"clusters": 0}, {"max_neurons": 0}, {"max_neurons": 2.5}):
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}: expected an integer of at least 1"):
            merge_neurons([good], "kmeans", seed=0, **options)
    with pytest.raises(ValueError, match="method: expected one of"):
        merge_neurons([good], "average", seed=0)
    with pytest.raises(ValueError, match="budget: expected one of"):
        merge_neurons([good], "concat", budget="sell", seed=0)


def test_the_given_balls_stay_as_they_are(merged):
    before = [layer.to_array().copy() for layer in LAYERS]
    merge_neurons(LAYERS, "kmeans", clusters=1, seed=0)
    for layer, array in zip(LAYERS, before, strict=True):
        np.testing.assert_array_equal(layer.to_array(), array)
    with pytest.raises(ValueError, match="read-only"):
        merged.weights[0] = 1
