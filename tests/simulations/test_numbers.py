"""Runs that predict numbers: the losses of a loop by hand, no accuracy anywhere, and refusals."""

import io
import json

import numpy as np
import pytest
import torch
from helpers_driving import write_tracks
from rich.console import Console

from gems_flwr import CheckpointError, Numbers, RoundRecord
from gems_flwr.wire.keys import CORRECT_SHARE_SUM, LOSS_SUM
from simulations.config import ConfigError, compose_config
from simulations.data.examples import Examples
from simulations.experiment.experiment import Experiment
from simulations.experiment.progress import ProgressBar
from simulations.experiment.remembered import remember_training
from simulations.experiment.training import TrainOptions, fit, predictions
from simulations.report.runs import read_runs
from simulations.report.write_report import build_report
from simulations.run import run

QUIET = Console(quiet=True)
SMALL = ["dataset=driving", "model=pilotnet_small", "partition=iid", "nodes=3", "train.lr=0.05"]
SMALL += ["train.batch_size=5", "progress=false"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tracks(tmp_path_factory.mktemp("data"))


def config(data, *overrides):
    return compose_config([*SMALL, f"data_dir={data}", *overrides])


def result(data, folder, *overrides):
    chosen = config(data, *overrides)
    return run(chosen, folder / chosen.run_name(), QUIET)


def rounds_of(folder):
    (path,) = folder.rglob("rounds.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the same as by hand ------------------------------------------------------------------------


def test_stream_losses_are_those_of_a_loop_by_hand(data, tmp_path):
    """Every node alone: squared error of the model before each step, gradients by autograd."""
    words = ("strategy=nosync", "rounds=4", "evaluate_every=4")
    experiment = Experiment(config(data, *words))
    total, models = 0.0, []
    for node in range(3):
        model = experiment.build_model()
        for number in range(1, 5):
            features, angles = experiment.stream.batch(node, number)
            inputs = torch.tensor(features / np.float32(255), dtype=torch.float32)
            error = model(inputs).flatten() - torch.tensor(angles)
            loss = (error**2).sum() / len(angles)
            total += loss.item()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.05 * weight.grad
        models.append(model)
    done = result(data, tmp_path, *words)
    assert done["details"]["cumulative_loss"] == pytest.approx(total, rel=1e-5)
    test = experiment.dataset.test
    with torch.inference_mode():
        inputs = torch.tensor(test.features, dtype=torch.float32) / 255
        errors = [model(inputs).flatten().numpy() - test.labels for model in models]
    assert done["loss"] == pytest.approx(np.mean([np.mean(e**2) for e in errors]), rel=1e-4)
    assert done["rmse"] == pytest.approx(np.mean([np.mean(e**2) ** 0.5 for e in errors]), rel=1e-4)


@pytest.mark.parametrize("options", [[], ["train.optimizer=adam", "train.lr=0.002"]])
def test_lockstep_is_the_same_run_as_with_messages(options, data, tmp_path):
    common = ["strategy=dynamic", "strategy.delta=0.003", "rounds=12", "evaluate_every=12"]
    slow = result(data, tmp_path, *common, *options)
    quick = result(data, tmp_path, *common, *options, "backend=lockstep")
    for key in ("cumulative_loss", "models_up", "models_down", "queries", "violations"):
        assert quick["details"][key] == pytest.approx(slow["details"][key], rel=1e-4), key
    assert quick["details"]["synchronisations"] == slow["details"]["synchronisations"]
    assert slow["details"]["synchronisations"]
    assert quick["bytes_up"] == slow["bytes_up"]
    assert quick["rmse"] == pytest.approx(slow["rmse"], rel=1e-3)


def test_training_is_gradient_descent_on_the_squared_error():
    """One step on all examples: w - lr · mean of 2 (w x - y) x."""
    inputs = np.array([[1.0], [2.0], [3.0]], np.float32)
    examples = Examples(inputs, np.array([2.0, 4.0, 6.0]))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    options = TrainOptions(optimizer="sgd", lr=0.01, batch_size=3)
    metrics = fit(model, examples, scale=1.0, options=options, seed=0, target=Numbers())
    assert model.weight.item() == pytest.approx(0.01 * 2 * (2 + 8 + 18) / 3)
    assert metrics == {"train_loss": pytest.approx((4 + 16 + 36) / 3), "epochs": 1.0}
    found = predictions(model, examples, scale=1.0, target=Numbers())
    assert found == pytest.approx(model.weight.item() * inputs[:, 0])


def test_patience_watches_the_loss_of_numbers():
    """At the optimum the loss, 0, cannot fall: after epoch 1 three more, and that is it."""
    examples = Examples(np.zeros((4, 1), np.float32), np.zeros(4))
    options = TrainOptions(optimizer="sgd", epochs=50, patience=3)
    model = torch.nn.Linear(1, 1, bias=False)
    done = fit(model, examples, scale=1.0, options=options, seed=0, target=Numbers())
    assert done["epochs"] == 4


# --- no accuracy where there is none ------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["strategy=dynamic"],
        ["strategy=periodic", "backend=lockstep"],
        ["strategy=nosync"],
        ["strategy=serial"],
        ["strategy=fedavg", "strategy.fraction_evaluate=1.0"],
        ["strategy=fedavg", "stream.batches_per_round=2"],
        ["strategy=local"],
        ["strategy=global"],
        ["strategy=one_shot_average"],
        ["strategy=periodic", "secure=sum"],
    ],
    ids=lambda words: " ".join(words),
)
def test_no_file_of_a_run_speaks_of_accuracy(words, data, tmp_path):
    done = result(data, tmp_path, *words, "rounds=2")
    assert done["rmse"] == pytest.approx(done["loss"] ** 0.5, rel=0.05)
    for name in ("result.json", "rounds.jsonl"):
        (path,) = tmp_path.rglob(name)
        assert "accuracy" not in path.read_text()
        assert "correct" not in path.read_text()
        assert "NaN" not in path.read_text()


