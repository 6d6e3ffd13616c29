"""Runs that predict numbers: the losses of a loop by hand, no accuracy anywhere, and refusals."""

import numpy as np
import pytest
import torch
from helpers_driving import write_tracks
from rich.console import Console

from simulations.config import ConfigError, compose_config
from simulations.experiment.experiment import Experiment
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


def test_stream_losses_are_those_of_a_loop_by_hand(data, tmp_path):
    """Every node alone: squared error of the model before each step, gradients by autograd."""
    words = ("strategy=nosync", "rounds=4", "evaluate_every=4")
    experiment = Experiment(config(data, *words))
    total, models = 0.0, []
    for node in range(3):
        model = experiment.build_model()
        for number in range(1, 5):
            batch = experiment.stream.batch(node, number)
            inputs = torch.tensor(batch.features / np.float32(255), dtype=torch.float32)
            error = model(inputs).flatten() - torch.tensor(batch.labels)
            loss = (error**2).sum() / len(batch)
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


@pytest.mark.parametrize(
    "words",
    [
        ["strategy=dynamic"],
        ["strategy=nosync"],
        ["strategy=serial"],
        ["strategy=fedavg", "strategy.fraction_evaluate=1.0"],
        ["strategy=fedavg", "stream.batches_per_round=2"],
        ["strategy=global"],
        ["strategy=one_shot_average"],
        ["strategy=fedavg", "secure=sum"],
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


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["strategy=gems"], "take fedavg"),
        (["strategy=one_shot_average", "strategy.tune=5"], "strategy.tune=0"),
        (["strategy=dynamic", "stream.drift.rounds=[2]"], "stream.drift.kind=pixels"),
        (["stop.target=0.9"], "stop.metric=rmse stop.goal=min"),
        (["stop.target=0.9", "stop.metric=balanced_accuracy"], "stop.metric=rmse"),
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
