"""Whole runs on the digits: every strategy, files, agreement of backends, interruption."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_patience import HANG_SECONDS
from omegaconf import OmegaConf
from rich.console import Console
from safetensors.numpy import load_file

from gems_flwr.core.records import SERVER_ROUND
from gems_flwr.networks import freeze_lowest
from gems_flwr.node.mod import FROZEN_LAYERS
from simulations.config import compose_config
from simulations.experiment.experiment import experiment_of
from simulations.run import run

ROOT = Path(__file__).resolve().parents[2]
QUIET = Console(quiet=True)


def finish(folder, *overrides):
    return run(compose_config(["progress=false", *overrides]), folder, QUIET)


def rounds(folder):
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("seconds")
    return records


def same_model(one, other):
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("strategy", "low", "high"),
    [
        # Two labels of ten are known to each node: a fifth right, less what it gets wrong.
        *(("local", 0.15, 0.21), ("global", 0.90, 1.0), ("one_shot_average", 0.05, 0.60)),
        *(("ensemble", 0.10, 0.40), ("fedavg", 0.75, 1.0), ("gems", 0.93, 1.0)),
    ],
)
def test_every_strategy_runs_on_the_digits_and_writes_its_files(tmp_path, strategy, low, high):
    result = finish(tmp_path, f"strategy={strategy}", "label=mine")
    assert low <= result["accuracy"] <= high
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (result["strategy"], result["details"]["label"]) == (strategy, "mine")
    assert (result["nodes_failed"], result["messages"]) == (0, 2 * 5 * result["rounds"])
    history = rounds(tmp_path)
    assert [record["round"] for record in history] == list(range(result["rounds"] + 1))
    for key in ("bytes_up", "bytes_down"):
        assert result[key] == sum(record[key] for record in history)
    assert history[-1]["server_metrics"]["accuracy"] == result["accuracy"]
    model = load_file(tmp_path / "model.safetensors")
    assert sum(a.size for a in model.values()) in (650, 5 * 650)
    assert OmegaConf.load(tmp_path / "config.yaml").strategy._target_.startswith("gems_flwr.")
    assert len(json.loads((tmp_path / "partition.json").read_text())["nodes"]) == 5
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & {"checkpoint.safetensors", "inbox"}


@pytest.mark.parametrize(
    "strategy",
    [
        ["gems", "strategy/space=ellipsoid"],
        ["gems_layerwise"],
        ["fedadam", "rounds=2"],
        ["serial", "rounds=2"],
        ["dynamic", "rounds=2"],
        ["merge", "strategy.method=regmean"],
        ["private_gems", "strategy.steps=2"],
    ],
    ids=" ".join,
)
def test_on_a_lift_every_strategy_sends_the_output_layer_alone(tmp_path, strategy):
    name, *options = strategy
    options += ["model=random_filters", "model.filters=8", "train.epochs=2"]
    result = finish(tmp_path, f"strategy={name}", *options)
    assert result["nodes_failed"] == 0
    arrays = load_file(tmp_path / "model.safetensors")
    # 8 filters in 4 x 4 windows.
    assert {array.shape for array in arrays.values()} == {(10, 128), (10,)}
    assert all(np.isfinite(array).all() for array in arrays.values())


@pytest.mark.parametrize("method", ["regmean", "fisher"])
def test_every_way_of_merging_takes_convolutions(tmp_path, method):
    options = ["strategy=merge", f"strategy.method={method}", "model=cnn", "nodes=2"]
    result = finish(tmp_path, *options, "train.epochs=1")
    assert result["details"]["label"] == method
    merged = load_file(tmp_path / "model.safetensors")
    assert sorted(array.ndim for array in merged.values()) == [1] * 4 + [2, 2, 4, 4]
    assert all(np.isfinite(array).all() for array in merged.values())


def test_a_run_is_refined_verified_and_says_so(tmp_path):
    one = finish(tmp_path / "one", "strategy=gems")
    refined = ["strategy=gems", "strategy.refine=3", "strategy.verify=true"]
    result = finish(tmp_path / "four", *refined)
    losses = [each["loss"] for each in result["details"]["refinement"]]
    assert result["rounds"] == 4
    assert losses == sorted(losses, reverse=True)
    assert len(result["details"]["node_scores"]) == 5
    assert result["loss"] < one["loss"]


@pytest.mark.parametrize("strategy", ["local", "one_shot_average"])
def test_public_data_helps_those_who_know_two_labels_of_ten(tmp_path, strategy):
    options = [f"strategy={strategy}", "model=mlp", "strategy.tune_rate=0.01", "train.epochs=4"]
    plain = finish(tmp_path / "plain", *options)
    tuned = finish(tmp_path / "tuned", *options, "strategy.tune=200")
    assert tuned["accuracy"] > plain["accuracy"] + 0.1
    assert tuned["bytes_up"] == plain["bytes_up"]


# --- the card of a run ---------------------------------------------------------------------------


def test_the_card_has_the_runs_own_figures_and_no_path(tmp_path):
    command = "gems-flwr run strategy=gems"
    result = run(compose_config(["strategy=gems", "nodes=3"]), tmp_path, QUIET, command=command)
    text = (tmp_path / "model_card.md").read_text()
    assert f"`accuracy` {result['accuracy']:.4g}" in text
    assert f"{result['bytes_up']:,} bytes up" in text
    assert command in text
    nodes = json.loads((tmp_path / "partition.json").read_text())["nodes"]
    assert f"{sum(sum(node['train']) for node in nodes):,} training examples" in text
    assert str(tmp_path) not in text


def test_noise_from_a_known_seed_is_not_sold_as_privacy(tmp_path):
    finish(tmp_path, "strategy=private_gems", "nodes=3", "rounds=1")
    text = (tmp_path / "model_card.md").read_text()
    assert "Differential privacy of the sum: epsilon 1" in text
    assert "The noise came from the run's seed" in text


# --- networks, layer by layer -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "rounds_needed"),
    [
        (["model=mlp", "train.epochs=10"], 2),
        (["model=mlp", "model.hidden=[40,30]", "train.epochs=5"], 3),
        (["model=cnn", "train.epochs=2", "strategy.neurons.max_rows=500", "nodes=2"], 4),
    ],
    ids=["mlp", "deep", "cnn"],
)
def test_a_merged_network_beats_what_its_nodes_can_know(tmp_path, model, rounds_needed):
    """Two labels of ten on each of five nodes: none alone is right for more than a fifth."""
    options = ["strategy.neurons.directions=50", "strategy.clusters=50"]
    result = finish(tmp_path, "strategy=gems_layerwise", *model, *options)
    assert result["rounds"] == rounds_needed
    assert len(result["details"]["hidden"]) == rounds_needed - 1
    assert result["accuracy"] > 0.6
    saved = load_file(tmp_path / "model.safetensors")
    assert len(next(iter(saved.values()))) == result["details"]["hidden"][0]


def layerwise(*options):
    config = compose_config(["strategy=gems_layerwise", "model=mlp", *options])
    return experiment_of(config.to_json())


def test_the_output_layer_alone_is_trained_for_its_own_number_of_epochs():
    experiment = layerwise("train.output_epochs=3")
    model = experiment.build_model()
    freeze_lowest(model, 1)
    before = model[1].weight.clone()
    report = experiment.task(0).train(model, seed=0, config={FROZEN_LAYERS: 1, SERVER_ROUND: 2})
    assert report.metrics["epochs"] == 3
    assert torch.equal(model[1].weight, before)


def test_nodes_start_from_weights_of_their_own_in_every_layer_but_frozen_ones():
    """With almost no learning rate a node's model is what it started from."""
    experiment = layerwise("model.hidden=[6,5]", "train.lr=1e-12", "train.epochs=1")
    trained = []
    for node in (0, 1):
        model = experiment.build_model()
        freeze_lowest(model, 1)
        config = {FROZEN_LAYERS: 1, SERVER_ROUND: 2}
        experiment.task(node).train(model, seed=node, config=config)
        trained.append(model)
    one, two = trained
    assert torch.equal(one[1].weight, two[1].weight)
    assert not torch.allclose(one[4].weight, two[4].weight, atol=1e-3)


