"""Neurons of hostile nodes: what is left out, what counts for less, what merging makes of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.neuron_merging.budget import limit_each
from gems_flwr.neuron_merging.merge_neurons import merge_neurons
from gems_flwr.neuron_merging.screen_neurons import screen_neurons
from gems_flwr.spaces.neuron_balls import NeuronBalls

NODES, NEURONS, DIMENSION = 5, 8, 6


def layer(seed, length=1.0, radius=0.1, importance=1.0):
    """Neurons in random directions, of about one length, as nodes with starts of their own have."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(NEURONS, DIMENSION))
    centers *= (
        length
        * rng.uniform(0.8, 1.2, (NEURONS, 1))
        / np.linalg.norm(centers, axis=1, keepdims=True)
    )
    radii = radius * rng.uniform(1, 3, NEURONS)
    return NeuronBalls(
        centers, radii, "worst", importance=importance * rng.uniform(0.5, 1.5, NEURONS)
    )


def honest(seed=0):
    return [layer(100 * seed + node) for node in range(NODES)]


def moved(balls, shift=0.0, scale=1.0):
    centers = balls.centers * np.float32(scale)
    centers[0] += np.float32(shift)
    return NeuronBalls(centers, balls.radii, balls.method, importance=balls.importance)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_honest_neurons_pass_as_they_are(seed):
    layers = honest(seed)
    screened = screen_neurons(layers)
    assert all(after is before for after, before in zip(screened.layers, layers, strict=True))
    assert screened.reasons == ("",) * NODES


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.floats(10, 5e5), st.sampled_from(["shift", "scale"]))
def test_two_of_five_with_huge_neurons_are_left_out_and_the_others_are_not(seed, size, how):
    """Even one huge neuron of eight: it alone would drown the inputs of the next layer."""
    layers = honest(seed)
    layers[1], layers[3] = (moved(each, **{how: size}) for each in (layers[1], layers[3]))
    screened = screen_neurons(layers)
    assert [each is None for each in screened.layers] == [False, True, False, True, False]
    assert "it has a neuron of length" in screened.reasons[1]
    merged = merge_neurons([each for each in screened.layers if each], "concat", seed=0)
    assert np.linalg.norm(merged.weights, axis=1).max() < 1.3


def test_neurons_of_no_length_are_left_out():
    layers = honest()
    layers[2] = moved(layers[2], scale=1e-3)
    screened = screen_neurons(layers)
    assert [each is None for each in screened.layers] == [False, False, True, False, False]
    assert "the median length of its neurons is" in screened.reasons[2]


def test_radii_of_nothing_count_as_a_third_of_what_others_have():
    layers = honest()
    layers[0] = NeuronBalls(
        layers[0].centers, np.zeros(NEURONS), "worst", importance=layers[0].importance
    )
    screened = screen_neurons(layers)
    floor = np.median([each.radii.min() for each in layers]) / 3
    assert screened.layers[0].radii == pytest.approx(floor, rel=1e-6)
    assert "8 of its radii count as" in screened.reasons[0]
    assert screened.reasons[1:] == ("",) * 4


def test_radii_without_end_are_cut_to_where_they_hold_every_plausible_neuron():
    layers = honest()
    layers[0] = NeuronBalls(
        layers[0].centers, np.full(NEURONS, 1e6), "worst", importance=layers[0].importance
    )
    screened = screen_neurons(layers)
    assert 2 * 1.2 < screened.layers[0].radii.max() < 10
    merged = merge_neurons(screened.layers, "verified", seed=0)
    merged.verify(screened.layers)


def test_boasted_importance_does_not_take_all_the_places():
    """Sixteen places for five nodes with eight neurons each; node 0 says its are worth 1e5.

    Unscreened it takes eight of them. Its sum counts as twice the median, and of what stands for it
    alone no more than ⌈2 · 16 / 5⌉ = 7 may stay.
    """
    layers = [layer(0, importance=1e5), *honest()[1:]]

    def places(layers, **options):
        merged = merge_neurons(layers, "concat", max_neurons=16, seed=0, **options)
        assert len(merged) <= 16
        return sum(members[0][0] == 0 for members in merged.origins)

    assert places(layers) == 8
    screened = screen_neurons(layers)
    assert "importance of" in screened.reasons[0]
    usual = np.median([each.importance.sum() for each in layers])
    assert screened.layers[0].importance.sum() == pytest.approx(2 * usual, rel=1e-5)
    assert places(screened.layers, max_alone=7) <= 7
    assert places(layers, max_alone=3) == 3


def test_only_neurons_that_stand_for_one_node_alone_are_limited():
    """The balls of nodes 0 and 1 meet pairwise in ten places, node 2 stands alone in five."""
    points = np.arange(10.0)[:, None] * [[10, 0]]
    layers = [
        NeuronBalls(points, np.ones(10), "worst"),
        NeuronBalls(points + 0.5, np.ones(10), "worst"),
        NeuronBalls(points[:5] + np.array([[0, 50]]), np.ones(5), "worst"),
    ]
    merged = merge_neurons(layers, "verified", seed=0)
    assert len(merged) == 15
    limited = limit_each(merged, 2)
    assert len(limited) == 12
    assert limited.dropped == ((2, 2), (2, 3), (2, 4))
    limited.verify(layers)
    assert limit_each(merged, 5) is merged


def test_two_nodes_are_not_held_against_each_other():
    layers = [layer(0), moved(layer(1), scale=1e5)]
    assert screen_neurons(layers).layers == tuple(layers)
