"""Trackers write what happened, go on where a run goes on, and never get into its way."""

import json
import random
import re
import sys
import threading

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvgM
from helpers_wandb import wandb_run
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import initial_arrays, record_equal, small_model, toy_app
from gems_flwr import Callback, FedAvg, FlowerStrategy, MLflow, TensorBoard, WandB
from gems_flwr.errors import NotInstalledError, OptionError, RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.tracking.tracker import Tracker
from gems_flwr.wire.records import to_record

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
    built = strategy(
        checkpoint_dir=folder, resume=folder is not None, callbacks=callbacks, **options
    )
    return built.start(grid, arrays or initial_arrays(), num_rounds=rounds, evaluate_fn=score)


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


def offline(tmp_path, **options):
    return WandB("tests", mode="offline", folder=tmp_path, **options)


def wandb_files(tmp_path):
    return sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns)


def rows(run, names):
    return {
        name: {step: row[name] for step, row in run["rows"].items() if name in row}
        for name in names
    }


def test_wandb_has_the_numbers_of_the_run_and_nothing_about_the_machine(tmp_path):
    folder = tmp_path / "first"
    play([offline(tmp_path, config={"ward": "east wing"})], folder)
    [file] = wandb_files(tmp_path)
    run, table = wandb_run(file), expected(folder)
    assert rows(run, table) == table
    assert (run["name"], run["exit"], run["host"]) == ("first", 0, "")
    assert run["config"]["ward"] == "east wing"
    assert run["summary"]["result/stopped_because"] == "all rounds are done"
    # Neither packages nor the command nor what was printed.
    assert not [path for path in file.parent.glob("files/*") if path.is_file()]
    assert sys.argv[0].encode() not in file.read_bytes()


def test_no_tracker_has_the_names_of_nodes_unless_told_so(mlflow, store, tmp_path):
    secret = re.compile(rb"node/[0-9]")
    play([TensorBoard(tmp_path / "board"), offline(tmp_path), mlflow()], tmp_path / "quiet")
    files = [*tmp_path.glob("board/quiet/*"), *wandb_files(tmp_path)]
    assert len(files) == 2
    assert not [path for path in files if secret.search(path.read_bytes())]
    client, [run] = mlflow_runs(store, tmp_path / "quiet")
    assert not [name for name in run.data.metrics if name.startswith("node/")]
    play([mlflow(nodes=True)], tmp_path / "open")
    client, [run] = mlflow_runs(store, tmp_path / "open")
    assert mlflow_table(client, run, ["node/3/used"]) == {
        "node/3/used": dict.fromkeys(range(1, 5), 1)
    }


# --- going on -----------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(mlflow, store, tmp_path):
    folder = tmp_path / "resumed"
    interrupted(mlflow(), folder)
    client, [run] = mlflow_runs(store, folder)
    assert run.info.status == "KILLED"
    play([mlflow()], folder)
    client, [run] = mlflow_runs(store, folder)
    assert run.info.status == "FINISHED"
    table = expected(folder)
    assert mlflow_table(client, run, table) == table
    steps = [m.step for m in client.get_metric_history(run.info.run_id, "accuracy")]
    assert sorted(steps) == list(range(ROUNDS + 1))


def test_a_resumed_run_goes_on_in_the_same_curves_of_tensorboard(tmp_path):
    folder = tmp_path / "resumed"
    interrupted(TensorBoard(tmp_path / "board"), folder)
    play([TensorBoard(tmp_path / "board")], folder)
    events = EventAccumulator(str(tmp_path / "board" / "resumed")).Reload()
    assert [event.step for event in events.Scalars("accuracy")] == list(range(ROUNDS + 1))
    table = expected(folder)
    assert tensorboard_table(tmp_path / "board" / "resumed", table) == as_float32(table)


def test_a_resumed_run_goes_on_under_the_same_id_of_wandb(tmp_path):
    folder = tmp_path / "resumed"
    interrupted(offline(tmp_path), folder)
    [first] = wandb_files(tmp_path)
    play([offline(tmp_path)], folder)
    [second] = {*wandb_files(tmp_path)} - {first}
    before, after = wandb_run(first), wandb_run(second)
    assert before["id"] == after["id"]
    assert (before["exit"], after["exit"]) == (1, 0)
    assert sorted([*before["rows"], *after["rows"]]) == list(range(ROUNDS + 1))
    table = expected(folder)
    assert rows({"rows": before["rows"] | after["rows"]}, table) == table


def test_who_begins_to_track_when_a_run_goes_on_gets_the_earlier_rounds_too(tmp_path):
    folder = tmp_path / "late"
    interrupted(Callback(), folder)
    play([TensorBoard(tmp_path / "board")], folder)
    table = expected(folder)
    assert tensorboard_table(tmp_path / "board" / "late", table) == as_float32(table)


def test_a_run_that_does_not_go_on_is_a_new_one(mlflow, store, tmp_path):
    folder = tmp_path / "twice"
    for _ in range(2):
        play([mlflow()], folder, rounds=1)
        for name in ("checkpoint.safetensors", "tracking.json"):
            (folder / name).unlink()
    _, runs = mlflow_runs(store, folder)
    assert len(runs) == 2


# --- never in the way ---------------------------------------------------------------------------


