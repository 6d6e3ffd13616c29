"""GEMS layer by layer among hostile nodes: what `robust` gives back, and what it says."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from helpers_layerwise import accuracy, initial, ready_app

from gems_flwr.errors import RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.requests import Neurons

HIDDEN = (8,)


class Lying:
    """An app some of whose nodes change what they send."""

    def __init__(self, lies):
        self.app, self.lies = ready_app(HIDDEN), lies

    def __call__(self, message, context):
        reply = self.app(message, context)
        lie = self.lies.get(context.node_config["partition-id"])
        if lie and reply.has_content():
            lie(reply.content)
        return reply


def in_neurons(change):
    def lie(content):
        if "neurons" in content:
            array = content["neurons"]["neurons"].numpy().copy()
            change(array)
            content["neurons"] = ArrayRecord({"neurons": Array(array)})

    return lie


def in_space(change):
    def lie(content):
        if "space" in content:
            arrays = to_numpy(content["space"])
            content["space"] = to_record(arrays | change(arrays))

    return lie


def huge(array):
    """Not so large that they are refused on arrival."""
    array[:, :-2] *= np.float32(20)


def boastful(array):
    array[:, -1] = 1e6


def start(lies=None, nodes=5, **options):
    usual = {"merge": "concat", "max_hidden": None, "check_widths": False}
    options = usual | {"neurons": Neurons(directions=50)} | options
    grid = InProcessGrid(Lying(lies or {}), nodes)
    return LayerwiseGems(**options).start(grid, initial(HIDDEN))


def test_one_nodes_huge_neurons_own_the_network_unless_it_is_robust():
    """Node 1 and node 3 have the same two labels, so without node 1 nothing is lost."""
    lies = {1: in_neurons(huge)}
    owned = to_numpy(start(lies).arrays)
    honest = to_numpy(start().arrays)
    assert np.abs(owned["0.weight"]).max() > 10 * np.abs(honest["0.weight"]).max()
    result = start(lies, robust=True)
    assert accuracy(result.arrays, HIDDEN) > 0.9
    assert set(result.details["left_out"]) == {"1"}
    assert result.details["left_out"]["1"].startswith("layer 0: it has a neuron of length")
    assert "useless neurons of plausible length" in result.details["unchecked"]
    assert result.details["hidden"] == [32]
    json.dumps(result.details)


def test_a_boasted_importance_does_not_fill_a_layer_of_limited_size():
    """Ten places for five nodes: at most ⌈2 · 10 / 5⌉ = 4 may be one node's alone."""

    def places(**options):
        result = start({1: in_neurons(boastful)}, max_hidden=10, **options)
        [layer] = result.details["layers"]
        return result, sum(origin[0].startswith("1:") for origin in layer["origins"])

    _, unscreened = places()
    result, screened = places(robust=True)
    assert unscreened == 8
    assert screened <= 4
    assert "importance of 8e+06 counts as" in result.details["adjusted"]["1"]


def test_the_output_layer_is_robust_as_well_unless_told_otherwise():
    """Node 1 has inputs a thousand times as large, in the last round only."""
    lies = {1: in_space(lambda a: {"means.scales": a["means.scales"] * np.float32(1e3)})}
    result = start(lies, robust=True)
    assert "its inputs have scale" in result.details["left_out"]["1"]
    # Of the other four nodes three have the labels 0 and 1, and node 3 alone has 2 and 3.
    assert result.details["unchecked_classes"] == [2, 3]
    trusting = start(lies, robust=True, head=Gems(robust=False))
    assert trusting.details["left_out"] == {}
    assert "unchecked_classes" not in trusting.details


def test_a_node_that_lies_in_both_layers_has_both_reasons():
    def lie(content):
        in_neurons(huge)(content)
        in_space(lambda a: {"means.scales": a["means.scales"] * np.float32(1e3)})(content)

    reason = start({1: lie}, robust=True).details["left_out"]["1"]
    assert reason.startswith("layer 0: it has a neuron")
    assert "; its inputs have scale" in reason


def test_honest_nodes_give_the_same_network_with_and_without_screening():
    plain, screened = start(), start(robust=True)
    for name, array in to_numpy(plain.arrays).items():
        assert np.array_equal(array, screened.arrays[name].numpy())
    assert screened.details["left_out"] == screened.details["adjusted"] == {}


def test_too_few_plausible_layers_fail_the_round():
    with pytest.raises(RoundFailedError, match="4 nodes sent plausible neurons, min_nodes is 5"):
        start({1: in_neurons(huge)}, robust=True, min_nodes=5)
