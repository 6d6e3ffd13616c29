"""Training many nodes at once gives each what it would have got alone, up to rounding."""

import copy
import logging
import threading

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from helpers_patience import HANG_SECONDS
from rich.console import Console
from safetensors.numpy import load_file
from torch import nn

from simulations.backends import lockstep
from simulations.backends.launch import simulated_client_app
from simulations.backends.lockstep import LockstepGrid
from simulations.config import compose_config
from simulations.data import Examples
from simulations.experiment.experiment import experiment_of
from simulations.experiment.together import Order, train_together
from simulations.experiment.training import CLASSES, Learned, TrainOptions
from simulations.models import lenet, mlp
from simulations.run import run

# What the documentation promises; the largest that was seen here is 1e-6.
RELATIVE = 1e-4
# From one example to some batches, with and without a smaller last one.
SIZES = (23, 1, 40, 8, 16, 9, 31)
ADAM = {"optimizer": "adam", "lr": 0.01, "batch_size": 8, "epochs": 3}
SGD = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "batch_size": 8, "epochs": 3}
RMS = {"optimizer": "rmsprop", "lr": 0.01, "momentum": 0.5, "batch_size": 8, "epochs": 3}


def shares(classes=3, sizes=SIZES):
    draws = np.random.default_rng(1)
    for size in sizes:
        features = draws.normal(size=(size, 6)).astype(np.float32)
        yield Examples(features, draws.integers(0, classes, size) if classes else features[:, 0])


def network(dropout=0.0, classes=3):
    return mlp(input_shape=(6,), classes=classes, hidden=(5,), dropout=dropout)


def both_ways(make, data, options, *, target=CLASSES, mu=0.0, memory=None):
    """Train the same models alone and together; return both, with what they report."""
    models, found = [], []
    for number in range(len(data)):
        torch.manual_seed(number)
        models.append(make())
    for joint in (False, True):
        copies = copy.deepcopy(models)
        orders = [
            Order(
                model,
                part if isinstance(part, list) else [part],
                seed,
                memory and memory[seed],
                options=TrainOptions(**options),
                proximal_mu=mu,
                target=target,
            )
            for seed, (model, part) in enumerate(zip(copies, data, strict=True))
        ]
        assert not any(order.why_alone() for order in orders)
        found.append(copies)
        found.append(train_together(orders) if joint else [order.alone() for order in orders])
    return models, *found


def same(start, alone, each, joined, joint):
    for one, other in zip(alone, joined, strict=True):
        for name, weight in one.state_dict().items():
            gap = (other.state_dict()[name] - weight).abs().max()
            assert gap <= RELATIVE * weight.abs().max(), name
    for one, other in zip(each, joint, strict=True):
        if isinstance(one, Learned):
            assert (one.examples, one.batches) == (other.examples, other.batches)
            assert other.loss_sum == pytest.approx(one.loss_sum, rel=RELATIVE)
            assert other.correct_share_sum == pytest.approx(one.correct_share_sum)
            assert one.memory.keys() == other.memory.keys()
            for key, value in one.memory.items():
                assert other.memory[key].shape == value.shape
                assert np.allclose(other.memory[key], value, rtol=1e-3, atol=1e-6)
        else:
            assert one.keys() == other.keys()
            assert other == pytest.approx(one, rel=RELATIVE)


@pytest.mark.parametrize(
    "options", [ADAM, SGD, RMS, ADAM | {"weight_decay": 0.1, "batch_size": 64}]
)
def test_every_node_ends_where_it_would_have_ended_alone(options):
    same(*both_ways(network, list(shares()), options))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(6, 3),
        lambda: network(dropout=0.5),
        lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.Tanh()), nn.Linear(4, 3)),
    ],
)
def test_networks_and_dropout_of_all_kinds(make):
    """Dropout masks are each node's own: another draw would change every weight."""
    same(*both_ways(make, list(shares()), ADAM))


def test_each_node_stops_when_its_own_patience_is_over():
    found = both_ways(network, list(shares()), ADAM | {"epochs": 40, "patience": 2})
    same(*found)
    epochs = {report["epochs"] for report in found[-1]}
    assert len(epochs) > 2
    assert min(epochs) < 40


@pytest.mark.parametrize("options", [ADAM, SGD, RMS])
def test_nodes_of_a_stream_go_on_with_their_own_optimisers(options):
    """Two batches each, then three more; batches of nodes may differ in size."""
    parts = [[Examples(p.features, p.labels) for _ in "ab"] for p in shares(sizes=(5, 8, 6))]
    models, *first = both_ways(lambda: network(dropout=0.3), parts, options, memory=[{}, {}, {}])
    same(models, *first)
    memory = [learned.memory for learned in first[1]]
    again = [[*part, part[0]] for part in parts]
    same(*both_ways(lambda: network(dropout=0.3), again, options, memory=memory))


