"""Which arrays of a model are its output layer, and how another one takes its place."""

import numpy as np
import pytest

from gems_flwr.errors import SpaceError
from gems_flwr.spaces import find_output_layer, flatten_linear


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
    assert (layer.weight, layer.bias) == ("head.weight", "head.bias")
    assert (layer.outputs, layer.features, layer.dimension) == (3, 5, 18)
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
    point = flatten_linear([[1.0, 2.0], [4.0, 8.0]], [0.5, 2.0])
    after = find_output_layer(model).replace_in(model, point)
    assert after["coef"].tolist() == [[3.0, 6.0]]
    assert after["intercept"].tolist() == [1.5]
    bare = {"coef": np.zeros((1, 2))}
    with pytest.raises(SpaceError, match="bias"):
        find_output_layer(bare).replace_in(bare, point)