# --- folders and seeds ----------------------------------------------------------------------------


def test_one_seed_reproduces_a_run_to_the_last_digit_and_another_does_not(tmp_path):
    overrides = ["model=mlp", "rounds=3", "strategy.fraction_train=0.6"]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        finish(tmp_path / name, *overrides, f"seed={seed}")
    assert rounds(tmp_path / "a") == rounds(tmp_path / "b")
    assert rounds(tmp_path / "a") != rounds(tmp_path / "c")
    assert same_model(tmp_path / "a", tmp_path / "b")


def test_a_finished_run_is_skipped_unless_it_is_asked_for_afresh_or_is_another(tmp_path):
    first = finish(tmp_path, "rounds=2")
    stamp = (tmp_path / "result.json").stat().st_mtime_ns
    assert finish(tmp_path, "rounds=2") == first
    assert (tmp_path / "result.json").stat().st_mtime_ns == stamp
    finish(tmp_path, "rounds=2", "fresh=true")
    assert (tmp_path / "result.json").stat().st_mtime_ns > stamp
    assert finish(tmp_path, "rounds=3")["rounds"] == 3
    assert [r["round"] for r in rounds(tmp_path)] == [0, 1, 2, 3]


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


# The command, but that it stands still as soon as the replies of round 4 are there.
STANDING_STILL = """
import signal
from gems_flwr.core.round import Round
from simulations.run import main
ask = Round.ask
def stand_still(self, *arguments, **options):
    replies = ask(self, *arguments, **options)
    if self.number == 4:
        print("in round 4", flush=True)
        while True:
            signal.pause()
    return replies
Round.ask = stand_still
main()
"""