def test_what_cannot_be_trained_together_is_reported():
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda gradient: gradient)
    [part] = shares(sizes=(3,))
    for model, words in (
        (hooked, "SCAFFOLD"),
        (lenet(input_shape=(1, 12, 12), classes=2), "Conv2d"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "BatchNorm1d"),
        (nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
    ):
        assert words in Order(model, [part], 0, options=TrainOptions()).why_alone()


# --- whole runs ---------------------------------------------------------------------------------

SMALL = ["nodes=6", "partition=iid", "progress=false"]
MLP = ["model=mlp", "model.hidden=[8]"]
LONG = ["train.epochs=25", "train.batch_size=16", "train.lr=0.02"]
STREAM = ["strategy=dynamic", "strategy.delta=0.05", "rounds=12", "train.batch_size=5"]


@pytest.fixture
def alone(monkeypatch):
    """A list that grows by one whenever a node trains by itself."""
    calls, real = [], Order.alone
    monkeypatch.setattr(Order, "alone", lambda order: calls.append(order.seed) or real(order))
    return calls


def finish(folder, backend, *overrides):
    config = compose_config([*SMALL, *overrides, f"backend={backend}"])
    result = run(config, folder / backend, Console(quiet=True))
    return result, load_file(folder / backend / "model.safetensors")


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=fedavg", "rounds=2", "partition=dirichlet", "strategy.fraction_train=0.5"],
        ["strategy=fedprox", "rounds=2", "train.patience=1", "train.epochs=5", *MLP],
        ["strategy=one_shot_average", "secure=sum", "own_initial_weights=true", *MLP],
        ["strategy=gems", "strategy/space=ball", "strategy.space.directions=20", *LONG, "nodes=4"],
        [*STREAM, "strategy.compress=int8"],
        [*STREAM, "train.optimizer=adam", "train.lr=0.01"],
        ["strategy=gems_layerwise", *MLP, *LONG, "train.output_epochs=3"],
        ["strategy=multi_model", "rounds=2"],
    ],
    ids=lambda overrides: " ".join(overrides[:2]),
)
def test_a_run_is_the_same_and_no_node_trains_by_itself(overrides, tmp_path, alone):
    slow, one = finish(tmp_path, "inprocess", *overrides)
    trained = len(alone)
    assert trained > 0
    quick, other = finish(tmp_path, "lockstep", *overrides)
    assert len(alone) == trained
    assert one.keys() == other.keys()
    for name, array in one.items():
        # A merged or projected model is no smooth function of the nodes', but nearly.
        np.testing.assert_allclose(other[name], array, atol=1e-3 * max(1, np.abs(array).max()))
    assert quick["accuracy"] == pytest.approx(slow["accuracy"], abs=0.01)
    assert quick["messages"] == slow["messages"]
    # Some numbers travel as text, as long as they have digits; deflated, a few codes may differ.
    for direction in ("bytes_up", "bytes_down"):
        assert quick[direction] == pytest.approx(slow[direction], rel=2e-3)
    for key in ("cumulative_loss", "correct", "models_up", "violations"):
        if key in slow["details"]:
            expected = slow["details"][key]
            assert quick["details"][key] == pytest.approx(expected, rel=1e-4), key
    synchronisations = [each["details"].get("synchronisations") for each in (quick, slow)]
    assert synchronisations[0] == synchronisations[1]


def test_what_is_trained_alone_is_logged_once(tmp_path, alone, caplog):
    scaffold = ["strategy=multi_model", "strategy.sampling=scaffold", "rounds=2"]
    with caplog.at_level(logging.WARNING, "gems_flwr"):
        quick, _ = finish(tmp_path, "lockstep", *scaffold)
    assert alone
    assert [record.getMessage().count("SCAFFOLD") for record in caplog.records] == [1]
    slow, _ = finish(tmp_path, "inprocess", *scaffold)
    assert quick["accuracy"] == slow["accuracy"]


# --- the grid itself ----------------------------------------------------------------------------


@pytest.fixture
def fedavg():
    return compose_config([*SMALL, "strategy=fedavg", "backend=lockstep"])


def messages(grid, config):
    experiment = experiment_of(config.to_json())
    _ = experiment.shares
    for node in sorted(grid.get_node_ids()):
        content = RecordDict({"arrays": experiment.initial_arrays(), "config": ConfigRecord()})
        yield Message(content, node, "train")


def test_nodes_that_fail_or_take_too_long_are_those_of_the_inprocess_grid(fedavg):
    """One of six raises before it trains, one sleeps: four replies, one error, one silence."""
    real, release = simulated_client_app(fedavg), threading.Event()
    app = ClientApp()

    @app.train()
    def train(message, context):
        if context.node_config["partition-id"] == 1:
            raise ValueError("no data today")
        if context.node_config["partition-id"] == 2:
            release.wait(HANG_SECONDS)
        return real(message, context)

    class OneHurried(LockstepGrid):
        """Only the sleeper must answer in time; the others may wait for a busy processor."""

        def _start(self, chosen, timeout):
            journeys = []
            while chosen:
                node = self._pending[chosen[0]].metadata.dst_node_id
                late = self._configs[node]["partition-id"] == 2
                journeys += super()._start([chosen.pop(0)], timeout if late else None)
            return journeys

    grid = OneHurried(app, 6)
    replies = list(grid.send_and_receive(list(messages(grid, fedavg)), timeout=0.2))
    release.set()
    (error,) = [reply for reply in replies if reply.has_error()]
    assert len(replies) == 5
    assert "no data today" in error.error.reason


def test_who_stops_listening_leaves_no_node_waiting(fedavg):
    grid = LockstepGrid(simulated_client_app(fedavg), 6)
    replies = grid.collect(list(grid.push_messages(list(messages(grid, fedavg)))), timeout=None)
    next(replies)
    replies.close()
    again = list(grid.send_and_receive(list(messages(grid, fedavg))))
    assert len(again) == 6
    assert not any(reply.has_error() for reply in again)


def test_a_fault_in_the_common_computation_is_every_nodes_error(fedavg, monkeypatch):
    def broken(orders):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lockstep, "train_together", broken)
    grid = LockstepGrid(simulated_client_app(fedavg), 6)
    replies = list(grid.send_and_receive(list(messages(grid, fedavg))))
    assert len(replies) == 6
    assert all("out of memory" in reply.error.reason for reply in replies)
