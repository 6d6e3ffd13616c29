"""Radius curves on the wire, and which arrays are the output layer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.bounds import MAX_CURVE_POINTS
from gems_flwr.errors import SpaceError
from gems_flwr.radii.quality import required_correct
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.curved_space import CurvedSpace, thin_curve
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.output_layer import find_output_layer, flatten_linear
from gems_flwr.spaces.radius import Radius


@given(st.integers(1, 5000), st.floats(0.001, 1.0), st.integers(0, 2**32 - 1))
def test_a_thinned_curve_never_promises_more_than_the_whole_one(count, epsilon, seed):
    rng = np.random.default_rng(seed)
    radii = np.sort(rng.exponential(size=count + 1))[::-1].copy()
    thin = thin_curve(radii)
    assert len(thin) <= MAX_CURVE_POINTS
    space = CurvedSpace(BallSpace(np.zeros(3), Radius(1.0, "sampled")), thin)
    assert space.radius(epsilon) <= radii[required_correct(epsilon, count)]


def test_a_short_curve_is_sent_as_it_is_and_infinity_becomes_large():
    thin = thin_curve(np.array([np.inf, 3.0, 2.0, 0.0]))
    assert thin.tolist() == [1e6, 3.0, 2.0, 0.0]


def test_a_space_for_another_epsilon_keeps_centre_shape_and_method():
    curve = np.array([5.0, 4.0, 2.0, 1.0, 0.0], np.float32)
    radius = Radius(2.0, "worst", 0.5, 7)
    ball = CurvedSpace(BallSpace(np.ones(2), radius), curve).at(0.75)
    assert ball.radius == Radius(1.0, "worst", 0.75, 7)
    ellipsoid = CurvedSpace(EllipsoidSpace(np.ones(2), np.array([2.0, 0.5]), radius), curve).at(
        0.25
    )
    assert ellipsoid.radii.tolist() == [4.0, 1.0]
    assert CurvedSpace(ball, curve).largest_epsilon == 0.75


@pytest.mark.parametrize(
    "curve",
    [[1.0], [1.0, 2.0], [1.0, -1.0], [np.nan, 0.0], np.linspace(1, 0, MAX_CURVE_POINTS + 1)],
    ids=["short", "rising", "negative", "NaN", "long"],
)
def test_a_curve_that_is_none_is_refused(curve):
    with pytest.raises(SpaceError, match="curve"):
        CurvedSpace(BallSpace(np.zeros(2), Radius(1.0, "sampled")), np.array(curve))


def network():
    return {
        "body.weight": np.zeros((5, 8)),
        "body.bias": np.zeros(5),
        "norm.weight": np.zeros(5),
        "head.weight": np.zeros((3, 5), np.float32),
        "head.bias": np.zeros(3, np.float32),
    }


def test_the_output_layer_is_the_last_matrix_or_the_named_one():
    layer = find_output_layer(network())
    assert (layer.weight, layer.bias, layer.outputs, layer.features) == (
        "head.weight",
        "head.bias",
        3,
        5,
    )
    assert layer.dimension == 18
    assert find_output_layer(network(), "body").weight == "body.weight"
    with pytest.raises(ValueError, match=r"'tail.weight'"):
        find_output_layer(network(), "tail")
    with pytest.raises(ValueError, match="no linear output layer"):
        find_output_layer({"a": np.zeros(3)})


def test_arrays_without_names_are_paired_by_order_and_shape():
    layer = find_output_layer({"0": np.zeros((3, 5)), "1": np.zeros(3)})
    assert layer.bias == "1"
    assert find_output_layer({"0": np.zeros((3, 5)), "1": np.zeros(4)}).bias is None


def test_a_new_output_layer_leaves_the_rest_alone():
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(3, 5)), rng.normal(size=3)
    before = network()
    after = find_output_layer(before).replace_in(before, flatten_linear(weight, bias))
    assert after["head.weight"] == pytest.approx(weight, abs=1e-6)
    assert after["head.bias"].dtype == np.float32
    assert after["body.weight"] is before["body.weight"]
    assert (before["head.weight"] == 0).all()


def test_two_classes_become_one_output_where_the_model_has_one():
    model = {"coef": np.zeros((1, 2)), "intercept": np.zeros(1)}
    layer = find_output_layer(model)
    point = flatten_linear([[1.0, 2.0], [4.0, 8.0]], [0.5, 2.0])
    after = layer.replace_in(model, point)
    assert after["coef"].tolist() == [[3.0, 6.0]]
    assert after["intercept"].tolist() == [1.5]
    bare = find_output_layer({"coef": np.zeros((1, 2))})
    with pytest.raises(SpaceError, match="bias"):
        bare.replace_in({"coef": np.zeros((1, 2))}, point)