def test_nodes_score_the_model_on_their_own_numbers(data, tmp_path):
    result(data, tmp_path, "strategy=fedavg", "strategy.fraction_evaluate=1.0", "rounds=1")
    told = rounds_of(tmp_path)[-1]["evaluate_metrics"]
    assert told["rmse"] > 0
    assert "accuracy" not in told


def test_a_nodes_report_has_losses_and_no_share_of_right_answers(data):
    experiment = Experiment(config(data, "strategy=periodic"))
    report = experiment.task(0).train(experiment.build_model(), seed=0, config={"server-round": 1})
    assert report.metrics[LOSS_SUM] > 0
    assert CORRECT_SHARE_SUM not in report.metrics


def test_a_run_may_stop_when_its_error_is_small(data, tmp_path):
    words = ["strategy=fedavg", "rounds=9", "stop.target=100", "stop.metric=rmse", "stop.goal=min"]
    done = result(data, tmp_path, *words)
    assert done["rounds"] <= 1
    assert "rmse" in done["details"]["stopped_because"]


def test_a_finished_run_is_read_and_not_made_again(data, tmp_path):
    first = json.loads(json.dumps(result(data, tmp_path, "strategy=periodic", "rounds=2")))
    (path,) = tmp_path.rglob("result.json")
    written = path.stat().st_mtime_ns
    assert result(data, tmp_path, "strategy=periodic", "rounds=2") == first
    assert path.stat().st_mtime_ns == written
    path.write_text(path.read_text().replace('"rmse": ', '"rmse": "much", "was": '))
    with pytest.raises(CheckpointError, match="its 'rmse' is no number"):
        result(data, tmp_path, "strategy=periodic", "rounds=2")


def test_training_on_numbers_is_remembered_too(data, tmp_path):
    """Three nodes, trained once and recalled once."""
    with remember_training() as memory:
        result(data, tmp_path / "one", "strategy=local")
        result(data, tmp_path / "two", "strategy=local", "label=again")
        assert (memory.trained, memory.recalled) == (3, 3)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["strategy=gems"], "take fedavg"),
        (["strategy=gems_layerwise"], "take fedavg"),
        (["strategy=private_gems"], "take fedavg"),
        (["strategy=ensemble"], "take fedavg"),
        (["strategy=merge"], "take fedavg"),
        (["strategy=public_only"], "take fedavg"),
        (["strategy=one_shot_average", "strategy.tune=5"], "strategy.tune=0"),
        (["train.subclasses=2"], "train.subclasses=1"),
        (["strategy=dynamic", "stream.drift.rounds=[2]"], "stream.drift.kind=pixels"),
        (["stop.target=0.9"], "stop.metric=rmse stop.goal=min"),
        (["stop.patience=2", "stop.metric=balanced_accuracy"], "stop.metric=rmse"),
        (["strategy=multi_model", "multi_model.tasks=[{}]"], "multi_model.tasks=[]"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else None,
)
def test_what_needs_classes_is_refused_with_what_to_take_instead(words, instead, data, tmp_path):
    with pytest.raises(ConfigError) as caught:
        result(data, tmp_path, *words)
    assert instead in str(caught.value)
    assert "dataset=driving has numbers for labels" in str(caught.value)
    assert not list(tmp_path.rglob("rounds.jsonl"))


