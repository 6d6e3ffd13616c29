"""Trackers write what happened, go on where a run goes on, and never get into its way."""

import json
import random
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import initial_arrays, record_equal, toy_app
from gems_flwr import Callback, Cone, FedAvg, Gems, InProcessGrid
from gems_flwr.core import RoundRecord, RunResult, Traffic
from gems_flwr.core.records import to_record
from gems_flwr.errors import Failure, NotInstalledError, RoundFailedError
from gems_flwr.tools import MLflow, TensorBoard, Tracker
from gems_flwr.tools.trackers import (
    flat_values,
    result_values,
    round_numbers,
    setting_values,
    tidy_name,
)

ROUNDS = 4


class Stop(BaseException):
    """Stands for a power cut."""


class StopAfter(Callback):
    def __init__(self, rounds):
        self.rounds = rounds

    def on_round_end(self, record):
        if record.round == self.rounds:
            raise Stop


def score(server_round, arrays):
    weight = arrays["weight"].numpy()
    return {"accuracy": float(np.tanh(weight.mean() / 50)), "loss": float(1 / weight.sum())}


def play(callbacks, folder=None, *, strategy=FedAvg, rounds=ROUNDS, arrays=None, **options):
    grid = InProcessGrid(toy_app(), 4)
    built = strategy(checkpoint_dir=folder, callbacks=callbacks, **options)
    how = {"num_rounds": rounds, "evaluate_fn": score, "resume": folder is not None}
    return built.start(grid, arrays or initial_arrays(), **how)


def interrupted(tracker, folder, after=2):
    with pytest.raises(Stop):
        play([tracker, StopAfter(after)], folder)


