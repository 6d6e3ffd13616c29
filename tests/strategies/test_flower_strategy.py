"""Flower's own strategies on our loop: what they give by themselves, with what the loop adds."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

from gems_flwr import FlowerStrategy, InProcessGrid, MeteredGrid

OPTIONS = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
STRATEGIES = {
    "fedavgm": lambda: FedAvgM(**OPTIONS, server_learning_rate=1.0, server_momentum=0.9),
    "fedadam": lambda: FedAdam(**OPTIONS, eta=0.01, beta_1=0.9, beta_2=0.99, tau=1e-3),
    "fedprox": lambda: FedProx(**OPTIONS, proximal_mu=0.1),
}


def app_of(train):
    app = ClientApp()
    app.train()(train)
    return app


def towards_own_number(message, context):
    """A node's training moves every weight halfway to a number of its own."""
    goal = context.node_config["partition-id"]
    arrays = {k: (a.numpy() + goal) / 2 for k, a in message.content["arrays"].items()}
    record = ArrayRecord({k: torch.from_numpy(a) for k, a in arrays.items()})
    content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1 + goal})})
    return Message(content, reply_to=message)


INITIAL = ArrayRecord({"w": torch.arange(4.0, dtype=torch.float64)})


def start(strategy, *, rounds, app=None, nodes=3, **keywords):
    grid = MeteredGrid(InProcessGrid(app or app_of(towards_own_number), nodes=nodes))
    return strategy.start(grid, INITIAL, num_rounds=rounds, **keywords)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_equals_flowers_by_itself_in_arrays_and_bytes(name):
    """Flower sums in order of arrival, ours by name: equal but for the rounding of a sum."""
    ours = start(FlowerStrategy(inner=STRATEGIES[name](), seed=3), rounds=4)
    grid = MeteredGrid(InProcessGrid(app_of(towards_own_number), nodes=3))
    config = ConfigRecord({"run-seed": 3})
    theirs = STRATEGIES[name]().start(grid, INITIAL, num_rounds=4, train_config=config)
    np.testing.assert_allclose(ours.arrays["w"].numpy(), theirs.arrays["w"].numpy(), rtol=1e-12)
    assert ours.arrays["w"].dtype == theirs.arrays["w"].dtype
    assert ours.traffic == grid.total


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM, FedAdam, FedAdagrad, FedYogi, FedProx])
def test_an_interrupted_run_goes_on_with_momentum_and_moments(kind, tmp_path):
    options = {"server_momentum": 0.9} if kind is FedAvgM else {}
    whole = start(FlowerStrategy(inner=kind(**OPTIONS, **options)), rounds=5)
    kept = {"checkpoint_dir": tmp_path}
    start(FlowerStrategy(inner=kind(**OPTIONS, **options), **kept), rounds=2)
    resumed = start(FlowerStrategy(inner=kind(**OPTIONS, **options), **kept), rounds=5, resume=True)
    np.testing.assert_array_equal(resumed.arrays["w"].numpy(), whole.arrays["w"].numpy())
    assert [record.round for record in resumed.history] == [0, 1, 2, 3, 4, 5]


def test_a_node_with_a_bad_reply_is_left_out_by_name():
    def train(message, context):
        reply = towards_own_number(message, context)
        if context.node_config["partition-id"] == 1:
            reply.content["arrays"] = ArrayRecord({"w": torch.full((4,), float("nan")).double()})
        return reply

    result = start(FlowerStrategy(inner=FedAvg(**OPTIONS)), rounds=1, app=app_of(train))
    [(_, failure)] = result.failures
    assert failure.node == "1"
    # Nodes 0 and 2 count 1 and 3: (1 · w/2 + 3 · (w + 2)/2) / 4.
    expected = np.arange(4) / 2 + 3 / 4
    np.testing.assert_allclose(result.arrays["w"].numpy(), expected)


def test_nodes_score_the_model_where_the_strategy_asks_them_to():
    app = app_of(towards_own_number)

    @app.evaluate()
    def evaluate(message, context):
        total = float(message.content["arrays"]["w"].numpy().sum())
        metrics = MetricRecord({"num-examples": 1, "total": total})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    inner = FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    result = start(FlowerStrategy(inner=inner), rounds=1, app=app)
    told = result.evaluate_metrics_clientapp[1]["total"]
    assert told == pytest.approx(result.arrays["w"].numpy().sum())
