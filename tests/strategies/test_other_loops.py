"""Flower's wrappers play rounds of their own with the strategy inside: FedAvg's, and no other's."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg

import gems_flwr
from conftest import record_equal
from gems_flwr import GemsError, InProcessGrid, MeteredGrid, Tune
from gems_flwr.errors import OptionError

NODES = 4
# What the constructors of some strategies must be given.
NEEDED = {
    "FlowerStrategy": {"inner": FlowersFedAvg()},
    "Pooled": {"fit": lambda *arguments: arguments[0], "input_shape": (2,)},
    "PublicOnly": {
        "tune": Tune(np.zeros((4, 3)), np.zeros(4), model=lambda: torch.nn.Linear(3, 2))
    },
    "Serial": {"learn": lambda number, model, memory: (model, memory, {})},
}


def server_fixed(strategy, noise):
    return DifferentialPrivacyServerSideFixedClipping(strategy, noise, 0.5, NODES)


def server_adaptive(strategy, noise):
    return DifferentialPrivacyServerSideAdaptiveClipping(strategy, noise, NODES)


def client_fixed(strategy, noise):
    return DifferentialPrivacyClientSideFixedClipping(strategy, noise, 0.5, NODES)


def client_adaptive(strategy, noise):
    return DifferentialPrivacyClientSideAdaptiveClipping(strategy, noise, NODES)


WRAPPERS = {
    server_fixed: [],
    server_adaptive: [],
    client_fixed: [fixedclipping_mod],
    client_adaptive: [adaptiveclipping_mod],
}


def app_with(*mods):
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message, context):
        node = context.node_config["partition-id"] + 1
        arrays = [w + np.float32(node) for w in message.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": node, "loss": 1 / node})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        total = sum(float(w.sum()) for w in message.content["arrays"].to_numpy_ndarrays())
        metrics = MetricRecord({"num-examples": 1, "total": total})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class InOrder(InProcessGrid):
    """Replies in order of partition, as our FedAvg sums them; Flower's takes them as they come."""

    def send_and_receive(self, messages, *, timeout=None):
        places = {node: place for place, node in enumerate(self._configs)}
        replies = super().send_and_receive(messages, timeout=timeout)
        return sorted(replies, key=lambda reply: places[reply.metadata.src_node_id])


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_inside_flowers_wrappers_fedavg_is_flowers_to_the_last_bit(wrap, noise):
    def play(cls):
        np.random.seed(5)  # Flower's noise is drawn from it
        initial = ArrayRecord([np.zeros((2, 3), np.float32), np.ones(2, np.float32)])
        strategy = wrap(cls(), noise)
        return strategy.start(InOrder(app_with(*WRAPPERS[wrap]), NODES), initial, num_rounds=3)

    flowers, ours = play(FlowersFedAvg), play(gems_flwr.FedAvg)
    assert record_equal(ours.arrays, flowers.arrays)
    assert ours.train_metrics_clientapp == flowers.train_metrics_clientapp
    assert ours.evaluate_metrics_clientapp == flowers.evaluate_metrics_clientapp
    assert set(ours.evaluate_metrics_clientapp) == {1, 2, 3}


@pytest.mark.parametrize("wrap", [server_fixed, client_adaptive])
@pytest.mark.parametrize("name", sorted(set(gems_flwr._STRATEGIES) - {"FedAvg"}))
def test_every_other_strategy_refuses_before_any_message_with_what_to_do(name, wrap):
    strategy = getattr(gems_flwr, name)(**NEEDED.get(name, {}))
    grid = MeteredGrid(InProcessGrid(app_with(), NODES))
    initial = ArrayRecord([np.zeros((2, 3), np.float32), np.zeros(2, np.float32)])
    with pytest.raises(OptionError) as caught:
        wrap(strategy, 0.1).start(grid, initial, num_rounds=2)
    assert str(caught.value).startswith(f"start {name} by itself, or use FedAvg here: ")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, GemsError)
    assert grid.total.messages_down == 0


def test_a_strategy_that_has_played_its_own_rounds_refuses_all_the_same():
    strategy = gems_flwr.OneShotAverage()
    initial = ArrayRecord([np.zeros(2, np.float32)])
    grid = MeteredGrid(InProcessGrid(app_with(), NODES))
    strategy.start(grid, initial)
    with pytest.raises(OptionError, match="start OneShotAverage by itself"):
        server_fixed(strategy, 1.0).start(grid, initial)
