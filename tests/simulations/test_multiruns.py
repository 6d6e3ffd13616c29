"""Multiruns and searches: in parallel as one by one, failures that count, trackers for each job."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_commands import run_command
from helpers_patience import HANG_SECONDS
from mlflow.tracking import MlflowClient
from rich.console import Console
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gems_flwr.errors import NotInstalledError
from simulations.config import CONFIG_DIR, ConfigError, compose_config
from simulations.experiment.experiment import Experiment
from simulations.experiment.watching import trackers_of
from simulations.multirun import check_objective, objective
from simulations.run import run

ROOT = Path(__file__).resolve().parents[2]
COMMON = ("nodes=2", "rounds=1", "train.epochs=1")
SEARCH = ("search=gems", "nodes=3", "hydra.sweeper.n_trials=2", "progress=false")
QUIET = Console(quiet=True)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return run_command(tmp_path, monkeypatch, capsys)


def call(folder, *words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "simulations.run", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=HANG_SECONDS,
    )


def contents(folder):
    """Return what a run's folder says, but for how long it took."""
    result = json.loads((folder / "result.json").read_text())
    del result["seconds"]
    result["details"].pop("intersection_seconds", None)
    model = load_file(folder / "model.safetensors")
    return result, {key: array.tobytes() for key, array in model.items()}


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.deep
def test_runs_in_parallel_are_those_made_one_after_the_other_and_a_failed_one_shows(tmp_path):
    """Two runs succeed, two lack their data: all are made, the failures are explained, status 2."""
    words = [*COMMON, "strategy=gems,fedavg", "dataset=digits,mnist", "data_dir=/nowhere"]
    words += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = call(tmp_path, "-m", *words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for strategy in ("gems", "fedavg"):
        alone = compose_config([*COMMON, f"strategy={strategy}", "data_dir=/nowhere"])
        folder = tmp_path / "alone" / strategy
        run(alone, folder, QUIET)
        assert contents(tmp_path / "runs" / alone.run_name()) == contents(folder)
        failed = f"strategy={strategy} dataset=mnist data_dir=/nowhere: mnist is not in /nowhere"
        assert done.stderr.count(failed) == 1
    # Once more: what is finished is skipped.
    again = call(tmp_path, "-m", *words)
    assert again.stderr.count("finished already") == 2


def test_two_runs_of_a_multirun_that_fail_are_both_explained(command):
    """One after the other as well, also if the config is to blame."""
    status, printed = command("-m", "seed=0,1", "partition=shards", "partition.shards_per_node=999")
    lines = [line for line in printed.splitlines() if line.strip()]
    assert (status, [line.split(" ")[0] for line in lines]) == (2, ["seed=0", "seed=1"])


def test_a_failed_run_of_a_search_is_no_score(command):
    status, printed = command("search=gems", "dataset=mnist", "data_dir=/nowhere")
    assert status == 2
    assert "dataset=mnist data_dir=/nowhere: mnist is not in /nowhere" in printed
    assert "best on" not in printed


@pytest.mark.parametrize(
    ("launcher", "package"),
    [("slurm", "hydra-submitit-launcher"), ("ray_cluster", "hydra-ray-launcher")],
)
def test_without_its_plugin_a_launcher_says_what_to_install(command, launcher, package):
    """These plugins are in no extra, and so not here."""
    status, printed = command("-m", f"hydra/launcher={launcher}", "seed=0,1")
    assert status == 2
    assert printed == f"hydra/launcher={launcher} is a plugin: pip install {package}\n"


@pytest.mark.slow
def test_without_its_plugin_a_search_says_what_to_install(tmp_path):
    # A package in its place hides the namespace of all plugins.
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "__init__.py").touch()
    done = call(tmp_path, "search=gems", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    wanted = "hydra/sweeper=optuna is a plugin: pip install 'gems-flwr[search]'\n"
    assert done.stderr == wanted


# --- searches -----------------------------------------------------------------------------------


def results(folder):
    found = {p: json.loads(p.read_text()) for p in Path(folder).rglob("result.json")}
    return dict(sorted(found.items(), key=lambda each: str(each[0])))


@pytest.mark.slow
def test_a_search_goes_by_validation_data_repeats_itself_and_prints_how_to_test(command, tmp_path):
    status, printed = command(*SEARCH)
    assert status == 0, printed
    trials = results("searches/gems-digits-s0")
    best = max(trials.values(), key=lambda each: each["accuracy"])
    # Every figure that is shown is one of validation data.
    shown = re.findall(r"(\w+ accuracy) ([\d.]+)", printed)
    expected = sorted(f"{each['accuracy']:.4f}" for each in trials.values())
    assert {name for name, _ in shown} == {"validation accuracy"}
    assert sorted(value for _, value in shown) == expected
    assert f"best on validation data: {best['accuracy']:.4f}" in printed
    assert command(*SEARCH, f"hydra.sweep.dir={tmp_path}/again")[0] == 0
    again = results(tmp_path / "again")
    assert [path.parent.name for path in again] == [path.parent.name for path in trials]
    # What is printed runs what was found, now on test data.
    (line,) = re.findall("on test data: python -m simulations.run (.*)", printed)
    status, printed = command(*shlex.split(line))
    assert status == 0, printed
    (tested,) = results("runs").values()
    assert "evaluated_on" not in tested["details"]
    assert f" accuracy {tested['accuracy']:.4f}" in printed
    assert "validation accuracy" not in printed


def test_validation_scores_are_those_that_the_nodes_themselves_report(tmp_path):
    """Nodes answer `verify` with accuracies on their own parts; a run's is the mean by size."""
    words = ["strategy=gems", "strategy.verify=true", "nodes=4", "evaluate_on=validation"]
    config = compose_config([*words, "progress=false"])
    result = run(config, tmp_path, QUIET)
    counts = json.loads((tmp_path / "partition.json").read_text())["nodes"]
    sizes = {node["name"]: sum(node["validation"]) for node in counts}
    scores = result["details"]["node_scores"]
    mean = np.average([scores[n] for n in sizes], weights=list(sizes.values()))
    assert result["accuracy"] == pytest.approx(mean, abs=1e-12)
    assert result["details"]["evaluated_on"] == "validation"
    experiment = Experiment(config)
    test = {each.tobytes() for each in experiment.dataset.test.features}
    assert not test & {each.tobytes() for each in experiment.held_out.features}


def test_a_search_by_test_figures_or_on_a_stream_is_refused(command):
    status, printed = command(*SEARCH, "evaluate_on=test")
    assert status == 2
    assert "a search goes by validation data" in printed
    status, printed = command(*SEARCH, "stream.batches_per_round=1")
    assert status == 2
    assert "evaluate_on=validation is not for streams" in printed


@pytest.mark.parametrize(
    ("overrides", "direction", "complaint"),
    [
        ([], "minimize", "a search by accuracy needs hydra.sweeper.direction=maximize"),
        (["objective=loss"], "maximize", "a search by loss needs .*direction=minimize"),
        (["objective=speed"], "maximize", "objective must be accuracy or balanced_accuracy"),
    ],
)
def test_a_search_for_the_worst_is_refused(overrides, direction, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_objective(compose_config(overrides), direction)


def test_what_a_search_goes_by_can_be_chosen():
    result = {"accuracy": 0.5, "loss": 1.5, "details": {"balanced_accuracy": 0.25}}
    for name, value in {"accuracy": 0.5, "loss": 1.5, "balanced_accuracy": 0.25}.items():
        assert objective(compose_config([f"objective={name}"]), result) == value
    assert objective(compose_config([]), result) == 0.5
    assert objective(compose_config([]), {"rmse": 2.0, "details": {}}) == 2.0


# --- trackers -----------------------------------------------------------------------------------


def test_every_tracker_is_built_from_its_config():
    names = sorted(path.stem for path in (CONFIG_DIR / "tracking").glob("*.yaml"))
    config = compose_config([f"+tracking=[{','.join(names)}]", "seed=4"])
    trackers = trackers_of(config)
    assert [type(each).__name__.lower() for each in trackers] == names
    found = {(each.name, each.config["seed"]) for each in trackers}
    assert found == {(config.run_name(), 4)}


@pytest.mark.slow
def test_a_tracked_run_is_the_run_that_it_was_and_its_folder_says_where_it_is(tmp_path):
    words = ["strategy=fedavg", "rounds=2", "nodes=3"]
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    alone = run(compose_config(words), tmp_path / "alone", QUIET)
    words += ["+tracking=mlflow", f"tracking.mlflow.uri={uri}"]
    tracked = run(compose_config(words), tmp_path / "tracked", QUIET)
    for result in (alone, tracked):
        del result["seconds"]
    assert tracked == alone
    # An address may hold a password, and the file goes to the tracker.
    assert "tracking" not in (tmp_path / "tracked" / "config.yaml").read_text()
    client = MlflowClient(uri)
    [kept] = client.search_runs([client.get_experiment_by_name("gems-flwr").experiment_id])
    assert kept.data.metrics["accuracy"] == alone["accuracy"]
    assert kept.data.params["strategy"] == "fedavg"


def test_a_missing_library_is_reported_before_any_node_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(NotInstalledError, match="tensorboard"):
        run(compose_config(["tracking=tensorboard"]), tmp_path / "run", QUIET)
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


@pytest.mark.slow
def test_a_multirun_on_the_command_line_tracks_each_job_and_shows_lines(tmp_path):
    """As a user types it, with the plus; standard error is no terminal here."""
    words = ["strategy=fedavg", "nodes=3", "rounds=2", "seed=0,1", "live=true"]
    done = call(tmp_path, "-m", *words, "+tracking=tensorboard")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr
    assert "round 2 of 2: 3/3 nodes" in done.stderr
    found = sorted(tmp_path.glob("runs/*/*/result.json"))
    assert len(found) == 2
    for path in found:
        name = path.parent.relative_to(tmp_path / "runs")
        events = EventAccumulator(str(tmp_path / "tensorboard" / name)).Reload()
        last = events.Scalars("accuracy")[-1]
        accuracy = json.loads(path.read_text())["accuracy"]
        assert (last.step, last.value) == (2, pytest.approx(accuracy, rel=1e-6))