def stopped_in_round_four(stop, tmp_path, *arguments):
    """Start a run, stop it by a signal in round 4; return its status and what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", STANDING_STILL, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background may ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert any("in round 4" in line for line in process.stdout), process.stderr.read()
    process.send_signal(stop)
    _, errors = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, errors


@pytest.mark.deep
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_killed_or_interrupted_goes_on_where_it_was(tmp_path, stop):
    arguments = ["rounds=8", "strategy=gems", "strategy.refine=7", "seed=5"]
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
    resumed, unbroken = rounds(history.parent), rounds(tmp_path / "unbroken")
    # Replies of round 4 that were on disk are not sent again.
    assert resumed[4]["bytes_up"] < unbroken[4]["bytes_up"]
    for key in ("bytes_up", "bytes_down", "messages_up", "messages_down"):
        del resumed[4][key], unbroken[4][key]
    assert resumed == unbroken
    assert same_model(history.parent, tmp_path / "unbroken")


# --- real data --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "low", "high", "bytes_per_node"),
    [
        # Guha & Smith 2019, Table 5: global .926 ± .001, local .198 ± .010, averaged .444 ± .028.
        (["strategy=global"], 0.920, 0.935, 4e7),
        (["strategy=local", "train.epochs=10"], 0.188, 0.208, 4e4),
        (["strategy=one_shot_average", "train.epochs=10"], 0.38, 0.50, 4e4),
        # The README's table.
        (["strategy=gems"], 0.910, 1, 2.48e6),
        (["strategy=gems", "strategy.space.rank=20"], 0.907, 1, 36_000),
        (["strategy=gems", "strategy.space.rank=20", "strategy.refine=3"], 0.921, 1, 60_000),
        (["strategy=gems", "strategy.space.rank=20", "model=random_filters"], 0.982, 1, 50_000),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.deep
@pytest.mark.skipif("GEMS_FLWR_DATA" not in os.environ, reason="GEMS_FLWR_DATA is not set")
def test_mnist_gives_the_papers_and_the_readmes_results(
    tmp_path, overrides, low, high, bytes_per_node
):
    result = finish(tmp_path, "dataset=mnist", *overrides)
    assert low <= result["accuracy"] <= high
    assert result["bytes_up"] / 5 <= bytes_per_node
