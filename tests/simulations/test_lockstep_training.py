"""backend=lockstep: the runs of backend=inprocess, whose nodes train at once."""

import itertools
import logging
import threading

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from rich.console import Console
from safetensors.numpy import load_file

from simulations.backends import lockstep_training
from simulations.backends.launch import simulated_client_app
from simulations.backends.lockstep_training import LockstepTrainingGrid
from simulations.config import compose_config
from simulations.experiment import joint_training, remembered
from simulations.experiment.experiment import experiment_of
from simulations.experiment.remembered import remember_training
from simulations.run import run

SMALL = ["nodes=6", "partition=iid", "progress=false"]
MLP = ["model=mlp", "model.hidden=[8]"]
BALL = ["strategy=gems", "strategy/space=ball", "strategy.space.directions=20"]
LONG = ["train.epochs=25", "train.batch_size=16", "train.lr=0.02"]


@pytest.fixture
def alone(monkeypatch):
    """A list that grows by one whenever a node trains by itself."""
    calls, real = [], remembered.fit

    def counted(*arguments, **options):
        calls.append(options["seed"])
        return real(*arguments, **options)

    monkeypatch.setattr(remembered, "fit", counted)
    return calls


def finish(folder, backend, *overrides):
    config = compose_config([*SMALL, *overrides, f"backend={backend}"])
    return run(config, folder / backend, Console(quiet=True)), load_file(
        folder / backend / "model.safetensors"
    )


