"""GEMS layer by layer: the strategy and the client, together over the wire."""

import json
import re

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import CLASSES, blobs, both_parts
from helpers_layerwise import Blobs, accuracy, initial, labels_of, network, ready_app, train
from torch import nn

from conftest import record_equal
from gems_flwr.client.freezing import freeze_layers
from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.task_app import task_client_app
from gems_flwr.errors import RoundFailedError
from gems_flwr.networks.layers import neuron_rows, weight_layers
from gems_flwr.networks.surgery import resize_model
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.wire.records import to_numpy
from gems_flwr.wire.requests import Neurons
from gems_flwr.wire.space_requests import Ball, Ellipsoid


class Spoiled:
    """An app whose node 1 has its replies tampered with, in given rounds."""

    def __init__(self, app, spoil, rounds=(1, 2, 3)):
        self.app, self.spoil, self.rounds = app, spoil, rounds

    def __call__(self, message, context):
        reply = self.app(message, context)
        asked = message.content["config"]["server-round"] if "config" in message.content else 0
        mine = context.node_config["partition-id"] == 1
        if mine and reply.has_content() and asked in self.rounds:
            self.spoil(reply.content)
        return reply


def loss(arrays, data):
    model = resize_model(network(), to_numpy(arrays))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(data[0]), data[1]))


def run(app=None, nodes=2, hidden=(8, 5), grid=None, **options):
    # Whether other widths are tried beforehand is the matter of other tests.
    usual = {"merge": "concat", "max_hidden": None, "check_widths": False}
    options = usual | {"neurons": Neurons(directions=50)} | options
    grid = grid or InProcessGrid(app or ready_app(hidden), nodes)
    return LayerwiseGems(**options).start(grid, initial(hidden))


# --- what comes out -------------------------------------------------------------------------


@pytest.mark.parametrize("merge", ["kmeans", "verified", "concat"])
def test_a_deep_network_knows_all_classes_after_as_many_rounds_as_layers(merge):
    """Each node has seen two of four classes; no local model can be right more than half."""
    grid = MeteredGrid(InProcessGrid(ready_app(), 2))
    result = run(grid=grid, merge=merge, verify=True)
    assert accuracy(result.arrays) > 0.9
    assert [record.round for record in result.history] == [0, 1, 2, 3]
    widths = [layer.width for layer in weight_layers(to_numpy(result.arrays))]
    assert result.details["hidden"] == widths[:-1]
    assert set(result.details["node_scores"]) == {"0", "1"}
    assert result.details["is_average"] is False
    for record in result.history[1:]:
        assert record.traffic.bytes_up > 0


def test_every_neuron_is_accounted_for_and_has_one_of_the_result_in_its_ball():
    result = run(merge="kmeans", clusters=6, neurons=Neurons(epsilon=0.05, directions=50))
    for layer, width, sent in zip(
        result.details["layers"], result.details["hidden"], (8, 5), strict=True
    ):
        members = [name for origin in layer["origins"] for name in origin]
        assert sorted(members) == sorted(f"{k}:{i}" for k in "01" for i in range(sent))
        assert layer["merged"] == len(layer["origins"]) == width
        assert layer["received"] == 2 * sent
        assert layer["uncovered"] == layer["dropped"] == []


def test_without_merging_the_first_layer_is_the_nodes_layers_side_by_side():
    result = run(merge="concat")
    assert result.details["hidden"] == [16, 10]
    arrays = to_numpy(result.arrays)
    rows = neuron_rows(arrays, weight_layers(arrays)[0])
    ours = []
    for node in (0, 1):
        model = network()
        train(model, *blobs(labels_of(node), seed=10 * node))
        trained = to_numpy(ArrayRecord(model.state_dict()))
        ours.append(neuron_rows(trained, weight_layers(trained)[0]))
    wanted = np.concatenate(ours)
    # In whatever order; each row is there, to the last digit.
    assert {row.tobytes() for row in rows} == {row.tobytes() for row in wanted}


def test_identical_nodes_give_back_one_nodes_network():
    class Same(Blobs):
        def __init__(self, node, hidden):
            super().__init__(0, hidden)

    app = task_client_app(lambda c: Same(c.node_config["partition-id"], (8, 5)))
    one = run(app, nodes=1, merge="verified", min_nodes=1)
    three = run(app, nodes=3, merge="verified")
    assert three.details["hidden"] == [8, 5]
    lower = [key for key in one.arrays if key not in ("4.weight", "4.bias")]
    for key in lower:
        np.testing.assert_array_equal(one.arrays[key].numpy(), three.arrays[key].numpy())