class Broken(Tracker):
    """Fails whatever it is asked."""

    def __init__(self, error=None, fails=lambda what: True):
        super().__init__(name=None, config=None, nodes=True, artifacts=True, wait_seconds=30)
        self.error = error or OSError("No space left on device")
        self.fails, self.done = fails, []

    def _do(self, *what):
        if self.fails(what):
            raise self.error
        self.done.append(what)

    def open_run(self, opening):
        self._do("open")
        return -1

    def log_round(self, number, numbers):
        self._do("round", number)

    def log_end(self, values):
        self._do("end")

    def log_file(self, path):
        self._do("file")

    def close_run(self, status):
        self._do("close", status)


def told(result):
    records = [{**record.to_json(), "seconds": 0} for record in result.history]
    return json.dumps(records), result.stopped_because, result.traffic


@pytest.mark.parametrize("error", [OSError("full"), SystemExit("no"), ValueError("[bold] 'x'")])
def test_a_tracker_that_fails_in_everything_changes_nothing_and_is_said_once(error, caplog):
    alone = play([])
    caplog.clear()
    with Broken(error) as broken:
        watched = play([broken])
        broken.log_files(["model.safetensors"])
    assert record_equal(alone.arrays, watched.arrays)
    assert told(alone) == told(watched)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == 1
    assert "Broken does not follow the run, which goes on" in said[0]
    assert str(error) in said[0]


def test_what_failed_is_tried_again_so_that_a_short_absence_leaves_no_gap():
    away = iter([False, True, True])
    tracker = Broken(fails=lambda what: what[0] == "round" and next(away, False))
    play([tracker])
    numbers = [what[1] for what in tracker.done if what[0] == "round"]
    assert numbers == list(range(ROUNDS + 1))
    assert tracker.done[-1] == ("close", "finished")


def test_one_thing_that_a_tracker_never_takes_does_not_keep_the_others():
    tracker = Broken(fails=lambda what: what == ("round", 1))
    play([tracker], rounds=6)
    numbers = [what[1] for what in tracker.done if what[0] == "round"]
    assert numbers == [0, 2, 3, 4, 5, 6]


def test_a_run_does_not_wait_for_a_tracker_that_hangs(caplog):
    """The tracker answers only when the run is over, which therefore cannot have waited for it."""
    over = threading.Event()
    tracker = Broken(fails=lambda what: not over.wait(60))
    tracker.wait_seconds = 0
    assert play([tracker]).history[-1].round == ROUNDS
    assert "it did not take everything within 0 s" in caplog.text
    over.set()


def test_a_wrong_address_is_said_once_and_the_run_is_the_same(tmp_path, caplog):
    """A file where a folder should be: neither can make its own."""
    (tmp_path / "file").write_text("")
    bad = [
        MLflow(uri=f"sqlite:///{tmp_path}/file/mlflow.db"),
        TensorBoard(tmp_path / "file" / "board"),
    ]
    watched = play(bad, rounds=1)
    assert told(watched) == told(play([], rounds=1))
    for name in ("MLflow", "TensorBoard"):
        lines = [r for r in caplog.records if f"{name} does not follow" in r.getMessage()]
        assert len(lines) == 1


def test_a_run_that_fails_is_a_failed_run_in_the_tracker():
    def refuse(message, context):
        raise ValueError("no")

    tracker = Broken(fails=lambda what: False)
    grid = InProcessGrid(toy_app(dict.fromkeys(range(4), refuse)), 4)
    with pytest.raises(RoundFailedError):
        FedAvg(callbacks=[tracker]).start(grid, initial_arrays(), num_rounds=2)
    assert tracker.done[-1] == ("close", "failed")


def test_trackers_draw_no_random_number_of_the_run(mlflow, tmp_path):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    play([mlflow(), TensorBoard(tmp_path / "board"), offline(tmp_path)], tmp_path / "run")
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after


def test_a_strategy_of_flowers_is_tracked_as_ours_are(tmp_path):
    def momentum(**options):
        return FlowerStrategy(inner=FedAvgM(server_momentum=0.5, fraction_evaluate=0.0), **options)

    # Flower's own turns a counter into a float, which nodes do not get back.
    floats = to_record({k: v for k, v in small_model().items() if v.dtype.kind == "f"})
    board = TensorBoard(tmp_path / "board")
    play([board], tmp_path / "flower", strategy=momentum, arrays=floats)
    table = expected(tmp_path / "flower")
    assert tensorboard_table(tmp_path / "board" / "flower", table) == as_float32(table)


# --- files --------------------------------------------------------------------------------------


def test_files_that_name_nodes_stay_here_unless_nodes_may_be_named(mlflow, store, tmp_path):
    names = ["config.yaml", "model.safetensors", "result.json", "rounds.jsonl"]
    for nodes, wanted in ((False, names[:2]), (True, names)):
        folder = tmp_path / f"files-{nodes}"
        with mlflow(artifacts=True, nodes=nodes) as tracker:
            play([tracker], folder, rounds=1)
            for name in set(names) - {"rounds.jsonl"}:
                (folder / name).write_text("{}")
            tracker.log_files([folder / name for name in names])
        client, [run] = mlflow_runs(store, folder)
        files = client.list_artifacts(run.info.run_id)
        assert sorted(file.path for file in files) == wanted


# --- what is missing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tracker", "module", "extra"),
    [
        (MLflow, "mlflow.tracking", "mlflow"),
        (TensorBoard, "torch.utils.tensorboard", "tensorboard"),
        (WandB, "wandb", "wandb"),
    ],
)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    monkeypatch, tracker, module, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotInstalledError, match=rf"pip install 'gems-flwr\[{extra}\]'"):
        tracker()


def test_who_has_no_account_is_told_before_the_run(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(OptionError, match="wandb login"):
        WandB()
