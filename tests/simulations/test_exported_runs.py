"""A finished run can be exported and has its card: from the command to the other program."""

import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file
from torch.export import load

from gems_flwr.__main__ import main
from gems_flwr.networks.surgery import resize_model
from simulations.config import compose_config
from simulations.experiment.experiment import experiment_of
from simulations.run import run


def finished(folder, *overrides, **options):
    config = compose_config([*overrides, "progress=false", "nodes=3"])
    result = run(config, folder, Console(quiet=True), **options)
    return experiment_of(config.to_json()), result


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=gems", "model=random_fourier", "model.outputs=60"],
        ["strategy=gems_layerwise", "model=mlp", "train.epochs=2", "partition=iid"],
    ],
    ids=["lift", "layer by layer"],
)
def test_a_runs_folder_is_all_that_export_needs(overrides, tmp_path, capsys):
    experiment, _ = finished(tmp_path, *overrides)
    assert main(["export", str(tmp_path), "--to", "torch", "-o", str(tmp_path / "x.pt2")]) == 0
    assert "random inputs" in capsys.readouterr().out
    model = resize_model(experiment.build_model(), load_file(tmp_path / "model.safetensors"))
    test = experiment.dataset.test.take(np.arange(20))
    expected = experiment.predict(model, test)
    raw = torch.from_numpy(test.features.astype(np.float32))
    got = load(tmp_path / "x.pt2").module()(raw)[1].numpy()
    assert np.abs(got - expected).max() < 1e-5


@pytest.mark.slow
def test_of_several_models_each_has_a_name_a_section_and_a_file(tmp_path, capsys):
    tasks = "multi_model.tasks=[{name: a, model: logistic}, {name: b, model: mlp}]"
    _, result = finished(tmp_path, "strategy=multi_model", tasks, "rounds=1", "partition=iid")
    text = (tmp_path / "model_card.md").read_text()
    for name in "ab":
        assert f"### `{name}`" in text
        assert f"{result['details']['accuracies'][name]:.4f}" in text
    assert main(["export", str(tmp_path), "--to", "sklearn"]) == 2
    assert "--member, one of a, b" in capsys.readouterr().err
    output = tmp_path / "b.skops"
    words = ["export", str(tmp_path), "--to", "sklearn", "--member", "b", "-o", str(output)]
    assert main(words) == 0
    assert output.exists()


def test_the_card_has_the_runs_own_figures(tmp_path):
    command = "gems-flwr run strategy=gems"
    experiment, result = finished(
        tmp_path, "strategy=gems", "strategy.verify=true", command=command
    )
    text = (tmp_path / "model_card.md").read_text()
    assert f"`accuracy` {result['accuracy']:.4g}" in text
    assert f"| bytes up | {result['bytes_up']:,};" in text
    assert command in text
    partition = json.loads((tmp_path / "partition.json").read_text())
    for node in partition["nodes"]:
        counts = " · ".join(map(str, node["train"]))
        assert f"| `{node['name']}` | {sum(node['train'])} | {counts} |" in text
    assert "one of 10 classes" in text
    assert "(1, 8, 8), raw values times 0.0625" in text
    described = json.loads((tmp_path / "model.json").read_text())
    assert described["source"]["run"] == experiment.config.run_name()
    assert str(tmp_path) not in text


def test_a_card_of_secure_sums_has_totals_alone(tmp_path):
    options = ["strategy=fedavg", "rounds=1", "secure=sum", "partition=quantity"]
    finished(tmp_path, *options)
    text = (tmp_path / "model_card.md").read_text()
    nodes = json.loads((tmp_path / "partition.json").read_text())["nodes"]
    sizes = [sum(node["train"]) for node in nodes]
    assert f"3 nodes, {sum(sizes):,} examples" in text
    assert len(set(sizes)) > 1
    assert not any(re.search(rf"\| {size} \|", text) for size in sizes)


def test_noise_from_a_known_seed_is_not_sold_as_privacy(tmp_path):
    finished(tmp_path, "strategy=private_gems", "rounds=1")
    text = (tmp_path / "model_card.md").read_text()
    assert "Differential privacy of the sum: epsilon 1" in text
    assert "The noise came from the run's seed" in text


def test_paths_of_the_machine_are_not_part_of_the_command():
    from simulations.experiment.card_facts import told_overrides

    given = ["strategy=gems", "data_dir=/home/me/data", "++fresh=true", "hydra.run.dir=/tmp/x"]
    given += ["+tracking=mlflow", "tracking.uri=https://me:secret@host", "backend.address=h:1"]
    assert told_overrides(given) == ["strategy=gems"]
