"""Flower's own strategies on our loop: what they give by themselves, with what the loop adds."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi
from rich.console import Console
from safetensors.numpy import load_file

from gems_flwr import FlowerStrategy, MeteredGrid
from gems_flwr.errors import RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.flower_strategy import memory_of, recall
from simulations.backends.launch import simulated_client_app
from simulations.config import compose_config
from simulations.experiment.experiment import experiment_of
from simulations.run import run

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


def start(strategy, *, rounds, app=None, nodes=3, **keywords):
    grid = MeteredGrid(InProcessGrid(app or app_of(towards_own_number), nodes=nodes))
    initial = ArrayRecord({"w": torch.arange(4.0, dtype=torch.float64)})
    return strategy.start(grid, initial, num_rounds=rounds, **keywords)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_equals_flowers_by_itself_in_arrays_and_bytes(name, tmp_path):
    """The runner on digits beside Flower's own loop on the same nodes, both with a metered grid.

    Flower sums in order of arrival, ours by name: equal but for the rounding of a sum.
    """
    config = compose_config([f"strategy={name}", "rounds=3", "nodes=3", "progress=false"])
    result = run(config, tmp_path, Console(quiet=True))
    ours = load_file(tmp_path / "model.safetensors")

    experiment = experiment_of(config.to_json())
    grid = MeteredGrid(InProcessGrid(simulated_client_app(config), nodes=3))
    bare = STRATEGIES[name]().start(
        grid,
        experiment.initial_arrays(),
        num_rounds=3,
        train_config=ConfigRecord({"run-seed": config.seed}),
    )
    theirs = {key: array.numpy() for key, array in bare.arrays.items()}
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        assert ours[key].dtype == array.dtype
        np.testing.assert_allclose(ours[key], array, rtol=1e-5, atol=1e-6)
    assert (result["bytes_up"], result["bytes_down"]) == (
        grid.total.bytes_up,
        grid.total.bytes_down,
    )


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM, FedAdam, FedAdagrad, FedYogi, FedProx])
def test_an_interrupted_run_goes_on_with_momentum_and_moments(kind, tmp_path):
    options = {"server_momentum": 0.9} if kind is FedAvgM else {}
    whole = start(FlowerStrategy(inner=kind(**OPTIONS, **options)), rounds=5)
    kept = {"checkpoint_dir": tmp_path}
    start(FlowerStrategy(inner=kind(**OPTIONS, **options), **kept), rounds=2)
    resumed = start(FlowerStrategy(inner=kind(**OPTIONS, **options), **kept, resume=True), rounds=5)
    np.testing.assert_array_equal(resumed.arrays["w"].numpy(), whole.arrays["w"].numpy())
    assert [record.round for record in resumed.history] == [0, 1, 2, 3, 4, 5]


def test_what_a_strategy_keeps_is_put_back_as_it_was():
    before = FedAvgM(server_momentum=0.5)
    before.momentum_vector = [np.ones(2), np.zeros((2, 2))]
    before.current_arrays = ArrayRecord({"a|b": torch.ones(3)})
    after = FedAvgM(server_momentum=0.5)
    recall(after, memory_of(before))
    assert isinstance(after.momentum_vector, list)
    np.testing.assert_array_equal(after.momentum_vector[1], np.zeros((2, 2)))
    np.testing.assert_array_equal(after.current_arrays["a|b"].numpy(), np.ones(3))


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


def test_too_few_usable_replies_fail_the_round():
    def train(message, context):
        raise RuntimeError("on purpose")

    with pytest.raises(RoundFailedError):
        start(FlowerStrategy(inner=FedAvg(**OPTIONS)), rounds=1, app=app_of(train))


def test_nodes_score_the_model_where_the_strategy_asks_them_to():
    app = app_of(towards_own_number)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord(
            {"num-examples": 1, "total": float(message.content["arrays"]["w"].numpy().sum())}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    inner = FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    result = start(FlowerStrategy(inner=inner), rounds=1, app=app)
    told = result.evaluate_metrics_clientapp[1]["total"]
    assert told == pytest.approx(result.arrays["w"].numpy().sum())
