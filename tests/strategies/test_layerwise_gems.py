"""GEMS layer by layer: the strategy and the client, together over the wire."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import CLASSES, blobs, both_parts
from helpers_layerwise import accuracy, initial, labels_of, network, ready_app, train
from torch import nn

from conftest import record_equal
from gems_flwr import (
    Ball,
    Gems,
    InProcessGrid,
    LayerwiseGems,
    MeteredGrid,
    Neurons,
    NodeLimits,
    Tune,
    freeze_layers,
    good_enough_mod,
    resize_model,
)
from gems_flwr.core.records import to_numpy, to_record
from gems_flwr.errors import RoundFailedError
from gems_flwr.networks import neuron_rows, weight_layers

# More clusters than there are neurons: all stay side by side.
APART = 1000
FEW = Neurons(directions=50)


class Tampered:
    """An app whose node 1 has its replies changed, in given rounds."""

    def __init__(self, app, change, rounds=(1, 2, 3)):
        self.app, self.change, self.rounds = app, change, rounds

    def __call__(self, message, context):
        reply = self.app(message, context)
        asked = message.content["config"]["server-round"] if "config" in message.content else 0
        mine = context.node_config["partition-id"] == 1
        if mine and reply.has_content() and asked in self.rounds:
            self.change(reply.content)
        return reply


def loss(arrays, data):
    model = resize_model(network(), to_numpy(arrays))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(data[0]), data[1]))


def run(app=None, nodes=2, hidden=(8, 5), grid=None, **options):
    grid = grid or InProcessGrid(app or ready_app(hidden), nodes)
    return LayerwiseGems(**{"neurons": FEW, **options}).start(grid, initial(hidden))


# --- what comes out -------------------------------------------------------------------------


@pytest.mark.parametrize("clusters", [None, 8, APART])
def test_a_deep_network_knows_all_classes_after_as_many_rounds_as_layers(clusters):
    """Each node has seen two of four classes; no local model can be right more than half."""
    grid = MeteredGrid(InProcessGrid(ready_app(), 2))
    result = run(grid=grid, clusters=clusters, head=Gems(verify=True))
    assert accuracy(result.arrays) > 0.9
    assert [record.round for record in result.history] == [0, 1, 2, 3]
    widths = [layer.width for layer in weight_layers(to_numpy(result.arrays))]
    assert result.details["hidden"] == widths[:-1]
    assert set(result.details["node_scores"]) == {"0", "1"}
    assert all(record.traffic.bytes_up > 0 for record in result.history[1:])


def test_every_neuron_is_accounted_for_and_has_one_of_the_result_in_its_ball():
    result = run(clusters=6, neurons=Neurons(epsilon=0.05, directions=50))
    for layer, width, sent in zip(
        result.details["layers"], result.details["hidden"], (8, 5), strict=True
    ):
        members = [name for origin in layer["origins"] for name in origin]
        assert sorted(members) == sorted(f"{k}:{i}" for k in "01" for i in range(sent))
        assert layer["merged"] == len(layer["origins"]) == width
        assert layer["received"] == 2 * sent
        assert layer["dropped"] == []


def test_without_merging_the_first_layer_is_the_nodes_layers_side_by_side():
    result = run(clusters=APART)
    assert result.details["hidden"] == [16, 10]
    arrays = to_numpy(result.arrays)
    rows = neuron_rows(arrays, weight_layers(arrays)[0])
    ours = []
    for node in (0, 1):
        model = network()
        train(model, *blobs(labels_of(node), seed=10 * node))
        trained = to_numpy(ArrayRecord(model.state_dict()))
        ours.append(neuron_rows(trained, weight_layers(trained)[0]))
    # In whatever order; each row is there, to the last digit.
    assert {row.tobytes() for row in rows} == {row.tobytes() for row in np.concatenate(ours)}


def test_the_papers_head_works_on_the_merged_layers_and_public_data_help_it():
    x, y = blobs(range(CLASSES), 25, seed=5)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    tune = Tune(x[order].numpy(), y[order].numpy(), model=network)
    ball = Ball(epsilon=0.3, directions=20)
    plain = run(clusters=APART, head=ball)
    tuned = run(clusters=APART, head=Gems(space=ball, tune=tune))
    assert plain.details["space"] == "ball"
    assert tuned.details["tuned_on"] == 100
    assert loss(tuned.arrays, (x, y)) < loss(plain.arrays, (x, y))
    np.testing.assert_array_equal(
        plain.arrays["0.weight"].numpy(), tuned.arrays["0.weight"].numpy()
    )


def test_a_network_without_hidden_layers_takes_one_round():
    result = run(hidden=())
    assert [record.round for record in result.history] == [0, 1]
    assert result.details["hidden"] == []
    assert accuracy(result.arrays, ()) > 0.9


def test_the_same_seed_repeats_a_run_to_the_last_digit():
    one, two, other = (run(clusters=5, seed=seed) for seed in (1, 1, 2))
    assert record_equal(one.arrays, two.arrays)
    assert not record_equal(one.arrays, other.arrays)


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    unbroken = run(clusters=6)

    class Dies(LayerwiseGems):
        def play_round(self, round, state):
            if round.number == 3:
                raise KeyboardInterrupt
            return super().play_round(round, state)

    options = {"neurons": FEW, "clusters": 6, "checkpoint_dir": tmp_path}
    Dies.__name__ = "LayerwiseGems"
    with pytest.raises(KeyboardInterrupt):
        Dies(**options).start(InProcessGrid(ready_app(), 2), initial())
    grid = InProcessGrid(ready_app(), 2)
    resumed = LayerwiseGems(**options).start(grid, initial(), resume=True)
    assert record_equal(resumed.arrays, unbroken.arrays)
    assert resumed.details["hidden"] == unbroken.details["hidden"]
    assert len(resumed.details["layers"]) == 2


# --- the user's own handler -----------------------------------------------------------------


def user_app(resize=True, freeze=True, model=network):
    """An ordinary Flower client, with the mod and the two calls that it needs."""
    mod = good_enough_mod(
        both_parts(lambda c: blobs(labels_of(c.node_config["partition-id"]), seed=1)),
        model=model,
        limits=NodeLimits(adaptive_answers=None),
    )
    app = ClientApp(mods=[mod])

    @app.train()
    def handle(message, context):
        net, arrays = network(), message.content["arrays"]
        if resize:
            resize_model(net, arrays)
        else:
            net.load_state_dict(arrays.to_torch_state_dict())
        if freeze:
            freeze_layers(net, message)
        train(net, *blobs(labels_of(context.node_config["partition-id"])))
        metrics = MetricRecord({"num-examples": 120, "loss": 0.5})
        reply = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(reply, reply_to=message)

    return app


def test_a_users_own_handler_takes_part_with_two_calls():
    result = run(user_app(), clusters=APART)
    assert not result.failures
    assert accuracy(result.arrays) > 0.9
    # What handlers report of training comes back; a cone's round has none.
    assert [dict(result.train_metrics_clientapp.get(n, {})) for n in (1, 3)] == [{"loss": 0.5}, {}]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"freeze": False}, r"^write freeze_layers\(model, msg\) .*\['0.weight', '0.bias'\]"),
        ({"resize": False}, "size mismatch"),
        ({"model": None}, "^write good_enough_mod\\(data, model=Net\\): "),
    ],
)
def test_a_handler_that_forgets_them_gets_an_error_that_says_what_to_write(options, reason):
    with pytest.raises(RoundFailedError, match=reason):
        run(user_app(**options), clusters=APART)


# --- nodes that fail or lie -----------------------------------------------------------------


@pytest.mark.parametrize("missed", [1, 2, 3])
def test_a_node_may_miss_any_round_and_come_back(missed):
    """Four nodes: the labels of the one that fails are on another, too."""
    app = Tampered(ready_app(), lambda content: content.clear(), rounds=(missed,))
    result = run(app, nodes=4, clusters=APART)
    assert [(number, f.node) for number, f in result.failures] == [(missed, "1")]
    answered = [record.nodes_answered for record in result.history[1:]]
    assert answered[missed - 1] == ("0", "2", "3")
    assert all(len(names) == 4 for k, names in enumerate(answered) if k != missed - 1)
    assert accuracy(result.arrays) > 0.9


def in_space(content):
    """Inputs a thousand times as large."""
    if "space" in content:
        arrays = to_numpy(content["space"])
        arrays["means.scales"] = arrays["means.scales"] * np.float32(1e3)
        content["space"] = to_record(arrays)


def lied_to(change=None, **options):
    app = ready_app((8,))
    app = Tampered(app, change) if change else app
    return run(app, nodes=5, hidden=(8,), **options)


def test_the_output_layer_is_as_robust_as_its_gems():
    result = lied_to(in_space, clusters=APART, head=Gems(robust=True))
    assert result.details["left_out"]["1"].startswith("its inputs have scale")
    # Of the other four nodes three have the labels 0 and 1, and node 3 alone has 2 and 3.
    assert result.details["unchecked_classes"] == [2, 3]
    with pytest.raises(RoundFailedError, match="4 nodes sent plausible spaces, min_nodes is 5"):
        lied_to(in_space, clusters=APART, head=Gems(robust=True), min_nodes=5)


# --- options --------------------------------------------------------------------------------


def test_one_value_for_each_hidden_layer_is_needed():
    with pytest.raises(ValueError, match=r"neurons\.epsilon has 3 values for 2 hidden layers"):
        run(neurons=Neurons(epsilon=[0.1, 0.1, 0.1]))
