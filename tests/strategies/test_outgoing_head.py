"""Output layers made of the merged neurons' outgoing weights (Guha 2018), over the wire."""

import dataclasses

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from helpers_blobs import CLASSES, TEST, blobs
from helpers_layerwise import Blobs, accuracy, initial, labels_of, network, ready_app, train

from gems_flwr.client.task_app import task_client_app
from gems_flwr.errors import OptionError, RoundFailedError
from gems_flwr.networks.layers import weight_layers
from gems_flwr.networks.surgery import resize_model
from gems_flwr.neuron_merging.outgoing_head import Outgoing
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.wire.records import to_numpy
from gems_flwr.wire.requests import Neurons


def run(app=None, nodes=2, hidden=(8,), **options):
    usual = {"merge": "concat", "max_hidden": None, "check_widths": False, "head": "outgoing"}
    options = usual | {"neurons": Neurons(directions=20)} | options
    grid = InProcessGrid(app or ready_app(hidden), nodes)
    return LayerwiseGems(**options).start(grid, initial(hidden))


def logits(arrays, hidden=(8,)):
    model = resize_model(network(hidden), to_numpy(arrays))
    with torch.no_grad():
        return model(TEST[0]).numpy()


def trained_network(node):
    model = network((8,))
    train(model, *blobs(labels_of(node), seed=10 * node))
    return model.requires_grad_(False)


def trained(node):
    """Return the logits of a node's own network."""
    return trained_network(node)(TEST[0]).numpy()


def output_bias(node):
    return trained_network(node)[-1].bias.numpy()


@pytest.mark.parametrize("nodes", [2, 3])
def test_side_by_side_the_logits_are_the_sum_of_the_nodes_logits(nodes):
    """Concat merges nothing; with the sum of biases that is an identity, node by node."""
    result = run(nodes=nodes, head=Outgoing(bias="sum"))
    assert [record.round for record in result.history] == [0, 1]
    assert result.details["hidden"] == [8 * nodes]
    wanted = sum(trained(node) for node in range(nodes))
    np.testing.assert_allclose(logits(result.arrays), wanted, rtol=1e-4, atol=1e-4)


def test_the_mean_of_the_biases_differs_from_that_by_a_constant():
    """Two nodes: the sum of logits less half of the sum of their output biases."""
    mean, whole = run(), run(head=Outgoing(bias="sum"))
    biases = sum(output_bias(node) for node in (0, 1))
    np.testing.assert_allclose(
        logits(whole.arrays) - logits(mean.arrays),
        np.broadcast_to(biases / 2, (len(TEST[0]), CLASSES)),
        atol=1e-4,
    )


@pytest.mark.parametrize("merge", ["kmeans", "verified", "pairs", "concat"])
def test_identical_nodes_give_back_that_network(merge):
    class Same(Blobs):
        def __init__(self, node, hidden):
            super().__init__(0, hidden)

    app = task_client_app(lambda c: Same(c.node_config["partition-id"], (8,)))
    # So small that a neuron's ball meets that of its twin and no other.
    result = run(app, nodes=3, merge=merge, clusters=8, neurons=Neurons(epsilon=1e-5))
    assert result.details["hidden"] == [8]
    np.testing.assert_allclose(logits(result.arrays), trained(0), rtol=1e-4, atol=1e-4)


def test_a_deep_network_takes_a_round_less_than_it_has_layers():
    result = run(hidden=(8, 5), verify=True)
    assert [record.round for record in result.history] == [0, 1, 2]
    assert result.details["hidden"] == [16, 10]
    assert set(result.details["node_scores"]) == {"0", "1"}
    assert accuracy(result.arrays) > 0.5


@pytest.mark.parametrize("measure", ["loss", "relative_loss"])
@pytest.mark.parametrize("hidden", [(8,), (8, 5)])
def test_balls_by_the_networks_loss_work_in_every_layer(measure, hidden):
    neurons = Neurons(measure=measure, epsilon=2.0, directions=10)
    result = run(hidden=hidden, merge="verified", neurons=neurons)
    assert all(b > 0 for layer in result.details["layers"] for b in layer["median_radius"].values())
    assert result.details["layers"][0]["uncovered"] == []


