"""Whole runs on the digits: files, agreement, interruption."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_patience import HANG_SECONDS
from omegaconf import OmegaConf
from rich.console import Console
from safetensors.numpy import load_file

from simulations.backends.launch import run_on_backend
from simulations.config import compose_config
from simulations.experiment.experiment import experiment_of
from simulations.run import run

ROOT = Path(__file__).resolve().parents[2]
QUIET = Console(quiet=True)


def finish(folder, *overrides):
    config = compose_config(["progress=false", *overrides])
    return run(config, folder, QUIET)


def rounds(folder):
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("seconds")
    return records


@pytest.mark.parametrize(
    ("strategy", "low", "high"),
    [
        # Two labels of ten are known to each node: a fifth right, less what it gets wrong.
        ("local", 0.15, 0.21),
        ("global", 0.90, 1.0),
        ("one_shot_average", 0.05, 0.60),
        ("ensemble", 0.10, 0.40),
        ("fedavg", 0.75, 1.0),
        ("gems", 0.93, 1.0),
    ],
)
def test_every_strategy_runs_on_the_digits_and_writes_its_files(tmp_path, strategy, low, high):
    result = finish(tmp_path, f"strategy={strategy}")
    assert low <= result["accuracy"] <= high
    assert json.loads((tmp_path / "result.json").read_text()) == result
    for key in ("strategy", "dataset", "partition", "model", "seed", "nodes", "rounds", "loss"):
        assert key in result
    assert result["strategy"] == strategy
    assert result["nodes_failed"] == 0
    history = rounds(tmp_path)
    assert [record["round"] for record in history] == list(range(result["rounds"] + 1))
    for direction in ("up", "down"):
        assert result[f"bytes_{direction}"] == sum(r[f"bytes_{direction}"] for r in history)
    assert result["messages"] == 2 * 5 * result["rounds"]
    assert history[-1]["server_metrics"]["accuracy"] == result["accuracy"]
    model = load_file(tmp_path / "model.safetensors")
    assert sum(a.size for a in model.values()) in (650, 5 * 650)
    assert OmegaConf.load(tmp_path / "config.yaml").strategy._target_.startswith("gems_flwr.")
    assert len(json.loads((tmp_path / "partition.json").read_text())["nodes"]) == 5
    assert not (tmp_path / "checkpoint.safetensors").exists()
    assert not (tmp_path / "inbox").exists()


def test_one_seed_reproduces_a_run_to_the_last_digit_and_another_does_not(tmp_path):
    overrides = ["model=mlp", "rounds=3", "strategy.fraction_train=0.6"]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        finish(tmp_path / name, *overrides, f"seed={seed}")
    assert rounds(tmp_path / "a") == rounds(tmp_path / "b")
    assert rounds(tmp_path / "a") != rounds(tmp_path / "c")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(np.array_equal(a[key], b[key]) for key in a)


def test_a_finished_run_is_skipped_unless_it_is_asked_for_afresh(tmp_path):
    finish(tmp_path, "strategy=local")
    stamp = (tmp_path / "result.json").stat().st_mtime_ns
    finish(tmp_path, "strategy=local")
    assert (tmp_path / "result.json").stat().st_mtime_ns == stamp
    finish(tmp_path, "strategy=local", "fresh=true")
    assert (tmp_path / "result.json").stat().st_mtime_ns > stamp


def test_a_folder_with_another_config_is_not_mistaken_for_this_one(tmp_path):
    first = finish(tmp_path, "rounds=2")
    second = finish(tmp_path, "rounds=3")
    assert (first["rounds"], second["rounds"]) == (2, 3)
    assert [r["round"] for r in rounds(tmp_path)] == [0, 1, 2, 3]


def test_a_run_stops_at_its_target(tmp_path):
    result = finish(tmp_path, "rounds=50", "stop.target=0.5")
    assert result["accuracy"] >= 0.5
    assert result["rounds"] < 50
    assert "reached the target 0.5" in result["details"]["stopped_because"]


def test_nodes_can_start_from_weights_of_their_own(tmp_path):
    """With almost no learning rate a node's model is what it started from."""
    overrides = ["strategy=local", "train.epochs=1", "train.lr=1e-9", "nodes=2"]
    weights = []
    for own in ("false", "true"):
        finish(tmp_path / own, *overrides, f"own_initial_weights={own}")
        model = load_file(tmp_path / own / "model.safetensors")
        weights.append([model[f"member/{node}/1.weight"] for node in (0, 1)])
    (same, also), (one, other) = weights
    assert np.allclose(same, also, atol=1e-6)
    assert not np.allclose(one, other, atol=1e-2)


def test_a_label_reaches_the_result(tmp_path):
    assert finish(tmp_path, "rounds=1", "label=mine")["details"]["label"] == "mine"


def test_variants_of_a_strategy_are_told_apart_in_reports(tmp_path):
    plain = finish(tmp_path / "plain", "strategy=local")
    assert "label" not in plain["details"]
    changed = finish(tmp_path / "changed", "strategy=gems", "strategy.space.rank=5", "train.lr=0.1")
    assert changed["details"]["label"] == "gems rank=5 train.lr=0.1"
    dirichlet = ["strategy=local", "partition=dirichlet", "partition.alpha=0.7", "train.epochs=3"]
    label = finish(tmp_path / "split", *dirichlet)["details"]["label"]
    assert label == "local train.epochs=3 partition.alpha=0.7"


