"""What is below the output layer goes to a node at most once, and to no node that has it."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import CLASSES, FEATURES, TEST, blobs
from torch import nn

from conftest import record_equal
from gems_flwr import Ball, Gems, InProcessGrid, NodeLimits, good_enough_mod
from gems_flwr.errors import RoundFailedError

WIDTH = 20_000  # more than a megabyte below the output layer
BELOW = "layers-below"


def net(seed=0, width=WIDTH):
    """A wide random layer of a known seed below a small output layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU()
        return nn.Sequential(*layers, nn.Linear(8, CLASSES))


BELOW_BYTES = sum(p.numel() * 4 for p in net()[:4].parameters())


def node_data(context):
    node = context.node_config["partition-id"]
    labels = [2 * node % CLASSES, (2 * node + 1) % CLASSES]
    return blobs(labels, seed=10 * node), blobs(labels, seed=10 * node + 1)


class App:
    """An app whose nodes build their models from seeds of their own; notes what handlers got."""

    def __init__(self, seeds, model=net, forget=False, change=lambda content: None):
        self.seeds, self.seen, self.forget = seeds, [], forget
        self.model, self.change = model, change

    def __call__(self, message, context):
        node = int(context.node_config["partition-id"])
        if self.forget:
            context.state.clear()
        self.change(message.content)
        model, limits = lambda: self.model(self.seeds[node]), NodeLimits(adaptive_answers=None)
        mod = good_enough_mod(node_data, model=model, limits=limits)
        app = ClientApp(mods=[mod])

        @app.train()
        def train(message, context):
            arrays = message.content["arrays"]
            self.seen.append((node, list(arrays), list(message.content.array_records)))
            metrics = MetricRecord({"num-examples": 10})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

        return app(message, context)


def run(strategy, app, model=net):
    return strategy.start(InProcessGrid(app, 2), ArrayRecord(model(0).state_dict()))


def accuracy(arrays):
    model = net()
    model.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        return float((model(TEST[0]).argmax(1) == TEST[1]).float().mean())


def test_nodes_that_have_the_layers_are_sent_the_head_alone():
    result = run(Gems(verify=True), App([0, 0]))
    assert BELOW_BYTES > 1_000_000
    assert result.traffic.bytes_down < 10_000
    assert result.traffic.messages_up == 4  # two spaces, two scores
    # The result is a whole model, whose lower layers are as they were.
    assert np.array_equal(result.arrays["0.weight"].numpy(), net()[0].weight.detach().numpy())
    assert accuracy(result.arrays) > 0.9
    assert min(result.details["node_scores"].values()) > 0.9


def test_nodes_without_the_layers_get_them_once_and_only_they():
    result = run(Gems(verify=True), App([0, 1]))
    assert BELOW_BYTES < result.traffic.bytes_down < 1.1 * BELOW_BYTES
    assert result.traffic.messages_up == 5  # one replied first that it needs the layers
    assert result.history[1].nodes_answered == ("0", "1")
    assert result.failures == ()
    both = run(Gems(verify=True), App([3, 1]))
    assert 2 * BELOW_BYTES < both.traffic.bytes_down < 2.1 * BELOW_BYTES
    for other in (both, run(Gems(), App([0, 0]))):
        assert record_equal(result.arrays, other.arrays)


def test_small_layers_come_along_with_the_first_message():
    def small(seed):
        return net(seed, width=16)

    result = run(Gems(verify=True), App([3, 1], model=small), model=small)
    assert result.traffic.messages_up == 4
    # Once to each, with the head in two messages and the rest of what messages hold.
    whole = sum(len(array.data) for array in result.arrays.values())
    assert whole < result.traffic.bytes_down / 2 < whole + 2000


def test_a_node_that_lost_its_state_is_given_the_layers_again():
    result = run(Gems(verify=True), App([0, 1], forget=True))
    assert 2 * BELOW_BYTES < result.traffic.bytes_down < 2.1 * BELOW_BYTES
    assert set(result.details["node_scores"]) == {"0", "1"}


def test_handlers_get_whole_models():
    app = App([0, 1])
    run(Gems(space=Ball(epsilon=0.1, directions=3)), app)
    assert {node for node, _, _ in app.seen} == {0, 1}
    for _, keys, records in app.seen:
        assert keys == list(net().state_dict())
        assert records == ["arrays"]


def test_layers_that_are_not_those_of_the_digest_are_refused_before_anything_is_sent():
    def change(content):
        if BELOW in content:
            arrays = content[BELOW].to_torch_state_dict()
            content[BELOW] = ArrayRecord({k: v + 1 for k, v in arrays.items()})

    with pytest.raises(RoundFailedError, match="not those that the server means"):
        run(Gems(), App([1, 2], change=change))


def test_a_node_that_asks_for_the_layers_for_ever_is_left_out():
    result = run(Gems(min_nodes=1), App([0, 9], change=lambda content: content.pop(BELOW, None)))
    [(_, failure)] = result.failures
    assert failure.node == "1"
    assert "asks again" in failure.reason
    assert result.traffic.bytes_down < 1.1 * BELOW_BYTES


def test_server_and_node_must_mean_the_same_output_layer():
    class Swapped(nn.Module):
        """Its state dict ends in a layer that is not the last to run."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)
            self.aside = nn.Linear(FEATURES, FEATURES)

        def forward(self, x):
            return self.head(torch.relu(self.aside(x)))

    def swapped(seed):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Swapped()

    with pytest.raises(RoundFailedError, match=r"write Gems\(layer='head'\)"):
        run(Gems(), App([0, 0], model=swapped), model=swapped)
    result = run(Gems(layer="head"), App([0, 0], model=swapped), model=swapped)
    assert result.failures == ()