def test_tuning_changes_the_output_layer_alone_and_helps():
    public = blobs(range(CLASSES), 25, seed=5)
    order = torch.randperm(len(public[1]), generator=torch.Generator().manual_seed(0))
    options = {
        "public_data": (public[0][order].numpy(), public[1][order].numpy()),
        "build_model": lambda: network((8,)),
        "tune_rate": 0.01,
    }
    plain, tuned = run(**options), run(tune=100, **options)
    assert tuned.details["tuned_on"] == 100

    def loss(arrays):
        found = resize_model(network((8,)), to_numpy(arrays))
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(found(public[0]), public[1]))

    assert loss(tuned.arrays) < loss(plain.arrays)
    below = weight_layers(to_numpy(plain.arrays))[0].keys
    for key in below:
        np.testing.assert_array_equal(plain.arrays[key].numpy(), tuned.arrays[key].numpy())


def test_at_the_apps_own_widths_it_has_those():
    result = run(merge="kmeans", max_hidden="same")
    assert result.details["hidden"] == [8]
    assert accuracy(result.arrays, (8,)) > 0.3


def test_a_model_without_hidden_layers_is_refused():
    with pytest.raises(OptionError, match="use Gems"):
        run(hidden=())


@pytest.mark.parametrize("bad", ["median", "", None])
def test_an_unknown_way_with_biases_is_refused(bad):
    with pytest.raises(OptionError, match="bias must be one of"):
        Outgoing(bias=bad)


def spoiled_by(change):
    app = ready_app((8,))

    def spoiled(message, context):
        reply = app(message, context)
        if context.node_config["partition-id"] == 1 and reply.has_content():
            record = reply.content["neurons"]
            reply.content["neurons"] = ArrayRecord(change(dict(record)))
        return reply

    return spoiled


def without(arrays):
    return {key: array for key, array in arrays.items() if key != "bias-above"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without, "bias-above"),
        (lambda a: a | {"bias-above": Array(np.zeros(CLASSES + 1, np.float32))}, "bias-above"),
        (lambda a: a | {"bias-above": Array(np.full(CLASSES, np.nan, np.float32))}, "bias"),
        (lambda a: a | {"bias-above": Array(np.full(CLASSES, 9e5, np.float32))}, "bias-above"),
        (lambda a: a | {"more": Array(np.zeros(2, np.float32))}, "bias-above"),
    ],
)
def test_a_node_with_a_bad_bias_is_named_and_left_out(change, said):
    result = run(spoiled_by(change), min_nodes=1)
    (failure,) = result.history[-1].failures
    assert failure.node == "1"
    assert said in failure.reason
    np.testing.assert_allclose(logits(result.arrays), trained(0), rtol=1e-4, atol=1e-4)
    with pytest.raises(RoundFailedError):
        run(spoiled_by(change), min_nodes=2)


def test_among_liars_the_bias_is_the_median():
    large = np.array([15.0, 0, 0, 0], np.float32)
    app = spoiled_by(lambda a: a | {"bias-above": Array(large)})
    result = run(app, nodes=3, robust=True)
    biases = [output_bias(node) for node in (0, 2)]
    wanted = np.median(np.stack([*biases, large]), axis=0)
    np.testing.assert_allclose(result.arrays["2.bias"].numpy(), wanted, atol=1e-5)


def test_no_bias_is_asked_for_where_nothing_is_made_of_it():
    strategy = LayerwiseGems(head="outgoing")
    strategy.prepare(to_numpy(initial((8, 5))), 3)
    assert [strategy.request(layer).bias_above for layer in (0, 1)] == [False, True]
    other = LayerwiseGems(neurons=dataclasses.replace(Neurons(), outgoing=True))
    other.prepare(to_numpy(initial((8, 5))), 3)
    assert not other.request(1).bias_above