def test_pixels_may_drift_though_numbers_cannot(data, tmp_path):
    words = ["strategy=dynamic", "rounds=4", "stream.drift.rounds=[3]", "stream.drift.kind=pixels"]
    assert result(data, tmp_path, *words)["details"]["drifts"] == [3]


# --- reports --------------------------------------------------------------------------------------


def read_report(folder, runs):
    console = Console(record=True, width=160, file=io.StringIO())
    page = build_report([runs], folder, console).read_text()
    return page, console.export_text(), (folder / "results.csv").read_text()


def test_a_report_of_numbers_has_errors_and_no_accuracy(data, tmp_path):
    for words in (["strategy=periodic"], ["strategy=dynamic"], ["strategy=serial"]):
        result(data, tmp_path / "runs", *words, "rounds=3")
    page, printed, table = read_report(tmp_path / "report", tmp_path / "runs")
    assert "rmse" in printed
    assert "accuracy" not in printed
    assert "accuracy" not in table
    assert "rmse_mean" in table
    assert '<th scope="col">rmse</th>' in page
    assert '<th scope="col">accuracy</th>' not in page
    drawn = {path.name.partition("pilotnet_small-")[2] for path in tmp_path.rglob("*.png")}
    assert {"rmse-bytes.png", "rmse-rounds.png", "frontier.png", "labels.png"} <= drawn
    # Best first, which is the smallest error.
    (summary,) = {run.setting for run in read_runs([tmp_path / "runs"]).runs}
    assert summary.dataset == "driving"
    heading, *rows = table.splitlines()
    column = heading.split(",").index("rmse_mean")
    errors = [float(row.split(",")[column]) for row in rows]
    assert errors == sorted(errors)


def test_a_report_of_both_has_both_columns(data, tmp_path):
    result(data, tmp_path / "runs", "strategy=fedavg", "rounds=1")
    digits = compose_config(["dataset=digits", "partition=iid", "rounds=1", "progress=false"])
    run(digits, tmp_path / "runs" / digits.run_name(), QUIET)
    page, printed, table = read_report(tmp_path / "report", tmp_path / "runs")
    for word in ("accuracy", "rmse"):
        assert word in printed
        assert f"{word}_mean" in table
        assert f'<th scope="col">{word}</th>' in page


def test_a_report_of_classes_has_no_column_of_errors(tmp_path):
    digits = compose_config(["dataset=digits", "partition=iid", "rounds=1", "progress=false"])
    run(digits, tmp_path / "runs" / digits.run_name(), QUIET)
    _, printed, table = read_report(tmp_path / "report", tmp_path / "runs")
    assert "rmse" not in printed
    assert "rmse" not in table


def test_ranges_of_numbers_are_counted_node_by_node(data, tmp_path):
    result(data, tmp_path, "strategy=periodic", "rounds=1", "partition=groups")
    (division,) = {run.division for run in read_runs([tmp_path]).runs}
    assert len(division.edges) == 10
    experiment = Experiment(config(data, "strategy=periodic", "partition=groups"))
    for counts, share in zip(division.train, experiment.shares, strict=True):
        assert sum(counts) == len(share.train)
    low = np.array(division.edges[1])
    first = [int((share.train.labels < low - 1e-3).sum()) for share in experiment.shares]
    assert [counts[0] for counts in division.train] == pytest.approx(first, abs=1)


def test_the_progress_bar_shows_the_error():
    bar = ProgressBar("run", QUIET)
    bar.on_round_end(RoundRecord(1, server_metrics={"loss": 0.04, "rmse": 0.2}))
    assert "rmse 0.200" in bar._progress.tasks[0].fields["status"]
    bar.on_round_end(RoundRecord(2, server_metrics={"loss": 0.04, "accuracy": 0.9}))
    assert "accuracy 0.900" in bar._progress.tasks[0].fields["status"]
    assert "rmse" not in bar._progress.tasks[0].fields["status"]