def rounds_of(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


# What the three have to say of each round, and where it stands in rounds.jsonl.
CLAIMS = {
    "accuracy": lambda record: record["server_metrics"]["accuracy"],
    "loss": lambda record: record["server_metrics"]["loss"],
    "train/loss": lambda record: record["train_metrics"]["loss"],
    "round/bytes_up": lambda record: record["bytes_up"],
    "round/nodes_answered": lambda record: len(record["nodes_answered"]),
    "round/seconds": lambda record: record["seconds"],
}


def expected(folder):
    """Return {name: {round: number}} as the run's own file has it."""
    records = rounds_of(folder)
    table = {
        name: {r["round"]: claim(r) for r in records if r["round"] or name in ("accuracy", "loss")}
        for name, claim in CLAIMS.items()
    }
    sent = np.cumsum([record["bytes_up"] for record in records])
    table["total/bytes_up"] = {r["round"]: int(s) for r, s in zip(records, sent, strict=True)}
    del table["total/bytes_up"][0]
    return table


# --- one store for all tests: to make a database takes MLflow a second or two ----------------


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def mlflow(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MLflow keeps artifacts in the working directory
    return lambda **options: MLflow("tests", uri=store, **options)


def mlflow_runs(store, folder):
    client = MlflowClient(store)
    ids = [client.get_experiment_by_name("tests").experiment_id]
    found = client.search_runs(ids, f"attributes.run_name = '{folder.name}'")
    return client, found


def mlflow_table(client, run, names):
    return {
        name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
        for name in names
    }


def tensorboard_table(folder, names):
    events = EventAccumulator(str(folder)).Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in names}


def as_float32(table):
    return {
        name: {step: float(np.float32(v)) for step, v in values.items()}
        for name, values in table.items()
    }


# --- what is written, read by their own readers ----------------------------------------------


def test_mlflow_has_the_numbers_of_the_run(mlflow, store, tmp_path):
    folder = tmp_path / "first"
    result = play([mlflow(config={"data": {"rows": 7}})], folder, seed=3)
    client, [run] = mlflow_runs(store, folder)
    table = expected(folder)
    assert mlflow_table(client, run, table) == table
    assert run.info.status == "FINISHED"
    assert run.data.tags["result/stopped_because"] == "all rounds are done"
    assert run.data.metrics["result/bytes_up"] == result.traffic.bytes_up
    told = {"strategy": "FedAvg", "strategy.seed": "3", "num_rounds": "4", "data.rows": "7"}
    assert told.items() <= run.data.params.items()


def test_tensorboard_has_the_numbers_of_the_run(tmp_path):
    folder = tmp_path / "first"
    play([TensorBoard(tmp_path / "board")], folder)
    table = expected(folder)
    assert tensorboard_table(tmp_path / "board" / "first", table) == as_float32(table)
    events = EventAccumulator(str(tmp_path / "board" / "first")).Reload()
    assert {"parameters/text_summary", "result/text_summary"} <= {*events.Tags()["tensors"]}


def test_no_tracker_has_the_names_of_nodes(mlflow, store, tmp_path):
    """Of 30 numbers and more, none is about one node."""
    secret = re.compile(rb"node/[0-9]")
    play([TensorBoard(tmp_path / "board"), mlflow()], tmp_path / "quiet")
    files = [*tmp_path.glob("board/quiet/*")]
    assert len(files) == 1
    assert not [path for path in files if secret.search(path.read_bytes())]
    _, [run] = mlflow_runs(store, tmp_path / "quiet")
    assert not [name for name in run.data.metrics if name.startswith("node/")]


# --- going on -----------------------------------------------------------------------------------


def test_a_resumed_run_is_written_once_more_from_its_first_round_on(mlflow, store, tmp_path):
    folder = tmp_path / "resumed"
    interrupted(mlflow(), folder)
    client, [first] = mlflow_runs(store, folder)
    assert first.info.status == "KILLED"
    play([mlflow()], folder)
    client, runs = mlflow_runs(store, folder)
    [run] = [each for each in runs if each.info.run_id != first.info.run_id]
    assert run.info.status == "FINISHED"
    table = expected(folder)
    assert mlflow_table(client, run, table) == table


@pytest.mark.parametrize("first", [TensorBoard, lambda board: Callback()], ids=["both", "late"])
def test_a_resumed_run_goes_on_in_the_same_curves_of_tensorboard(tmp_path, first):
    """Also where only the second process tracks it: the earlier rounds are added."""
    folder = tmp_path / "resumed"
    interrupted(first(tmp_path / "board"), folder)
    play([TensorBoard(tmp_path / "board")], folder)
    events = EventAccumulator(str(tmp_path / "board" / "resumed")).Reload()
    assert [event.step for event in events.Scalars("accuracy")] == list(range(ROUNDS + 1))
    table = expected(folder)
    assert tensorboard_table(tmp_path / "board" / "resumed", table) == as_float32(table)


# --- never in the way ---------------------------------------------------------------------------


class Broken(Tracker):
    """Fails whatever it is asked."""

    def __init__(self, error=None):
        super().__init__()
        self.error, self.done = error, []

    def _do(self, *what):
        if self.error is not None:
            raise self.error
        self.done.append(what)

    def open_run(self, name, parameters):
        self._do("open")

    def log_round(self, number, numbers):
        self._do("round", number)

    def close_run(self, values, error):
        self._do("close", type(error).__name__)


def told(result):
    records = [{**record.to_json(), "seconds": 0} for record in result.history]
    return json.dumps(records), result.stopped_because, result.traffic


@pytest.mark.parametrize("error", [SystemExit("no"), ValueError("[bold] 'x'")])
def test_a_tracker_that_fails_in_everything_changes_nothing_and_is_said_once(error, caplog):
    alone = play([])
    caplog.clear()
    watched = play([Broken(error)])
    assert record_equal(alone.arrays, watched.arrays)
    assert told(alone) == told(watched)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == 1
    assert "Broken does not follow the run, which goes on" in said[0]
    assert str(error) in said[0]


def test_a_run_that_fails_is_a_failed_run_in_the_tracker():
    def refuse(message, context):
        raise ValueError("no")

    tracker = Broken()
    grid = InProcessGrid(toy_app(dict.fromkeys(range(4), refuse)), 4)
    with pytest.raises(RoundFailedError):
        FedAvg(callbacks=[tracker]).start(grid, initial_arrays(), num_rounds=2)
    assert tracker.done[-1] == ("close", "RoundFailedError")


def test_trackers_draw_no_random_number_of_the_run(mlflow, tmp_path):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    play([mlflow(), TensorBoard(tmp_path / "board")], tmp_path / "run")
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after


# --- what is missing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tracker", "module", "extra"),
    [
        (MLflow, "mlflow.tracking", "mlflow"),
        (TensorBoard, "torch.utils.tensorboard", "tensorboard"),
    ],
)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    monkeypatch, tracker, module, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotInstalledError, match=rf"pip install 'gems-flwr\[{extra}\]'"):
        tracker()