def assert_same_run(folder, *overrides):
    (slow, one), (quick, other) = (
        finish(folder, backend, *overrides) for backend in ("inprocess", "lockstep")
    )
    assert one.keys() == other.keys()
    for name, array in one.items():
        # A merged or projected model is no smooth function of the nodes', but nearly.
        np.testing.assert_allclose(other[name], array, atol=1e-3 * max(1, np.abs(array).max()))
    assert quick["accuracy"] == pytest.approx(slow["accuracy"], abs=0.01)
    assert quick["messages"] == slow["messages"]
    assert quick["bytes_down"] == slow["bytes_down"]
    # Some numbers travel as text, as long as they have digits.
    assert quick["bytes_up"] == pytest.approx(slow["bytes_up"], rel=1e-3)
    return quick


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=fedavg", "rounds=3", "partition=dirichlet"],
        ["strategy=fedavg", "rounds=2", "train.patience=1", "train.epochs=9", *MLP],
        ["strategy=fedavg", "strategy.fraction_train=0.5", "rounds=3", *MLP],
        ["strategy=fedprox", "rounds=2", *MLP],
        ["strategy=one_shot_average", "secure=sum", "own_initial_weights=true", *MLP],
        ["strategy=ensemble", "own_initial_weights=true", *MLP],
        ["strategy=local", *MLP],
        [*BALL, *LONG, "nodes=4"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_run_is_the_same_and_no_node_trains_by_itself(overrides, tmp_path, alone):
    finish(tmp_path, "inprocess", *overrides)
    trained = len(alone)
    assert trained > 0
    # The run one by one is finished already.
    assert_same_run(tmp_path, *overrides)
    assert len(alone) == trained


@pytest.mark.slow
def test_hidden_layers_and_several_models_are_trained_at_once_too(tmp_path):
    layers = ["strategy=gems_layerwise", "strategy.neurons.directions=20", *MLP, *LONG]
    assert_same_run(tmp_path / "layers", *layers, "strategy.min_nodes=1", "train.output_epochs=3")
    assert_same_run(tmp_path / "several", "strategy=multi_model", "rounds=2")


def test_a_packed_model_is_decoded_by_the_nodes_before_they_train(tmp_path):
    """Rounding decides which bits a model is packed into, so the bytes may differ a little."""
    options = ["strategy=fedavg", "strategy.compress=int8", "rounds=2"]
    (slow, _), (quick, _) = (finish(tmp_path, b, *options) for b in ("inprocess", "lockstep"))
    assert quick["accuracy"] == pytest.approx(slow["accuracy"], abs=0.01)
    assert quick["bytes_up"] == pytest.approx(slow["bytes_up"], rel=0.02)


def test_few_may_be_under_way_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(lockstep_training, "_MOST_NODES", 4)
    groups = []
    real = joint_training.fit_together
    monkeypatch.setattr(
        joint_training,
        "fit_together",
        lambda trainees, **options: groups.append(len(trainees)) or real(trainees, **options),
    )
    assert_same_run(tmp_path, "strategy=fedavg", "rounds=2")
    assert groups == [4, 2, 4, 2]


def test_what_cannot_be_trained_together_is_trained_alone_and_said_once(tmp_path, alone, caplog):
    scaffold = ["strategy=multi_model", "strategy.sampling=scaffold", "rounds=2"]
    with caplog.at_level(logging.WARNING, "gems_flwr"):
        quick, _ = finish(tmp_path, "lockstep", *scaffold)
    assert alone
    assert [record.getMessage().count("SCAFFOLD") for record in caplog.records] == [1]
    slow, _ = finish(tmp_path, "inprocess", *scaffold)
    assert quick["accuracy"] == slow["accuracy"]


def test_what_was_trained_together_is_not_taken_for_what_was_trained_alone(tmp_path, alone):
    with remember_training() as memory:
        for backend, name in itertools.product(("inprocess", "lockstep"), "ab"):
            finish(tmp_path / name, backend, "strategy=local")
        assert (memory.trained, memory.recalled) == (12, 12)
    assert len(alone) == 6


# --- the grid itself ----------------------------------------------------------------------------


def messages(grid, config):
    experiment = experiment_of(config.to_json())
    _ = experiment.shares
    for node in sorted(grid.get_node_ids()):
        content = RecordDict({"arrays": experiment.initial_arrays(), "config": ConfigRecord()})
        yield Message(content, node, "train")


def test_nodes_that_fail_or_take_too_long_are_those_of_the_inprocess_grid():
    """One of six raises before it trains, one sleeps: four replies, one error, one silence."""
    config = compose_config([*SMALL, "strategy=fedavg", "backend=lockstep"])
    real, release = simulated_client_app(config), threading.Event()
    app = ClientApp()

    @app.train()
    def train(message, context):
        if context.node_config["partition-id"] == 1:
            raise ValueError("no data today")
        if context.node_config["partition-id"] == 2:
            release.wait(20)
        return real(message, context)

    grid = LockstepTrainingGrid(app, 6)
    replies = list(grid.send_and_receive(list(messages(grid, config)), timeout=2.0))
    release.set()
    errors = [reply for reply in replies if reply.has_error()]
    assert len(replies) == 5
    assert "no data today" in errors[0].error.reason
    assert len(errors) == 1


def test_who_stops_listening_leaves_no_node_waiting():
    config = compose_config([*SMALL, "strategy=fedavg", "backend=lockstep"])
    grid = LockstepTrainingGrid(simulated_client_app(config), 6)
    ids = list(grid.push_messages(list(messages(grid, config))))
    replies = grid.collect(ids, timeout=None)
    next(replies)
    replies.close()
    again = list(grid.send_and_receive(list(messages(grid, config))))
    assert len(again) == 6
    assert not any(reply.has_error() for reply in again)


def test_a_fault_in_the_common_computation_is_every_nodes_error(monkeypatch):
    config = compose_config([*SMALL, "strategy=fedavg", "backend=lockstep"])
    grid = LockstepTrainingGrid(simulated_client_app(config), 6)

    def broken(orders):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lockstep_training, "fit_orders", broken)
    replies = list(grid.send_and_receive(list(messages(grid, config))))
    assert len(replies) == 6
    assert all("out of memory" in reply.error.reason for reply in replies)
