"""Neurons of hostile nodes: what is left out, what counts for less, what merging makes of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.neurons import NeuronBalls, merge_neurons, screen_neurons
from gems_flwr.neurons.merge import limit_each

NODES, NEURONS, DIMENSION = 5, 8, 6


def layer(seed, length=1.0, radius=0.1, importance=1.0):
    """Neurons in random directions, of about one length, as nodes with starts of their own have."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(NEURONS, DIMENSION))
    lengths = length * rng.uniform(0.8, 1.2, (NEURONS, 1))
    centers *= lengths / np.linalg.norm(centers, axis=1, keepdims=True)
    radii = radius * rng.uniform(1, 3, NEURONS)
    return NeuronBalls(centers, radii, importance * rng.uniform(0.5, 1.5, NEURONS))


def honest(seed=0):
    return [layer(100 * seed + node) for node in range(NODES)]


def moved(balls, shift=0.0, scale=1.0):
    centers = balls.centers * np.float32(scale)
    centers[0] += np.float32(shift)
    return NeuronBalls(centers, balls.radii, balls.importance)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_honest_neurons_pass_as_they_are(seed):
    layers = honest(seed)
    screened, reasons = screen_neurons(layers)
    assert all(after is before for after, before in zip(screened, layers, strict=True))
    assert reasons == [""] * NODES
    layers[2] = moved(layers[2], scale=1e-3)
    assert "the median length of its neurons is" in screen_neurons(layers)[1][2]
    two = layers[1:3]
    assert screen_neurons(two)[0] == two


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.floats(10, 5e5), st.sampled_from(["shift", "scale"]))
def test_two_of_five_with_huge_neurons_are_left_out_and_the_others_are_not(seed, size, how):
    """Even one huge neuron of eight: it alone would drown the inputs of the next layer."""
    layers = honest(seed)
    layers[1], layers[3] = (moved(each, **{how: size}) for each in (layers[1], layers[3]))
    screened, reasons = screen_neurons(layers)
    assert [each is None for each in screened] == [False, True, False, True, False]
    assert "it has a neuron of length" in reasons[1]
    merged = merge_neurons([each for each in screened if each], clusters=100, seed=0)
    assert np.linalg.norm(merged.weights, axis=1).max() < 1.3


def test_radii_of_nothing_count_as_a_third_of_what_others_have():
    layers = honest()
    layers[0] = NeuronBalls(layers[0].centers, np.zeros(NEURONS), layers[0].importance)
    screened, reasons = screen_neurons(layers)
    floor = np.median([each.radii.min() for each in layers]) / 3
    assert screened[0].radii == pytest.approx(floor, rel=1e-6)
    assert "8 of its radii count as" in reasons[0]
    assert reasons[1:] == [""] * 4


def test_radii_without_end_are_cut_to_where_they_hold_every_plausible_neuron():
    layers = honest()
    layers[0] = NeuronBalls(layers[0].centers, np.full(NEURONS, 1e6), layers[0].importance)
    screened, _ = screen_neurons(layers)
    assert 2 * 1.2 < screened[0].radii.max() < 10


def test_boasted_importance_counts_as_twice_what_is_usual():
    layers = [layer(0, importance=1e5), *honest()[1:]]
    screened, reasons = screen_neurons(layers)
    assert "importance of" in reasons[0]
    usual = np.median([each.importance.sum() for each in layers])
    assert screened[0].importance.sum() == pytest.approx(2 * usual, rel=1e-5)


def test_only_neurons_that_stand_for_one_node_alone_are_limited():
    """The balls of nodes 0 and 1 meet pairwise in ten places, node 2 stands alone in five."""
    points = np.arange(10.0)[:, None] * [[10, 0]]
    layers = [
        NeuronBalls(points, np.ones(10)),
        NeuronBalls(points + 0.5, np.ones(10)),
        NeuronBalls(points[:5] + np.array([[0, 50]]), np.ones(5)),
    ]
    merged = merge_neurons(layers, clusters=15, seed=0)
    assert (len(merged), merged.groups) == (15, 10)
    limited = limit_each(merged, 2)
    assert len(limited) == 12
    assert limited.dropped == ((2, 2), (2, 3), (2, 4))