@pytest.mark.parametrize("head", [Ball, Ellipsoid])
def test_the_papers_heads_work_on_the_merged_layers(head):
    result = run(head=head(epsilon=0.3, directions=50))
    assert result.details["space"] == head.kind
    assert {r["method"] for r in result.details["radii"].values()} == {"sampled"}
    assert accuracy(result.arrays) > 0.25


def test_the_size_budget_holds_in_every_layer_and_says_whom_it_cost():
    result = run(max_hidden=[7, 4])
    assert result.details["hidden"] == [7, 4]
    assert [len(layer["dropped"]) for layer in result.details["layers"]] == [9, 6]
    assert run(max_hidden=7, budget="cluster").details["hidden"] == [7, 7]


def test_outgoing_weights_travel_along_and_start_the_layer_above():
    grid = MeteredGrid(InProcessGrid(ready_app((8,)), 2))
    result = run(grid=grid, hidden=(8,), neurons=Neurons(directions=50, outgoing=True))
    assert result.details["hidden"] == [16]
    assert accuracy(result.arrays, (8,)) > 0.9
    plain = MeteredGrid(InProcessGrid(ready_app((8,)), 2))
    run(grid=plain, hidden=(8,))
    # Four classes: four more numbers for each of eight neurons on two nodes.
    more = grid.total.bytes_up - plain.total.bytes_up
    assert 4 * 4 * 8 * 2 <= more < 4 * 4 * 8 * 2 + 100


def test_a_network_without_hidden_layers_takes_one_round():
    result = run(hidden=())
    assert [record.round for record in result.history] == [0, 1]
    assert result.details["hidden"] == []
    assert accuracy(result.arrays, ()) > 0.9


@pytest.mark.parametrize("layers", ["last", "all"])
def test_tuning_on_public_data_helps_the_papers_head(layers):
    public = blobs(range(CLASSES), 25, seed=5)
    order = torch.randperm(len(public[1]), generator=torch.Generator().manual_seed(0))
    options = {
        "head": Ball(epsilon=0.3, directions=20),
        "tune_layers": layers,
        "public_data": (public[0][order].numpy(), public[1][order].numpy()),
        "build_model": network,
    }
    plain, tuned = run(**options), run(tune=100, **options)
    assert tuned.details["tuned_on"] == 100
    assert loss(tuned.arrays, public) < loss(plain.arrays, public)
    changed = plain.arrays["0.weight"].numpy() != tuned.arrays["0.weight"].numpy()
    assert changed.any() == (layers == "all")


def test_the_same_seed_repeats_a_run_to_the_last_digit():
    one, two, other = (run(merge="kmeans", clusters=5, seed=seed) for seed in (1, 1, 2))
    assert record_equal(one.arrays, two.arrays)
    assert not record_equal(one.arrays, other.arrays)


# --- the user's own handler -----------------------------------------------------------------


def user_app(resize=True, freeze=True, model=network):
    """An ordinary Flower client, with the mod and the two calls that it needs."""
    mod = good_enough_mod(
        both_parts(lambda c: blobs(labels_of(c.node_config["partition-id"]), seed=1)), model=model
    )
    app = ClientApp(mods=[mod])

    @app.train()
    def handle(message, context):
        net = network()
        arrays = message.content["arrays"]
        if resize:
            resize_model(net, {key: array.numpy() for key, array in arrays.items()})
        else:
            net.load_state_dict(arrays.to_torch_state_dict())
        if freeze:
            freeze_layers(net, message)
        train(net, *blobs(labels_of(context.node_config["partition-id"])))
        reply = RecordDict(
            {
                "arrays": ArrayRecord(net.state_dict()),
                "metrics": MetricRecord({"num-examples": 120}),
            }
        )
        return Message(reply, reply_to=message)

    return app


def test_a_users_own_handler_takes_part_with_two_calls():
    result = run(user_app())
    assert not result.failures
    assert accuracy(result.arrays) > 0.9


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"freeze": False}, r"^write freeze_layers\(model, msg\) .*\['0.weight'\]"),
        ({"resize": False}, "size mismatch"),
        ({"model": None}, "^write good_enough_mod\\(data, model=Net\\): "),
    ],
)
def test_a_handler_that_forgets_them_is_told_so(options, reason):
    with pytest.raises(RoundFailedError, match=reason):
        run(user_app(**options))


# --- nodes that fail or lie -----------------------------------------------------------------