# --- a run as names and numbers ---------------------------------------------------------------

FIRST = RoundRecord(0, server_metrics={"accuracy": 0.1})
SECOND = RoundRecord(
    1,
    seconds=2.0,
    nodes_asked=("north", "south", "harbour"),
    nodes_answered=("north", "south"),
    failures=(Failure("harbour", "harbour is on strike"),),
    traffic=Traffic(100, 200, 2, 3),
    train_metrics={"loss": 0.5, "by_class": [1.0, 2.0]},
    evaluate_metrics={"loss": 0.25},
    server_metrics={"loss": 0.125, "accuracy/task-1": 0.75},
)


def test_metrics_of_server_evaluation_and_training_are_kept_apart():
    numbers = round_numbers(SECOND, Traffic(110, 220, 3, 4))
    assert (numbers["loss"], numbers["evaluate/loss"], numbers["train/loss"]) == (0.125, 0.25, 0.5)
    assert numbers["accuracy/task-1"] == 0.75
    assert (numbers["round/bytes_up"], numbers["total/bytes_up"]) == (100, 110)
    assert (numbers["round/nodes_asked"], numbers["round/nodes_answered"]) == (3, 2)
    assert not re.search("by_class|north|south|harbour", repr(numbers))
    assert round_numbers(FIRST, Traffic()) == {"accuracy": 0.1}


def test_of_the_result_there_are_verdict_bound_and_scores_without_names():
    values = result_values(
        RunResult(
            arrays=to_record({}),
            history=(FIRST, SECOND),
            details={
                "status": "feasible",
                "loss_bound": 0.01,
                "note": "north was late",
                "left_out": {"harbour": "harbour is on strike"},
                "node_scores": {"north": 0.5, "south": 1.0},
            },
            stopped_because="all rounds are done",
        )
    )
    assert (values["status"], values["loss_bound"]) == ("feasible", 0.01)
    assert (values["node_scores/mean"], values["node_scores/lowest"]) == (0.75, 0.5)
    assert (values["failures"], values["bytes_up"], values["rounds"]) == (1, 100, 1)
    assert not re.search("north|south|harbour", repr(values))


def test_options_become_one_level_without_lists_that_may_name_nodes():
    strategy = Gems(space=Cone(rank=7), checkpoint_dir="/srv/wards")
    values = setting_values({**vars(strategy), "epsilon": {"north": 0.5}})
    assert (values["space"], values["space.rank"], values["seed"]) == ("Cone", 7, 0)
    assert not re.search("north|wards", repr(values))
    config = {"a": {"b": {"c": 1}, "d": None}, "e": [1, 2], "f g": True}
    assert flat_values(config) == {"a.b.c": 1, "e": "[1, 2]", "f_g": True}


@given(st.dictionaries(st.text(max_size=300), st.floats(), max_size=20))
def test_whatever_nodes_call_their_metrics_every_tracker_takes_the_names(metrics):
    """MLflow's rule is the strictest: these characters, 250 of them, and no part ``..``."""
    record = RoundRecord(1, server_metrics=metrics, train_metrics=metrics)
    for name in round_numbers(record, Traffic()):
        assert re.fullmatch(r"[\w\-./]{1,250}", name, re.ASCII)
        assert not name.startswith("/")
        assert not {"", ".", ".."} & {*name.split("/")}


def test_a_metric_cannot_pass_for_one_of_ours():
    lying = RoundRecord(1, traffic=Traffic(50, 0, 1, 0), server_metrics={"total/bytes_up": 7.0})
    assert round_numbers(lying, lying.traffic)["total/bytes_up"] == 50
    assert tidy_name("../../etc") == "etc"