def test_raw_data_is_not_given_to_any_other_strategy_than_global():
    task = experiment_of(compose_config(["strategy=fedavg"]).to_json()).task(0)
    with pytest.raises(PermissionError, match="strategy=global"):
        task.shared_examples()


def test_a_node_that_the_config_does_not_have_is_told_so():
    experiment = experiment_of(compose_config(["nodes=3"]).to_json())
    with pytest.raises(ValueError, match=r"partition-id 3 does not exist: .* nodes=3"):
        experiment.task(3)


def test_a_node_offers_its_validation_data_as_the_model_sees_it():
    inputs, labels = experiment_of(compose_config([]).to_json()).task(0).validation_data()
    assert inputs.shape[1:] == (1, 8, 8)
    assert 0 <= inputs.min() <= inputs.max() <= 1
    assert set(labels.tolist()) == {0, 1}


# --- the command ----------------------------------------------------------------------------


def command(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "simulations.run", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


@pytest.mark.deep
def test_a_multirun_that_is_started_again_skips_what_is_finished(tmp_path):
    arguments = ("-m", "strategy=local,fedavg", "seed=0,1", "rounds=2")
    first = command(*arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    folders = sorted((tmp_path / "runs").rglob("result.json"))
    assert len(folders) == 4
    stamps = [path.stat().st_mtime_ns for path in folders]
    again = command(*arguments, cwd=tmp_path)
    assert again.stderr.count("finished already") == 4
    assert [path.stat().st_mtime_ns for path in folders] == stamps


@pytest.mark.slow
def test_a_mistake_on_the_command_line_is_one_clear_message(tmp_path):
    done = command("strategy.fractoin=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no key 'fractoin' in strategy" in done.stderr
    assert "Traceback" not in done.stderr
    missing = command("dataset=mnist", f"data_dir={tmp_path}", cwd=tmp_path)
    assert missing.returncode == 2
    assert "Traceback" not in missing.stderr


# The command, but that it stands still as soon as the replies of round 4 are there.
STANDING_STILL = """
import signal
from gems_flwr.server.exchange import Exchange
from simulations.run import main
accept = Exchange.accept
def stand_still(self, *arguments, **options):
    if self.server_round == 4:
        print("in round 4", flush=True)
        while True:
            signal.pause()
    return accept(self, *arguments, **options)
Exchange.accept = stand_still
main()
"""


def stopped_in_round_four(stop, tmp_path, *arguments):
    """Start a run, stop it by a signal in round 4; return its status and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", STANDING_STILL, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background may have been told to ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert any("in round 4" in line for line in process.stdout), process.stderr.read()
    process.send_signal(stop)
    _, errors = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, errors


@pytest.mark.deep
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_killed_or_interrupted_goes_on_where_it_was(tmp_path, stop):
    arguments = ["rounds=8", "train.epochs=3", "seed=5"]
    status, errors = stopped_in_round_four(stop, tmp_path, *arguments)
    if stop == signal.SIGINT:
        assert status == 130
        assert "goes on from the last finished round" in errors
    (history,) = (tmp_path / "runs").rglob("rounds.jsonl")
    before = history.read_text()
    assert len(before.splitlines()) == 4
    resumed = command(*arguments, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    # With its seconds: what was done is not done again.
    assert history.read_text().startswith(before)
    finish(tmp_path / "unbroken", *arguments)
    assert rounds(history.parent) == rounds(tmp_path / "unbroken")
    one, other = (
        load_file(f / "model.safetensors") for f in (history.parent, tmp_path / "unbroken")
    )
    assert all(np.array_equal(one[key], other[key]) for key in one)


# --- Flower's simulation engine -------------------------------------------------------------


def deep(name, *overrides):
    return pytest.param(overrides, id=name, marks=pytest.mark.deep)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["model=mlp", "rounds=2", "strategy.fraction_train=0.6"], id="fedavg"),
        deep(
            "gems-ball",
            "strategy=gems",
            "strategy/space=ball",
            "train.epochs=3",
            "strategy.verify=true",
        ),
        deep("gems-cone", "strategy=gems", "strategy.space.rank=5", "strategy.space.clusters=2"),
        deep(
            "gems-layerwise",
            "strategy=gems_layerwise",
            "model=mlp",
            "train.epochs=3",
            "train.subclasses=3",
        ),
    ],
)
def test_both_backends_give_the_same_numbers_to_the_last_digit(tmp_path, overrides):
    for backend in ("inprocess", "ray"):
        finish(tmp_path / backend, *overrides, f"backend={backend}")
    ray, inprocess = rounds(tmp_path / "ray"), rounds(tmp_path / "inprocess")
    # Ray's grid does not know the nodes' names: they are asked, once, for some bytes.
    for record in (ray[1], inprocess[1]):
        for key in ("bytes_up", "bytes_down", "messages_up", "messages_down"):
            record.pop(key)
    assert ray == inprocess
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("ray", "inprocess"))
    assert all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.deep
def test_an_error_in_the_server_on_ray_reaches_the_caller():
    config = compose_config(["backend=ray", "nodes=2", "progress=false"])

    def fail(grid):
        raise LookupError("nothing to serve")

    with pytest.raises(LookupError, match="nothing to serve"):
        run_on_backend(config, fail)
