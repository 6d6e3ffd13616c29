"""Networks of several kinds, layer by layer, as whole runs."""

import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file

from gems_flwr.networks.surgery import freeze_lowest
from gems_flwr.wire.keys import FROZEN_LAYERS, NEURON_REQUEST, SERVER_ROUND
from simulations.config import compose_config
from simulations.experiment.experiment import experiment_of
from simulations.run import run


def finish(folder, *overrides):
    config = compose_config(["strategy=gems_layerwise", "progress=false", *overrides])
    return run(config, folder, Console(quiet=True))


def test_a_merged_network_beats_what_its_nodes_can_know(tmp_path):
    """Two labels of ten on each node: no node alone is right for more than a fifth."""
    result = finish(tmp_path, "model=mlp", "train.epochs=10", "strategy.merge=concat")
    assert result["rounds"] == 2
    assert result["details"]["hidden"] == [250]
    assert result["accuracy"] > 0.9
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["1.weight"].shape == (250, 64)
    assert json.loads((tmp_path / "result.json").read_text())["details"]["hidden"] == [250]


def test_filters_of_convolutions_are_neurons_too(tmp_path):
    options = [
        "model=cnn",
        "train.epochs=2",
        "strategy.neurons.directions=50",
        "strategy.neurons.max_rows=2000",
    ]
    result = finish(tmp_path, *options, "strategy.max_hidden=[40,70,128]", "strategy.clusters=200")
    assert result["rounds"] == 4
    assert result["details"]["hidden"] == [40, 70, 128]
    assert [layer["layer"] for layer in result["details"]["layers"]] == ["0", "2", "7"]
    assert result["accuracy"] > 0.7


def test_deep_networks_take_a_round_per_layer(tmp_path):
    options = ["model=mlp", "model.hidden=[20,30,10]", "train.epochs=5", "strategy.merge=verified"]
    result = finish(tmp_path, *options)
    assert result["rounds"] == 4
    assert len(result["details"]["hidden"]) == 3
    assert result["accuracy"] > 0.5


def test_a_harder_local_task_gives_other_neurons_and_the_same_classes(tmp_path):
    """Ten clusters of two classes each would be twenty outputs; the network keeps its ten."""
    options = ["model=mlp", "train.epochs=20", "train.patience=null", "strategy.merge=concat"]
    plain = finish(tmp_path / "plain", *options)
    split = finish(tmp_path / "split", *options, "train.subclasses=10")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "split"))
    assert {k: v.shape for k, v in a.items()} == {k: v.shape for k, v in b.items()}
    assert not np.array_equal(a["1.weight"], b["1.weight"])
    assert min(plain["accuracy"], split["accuracy"]) > 0.9


def test_the_output_layer_alone_is_trained_for_its_own_number_of_epochs():
    config = compose_config(["strategy=gems_layerwise", "model=mlp", "train.output_epochs=3"])
    task = experiment_of(config.to_json()).task(0)
    model = task.build_model()
    freeze_lowest(model, 1)
    before = model[1].weight.clone()
    report = task.train(model, seed=0, config={FROZEN_LAYERS: 1, SERVER_ROUND: 2})
    assert report.metrics["epochs"] == 3
    assert torch.equal(model[1].weight, before)


@pytest.mark.parametrize(
    ("start", "drawn", "same"),
    [("zero", False, True), ("common", True, True), ("own", True, False)],
)
def test_the_output_layer_starts_where_it_is_told_to(start, drawn, same):
    """Steps of 1e-12 leave it there; drawn weights have the released code's deviation of 0.05."""
    options = ["strategy=gems_layerwise", "model=mlp", f"train.output_start={start}"]
    experiment = experiment_of(compose_config([*options, "train.lr=1e-12"]).to_json())
    weights = []
    for node in (0, 1):
        model = experiment.build_model()
        freeze_lowest(model, 1)
        with torch.no_grad():
            model[4].weight.zero_()
        below = model[1].weight.clone()
        config = {FROZEN_LAYERS: 1, SERVER_ROUND: 2}
        experiment.task(node).train(model, seed=node, config=config)
        assert torch.equal(model[1].weight, below)
        assert float(model[4].bias.detach().abs().max()) < 1e-6
        weights.append(model[4].weight.detach().clone())
    assert float(weights[0].std()) == pytest.approx(0.05 if drawn else 0.0, abs=0.006)
    assert torch.allclose(*weights, atol=1e-6) == same


def test_a_run_that_starts_from_zero_keeps_its_name():
    """There were runs before there was the option."""
    plain, common = (
        compose_config(["strategy=gems_layerwise", "model=mlp", *more])
        for more in ([], ["train.output_start=common"])
    )
    assert (
        plain.fingerprint()
        == dataclasses.replace(
            plain, train={k: v for k, v in plain.train.items() if k != "output_start"}
        ).fingerprint()
    )
    assert plain.fingerprint() != common.fingerprint()


def test_nodes_start_later_hidden_layers_from_weights_of_their_own():
    """The paper's nodes differ in their initial weights, in every layer; frozen ones stay."""
    options = ["strategy=gems_layerwise", "model=mlp", "model.hidden=[6,5]", "train.lr=1e-12"]
    experiment = experiment_of(compose_config([*options, "train.epochs=1"]).to_json())
    asked = {NEURON_REQUEST: "", FROZEN_LAYERS: 1, SERVER_ROUND: 2}
    trained = []
    for node in (0, 1):
        model = experiment.build_model()
        freeze_lowest(model, 1)
        experiment.task(node).train(model, seed=node, config=asked)
        trained.append(model)
    one, two = trained
    assert torch.equal(one[1].weight, two[1].weight)
    assert not torch.allclose(one[4].weight, two[4].weight, atol=1e-3)


@pytest.mark.deep
@pytest.mark.skipif(
    "GEMS_FLWR_DATA" not in os.environ, reason="GEMS_FLWR_DATA names no folder with MNIST"
)
def test_on_mnist_the_merged_network_beats_the_papers(tmp_path):
    """Guha & Smith 2019, Table 6, five nodes: .439 untuned and .886 tuned on 1000 samples."""
    options = ["dataset=mnist", "model=mlp", "train.epochs=5", "train.patience=null"]
    result = finish(tmp_path, *options, "train.subclasses=10", "strategy.neurons.epsilon=1.0")
    assert max(result["details"]["hidden"]) <= 100
    assert result["details"]["layers"][0]["uncovered"] == []
    assert result["accuracy"] >= 0.92
