"""A model that is one linear layer, without a module around it, is a model like any other."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from helpers_blobs import CLASSES, FEATURES, blobs
from helpers_gems import linear_app, run
from torch import nn

from conftest import record_equal
from gems_flwr import Gems, ModelError, other_output_layer
from gems_flwr.model_merging.measure import measure_statistics
from gems_flwr.networks.layers import weight_layers
from gems_flwr.spaces.output_layer import find_output_layer
from gems_flwr.wire.records import to_numpy


def bare():
    return nn.Linear(FEATURES, CLASSES)


@pytest.mark.parametrize("layer", [None, ""])
@pytest.mark.parametrize("space", ["cone", "ball"])
def test_a_bare_layer_as_model_gives_the_space_that_it_gives_without_one(space, layer):
    strategy = Gems(space=space, verify=True)
    without = run(strategy)
    result = run(strategy, linear_app(model=bare, layer=layer))
    assert record_equal(result.arrays, without.arrays)
    assert result.details["node_scores"] == without.details["node_scores"]


@pytest.mark.parametrize("method", ["regmean", "fisher", "kfac"])
def test_a_bare_layer_can_be_measured(method):
    arrays, data = to_numpy(ArrayRecord(bare().state_dict())), blobs(range(CLASSES))
    without = measure_statistics(method, "exact", arrays, data)["weight"]
    measured = measure_statistics(method, "exact", arrays, data, model=bare())["weight"]
    assert measured.keys() == without.keys()
    for kind, values in without.items():
        np.testing.assert_allclose(measured[kind], values, rtol=1e-5)


def test_its_name_is_the_modules_own():
    """In torch the root module is called ''."""
    arrays = to_numpy(ArrayRecord(bare().state_dict()))
    assert weight_layers(arrays)[0].name == ""
    assert isinstance(bare().get_submodule(""), nn.Linear)
    found = find_output_layer(arrays, "")
    assert (found.weight, found.bias) == ("weight", "bias")
    with pytest.raises(ModelError, match="expected a matrix 'weight'"):
        find_output_layer({"head.weight": arrays["weight"]}, "")


def test_it_has_no_other_layers_to_train():
    with pytest.raises(ModelError, match="is its output layer"), other_output_layer(bare(), 8, 0):
        torch.zeros(1)
