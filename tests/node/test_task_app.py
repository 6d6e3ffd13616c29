"""The ready ClientApp, and what becomes of faults."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from torch import nn

from gems_flwr import (
    FedAvg,
    InProcessGrid,
    NodeLimits,
    Pooled,
    Report,
    Task,
    good_enough_mod,
    task_client_app,
)
from gems_flwr.core.nodes import Name
from gems_flwr.core.records import to_record
from gems_flwr.errors import RoundFailedError
from gems_flwr.node.limits import UNLIMITED


class Noise(Task):
    """Adds noise from its seed to a small network with a counter."""

    seeds: ClassVar[list[int]] = []

    def build_model(self):
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def train(self, model, *, seed, config):
        self.seeds.append(seed)
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=rng))
        return Report(10, {"loss": 0.5, "lr": float(config.get("lr", 0))})

    def evaluate(self, model, *, config):
        return Report(4, {"bias": model[0].bias.sum().item()})

    def validation_data(self):
        return torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)


def arrays():
    return ArrayRecord(Noise().build_model().state_dict())


def run(strategy, app, nodes=3, rounds=2, **kwargs):
    return strategy.start(InProcessGrid(app, nodes), arrays(), num_rounds=rounds, **kwargs)


def test_a_task_is_trained_and_evaluated():
    result = run(
        FedAvg(fraction_evaluate=1.0),
        task_client_app(lambda context: Noise()),
        train_config=ConfigRecord({"lr": 0.25}),
    )
    assert result.train_metrics_clientapp[2] == {"loss": 0.5, "lr": 0.25}
    assert result.evaluate_metrics_clientapp[2]["bias"] == pytest.approx(
        float(result.arrays["0.bias"].numpy().sum()), rel=1e-5
    )
    assert result.arrays["1.num_batches_tracked"].numpy().dtype == np.int64


def test_the_ready_app_works_with_flowers_own_strategy():
    result = run(FlowersFedAvg(), task_client_app(lambda context: Noise()), rounds=1)
    assert set(result.evaluate_metrics_clientapp) == {1}


def test_seeds_differ_by_node_and_round_and_repeat_with_the_run():
    def seeds(seed):
        Noise.seeds.clear()
        run(FedAvg(seed=seed), task_client_app(lambda context: Noise()))
        return sorted(Noise.seeds)

    first = seeds(1)
    assert len(set(first)) == 6
    assert seeds(1) == first
    assert not set(seeds(2)) & set(first)


class Broken(Noise):
    """Cannot train."""

    def train(self, model, *, seed, config):
        raise OSError("the disk is gone")


def test_a_fault_in_a_task_is_named_with_its_node_and_place():
    app = task_client_app(
        lambda context: Broken() if context.node_config["partition-id"] == 2 else Noise()
    )
    (failure,) = run(FedAvg(), app, rounds=1).history[1].failures
    assert failure.node == "2"
    assert "train failed on node 2: OSError: the disk is gone (in train, test_task_app.py" in (
        failure.reason
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (RecordDict(), "no ArrayRecord 'arrays'"),
        (RecordDict({"arrays": to_record({"x": np.ones(1)})}), "surplus ['x']"),
    ],
)
def test_a_message_that_does_not_fit_is_answered_with_an_error(content, words):
    grid = InProcessGrid(task_client_app(lambda context: Noise()), 1)
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(content, node, "train")])
    assert words in reply.error.reason


def test_raw_data_is_shared_only_by_an_app_that_was_built_to():
    class Sharing(Noise):
        def shared_examples(self):
            return np.zeros((2, 3), np.float32), np.array([0, 1])

    def pooled(app):
        strategy = Pooled(fit=lambda arrays, *rest: arrays, input_shape=(3,))
        return run(strategy, app).details["pooled_examples"]

    assert pooled(task_client_app(lambda context: Sharing(), limits=UNLIMITED)) == 6
    with pytest.raises(RoundFailedError, match="limit share_examples: raw data stays here"):
        pooled(task_client_app(lambda context: Sharing()))
    with pytest.raises(RoundFailedError, match="Noise shares no data"):
        pooled(task_client_app(lambda context: Noise(), limits=UNLIMITED))


@pytest.mark.parametrize("limits", [None, NodeLimits(require_dp=True)])
def test_a_node_reports_its_name(limits):
    """However little the node gives away otherwise; nothing is trained for it."""
    grid = InProcessGrid(task_client_app(lambda context: None, limits=limits), [{"name": "north"}])
    (node,) = grid.get_node_ids()
    content = RecordDict({"config": ConfigRecord(), **Name().to_records()})
    (reply,) = grid.send_and_receive([Message(content, dst_node_id=node, message_type="train")])
    assert dict(reply.content["node"]) == {"name": "north"}


def test_the_mod_travels_to_the_workers_of_flowers_engine():
    """Which gets the app by cloudpickle; what a closure of a mod holds must go along."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    built = {"only": lambda: nn.Linear(2, 2)}
    for mod in (good_enough_mod(), good_enough_mod(lambda context: None, model=built["only"])):
        assert callable(cloudpickle.loads(cloudpickle.dumps(mod)))