@pytest.mark.parametrize("missed", [1, 2, 3])
def test_a_node_may_miss_any_round_and_come_back(missed):
    def spoil(content):
        content.clear()

    # Four nodes: the labels of the one that fails are on another, too.
    result = run(Spoiled(ready_app(), spoil, rounds=(missed,)), nodes=4)
    assert [(number, f.node) for number, f in result.failures] == [(missed, "1")]
    answered = [record.nodes_answered for record in result.history[1:]]
    assert answered[missed - 1] == ("0", "2", "3")
    assert all(len(names) == 4 for k, names in enumerate(answered) if k != missed - 1)
    assert accuracy(result.arrays) > 0.9


def with_array(change):
    def spoil(content):
        array = content["neurons"]["neurons"].numpy().copy()
        content["neurons"] = ArrayRecord({"neurons": Array(change(array))})

    return spoil


def with_meta(**values):
    def spoil(content):
        meta = json.loads(content["space-meta"]["json"])
        content["space-meta"] = ConfigRecord({"json": json.dumps({**meta, **values})})

    return spoil


def with_value(column, value):
    def change(array):
        array[3, column] = value
        return array

    return with_array(change)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (with_value(0, np.nan), "NaN"),
        (with_value(0, 1e9), "absolute values"),
        (with_value(-2, -1.0), "radii.*at least 0"),
        (with_value(-1, -1.0), "importance.*at least 0"),
        (with_array(lambda a: a[:5]), "shape"),
        (with_array(lambda a: a[:, 1:]), "shape"),
        (with_array(lambda a: a.astype(np.float64)), "float64"),
        (with_meta(layer=1), "layer: expected 0, got 1"),
        (with_meta(**{"server-round": 7}), "server-round: expected 1, got 7"),
        (with_meta(method="guessed"), "method"),
        (with_meta(method="worst"), "method: expected sampled, got worst"),
        (with_meta(outgoing=2), "outgoing: expected 0, got 2"),
        (lambda content: content.pop("neurons"), "expected an ArrayRecord 'neurons'"),
        (lambda content: content.pop("space-meta"), "expected a ConfigRecord 'space-meta'"),
    ],
)
def test_a_bad_reply_is_rejected_by_node_and_reason_and_the_round_goes_on(spoil, reason):
    result = run(Spoiled(ready_app((8,)), spoil, rounds=(1,)), nodes=3, hidden=(8,))
    [(number, failure)] = result.failures
    assert (number, failure.node) == (1, "1")
    assert re.search(reason, failure.reason)
    assert result.details["hidden"] == [16]


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    unbroken = run(merge="kmeans", clusters=6)

    class Dies(LayerwiseGems):
        def play_round(self, server_round, *rest):
            if server_round == 3:
                raise KeyboardInterrupt
            return super().play_round(server_round, *rest)

    options = {"neurons": Neurons(directions=50), "merge": "kmeans", "clusters": 6}
    options |= {"max_hidden": None, "checkpoint_dir": tmp_path}
    Dies.__name__ = "LayerwiseGems"
    with pytest.raises(KeyboardInterrupt):
        Dies(**options).start(InProcessGrid(ready_app(), 2), initial())
    resumed = LayerwiseGems(**options, resume=True).start(InProcessGrid(ready_app(), 2), initial())
    assert record_equal(resumed.arrays, unbroken.arrays)
    assert resumed.details["hidden"] == unbroken.details["hidden"]
    assert len(resumed.details["layers"]) == 2


RETRAINS = Gems(space="ball", on_empty="retrain", initialise=lambda server_round: {})

# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"merge": "magic"}, "merge must be one of"),
        ({"head": "cube"}, "space must be one of"),
        ({"clusters": 0}, "clusters must be at least 1"),
        ({"neurons": 0.02}, r"neurons must be Neurons\(…\), got 0.02"),
        ({"max_hidden": 0}, "max_hidden must be at least 1"),
        ({"max_hidden": "less"}, "max_hidden must be at least 1, or 'same', or none"),
        ({"tune": 10}, "needs as many public samples, there are 0"),
        ({"tune_layers": "some"}, "tune_layers must be"),
        ({"head": 3}, "space must be a Cone, Means, Ball or Ellipsoid, or its name, got 3"),
        ({"head": RETRAINS}, "head.on_empty must not be retrain"),
        ({"output": {"rank": 20}}, r"write head=Cone\(…\), or head=Gems\(space=Cone"),
        ({"epsilon_hidden": 0.1}, r"write neurons=Neurons\(epsilon=…\)"),
        ({"radius": "worst"}, r"write neurons=Neurons\(radius=…\)"),
    ],
)
def test_options_out_of_range_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        LayerwiseGems(**options)


def test_one_value_for_each_hidden_layer_is_needed():
    with pytest.raises(ValueError, match=r"neurons\.epsilon has 3 values for 2 hidden layers"):
        run(neurons=Neurons(epsilon=[0.1, 0.1, 0.1]))
