"""Runs with several models on the digits, the slides' setting, and what their configs refuse."""

import json

import numpy as np
import pytest
from rich.console import Console

from gems_flwr import TaskSet
from gems_flwr.core.records import to_numpy
from gems_flwr.strategies.members import split_models
from simulations.config import ConfigError, compose_config
from simulations.experiment.experiment import experiment_of
from simulations.experiment.multi_model import MultiModelExperiment
from simulations.run import run

SMALL = ["strategy=multi_model", "partition=iid", "nodes=6", "rounds=2", "progress=false"]
OWN_RULE = "{_target_: helpers_multi_model.DataSampling}"


def finish(folder, *overrides):
    return run(compose_config([*SMALL, *overrides]), folder, Console(quiet=True))


@pytest.mark.parametrize("sampling", ["lvr", "stale", "scaffold", OWN_RULE])
def test_a_run_reports_every_model_and_goes_on_only_with_nodes_that_keep_nothing(
    sampling, tmp_path
):
    overrides = [f"strategy.sampling={sampling}", "multi_model.lacking=0.2", "label=mine"]
    result = finish(tmp_path, *overrides)
    details = result["details"]
    assert details["label"] == "mine"
    assert details["models"] == ["task-1", "task-2", "task-3"]
    assert result["accuracy"] == pytest.approx(np.mean(list(details["accuracies"].values())))
    assert result["nodes_failed"] == 0
    last = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[-1])
    for model in details["models"]:
        assert last["train_metrics"][f"step_size/{model}"] >= 0
        assert 0 <= last["server_metrics"][f"accuracy/{model}"] <= 1
    # One of six nodes lacks one model.
    held = [len(models) for models in details["examples"].values()]
    assert sorted(held) == [2, 3, 3, 3, 3, 3]
    assert json.loads((tmp_path / "partition.json").read_text())["classes"] == 30
    experiment = experiment_of(compose_config([*SMALL, *overrides]).to_json())
    assert experiment.keeps_models_on_nodes == (sampling in ("stale", "scaffold"))


def test_full_participation_learns_every_model_packed_as_well(tmp_path):
    words = ["strategy.sampling=full", "rounds=8", "train.epochs=2"]
    plain, packed = (
        finish(tmp_path / form, *words, f"strategy.compress={form}") for form in ("float32", "int8")
    )
    assert min(plain["details"]["accuracies"].values()) > 0.8
    assert min(packed["details"]["accuracies"].values()) > 0.8
    assert packed["bytes_up"] < 0.4 * plain["bytes_up"]


def test_tasks_may_differ_in_data_model_and_share(tmp_path):
    tasks = "[{name: lin, share: 0.5}, {name: net, model: mlp}]"
    config = compose_config([*SMALL, f"multi_model.tasks={tasks}", "strategy.sampling=full"])
    experiment = experiment_of(config.to_json())
    sizes = [
        sum(len(s.train) + len(s.validation) for s in t.shares) for t in experiment.tasks.values()
    ]
    assert sizes[0] == sizes[1] // 2
    models = split_models(to_numpy(experiment.initial_arrays()))
    assert [sum(a.size for a in models[m].values()) for m in ("lin", "net")] == [650, 3760]
    assert isinstance(experiment.task(0), TaskSet)
    result = run(config, tmp_path, Console(quiet=True))
    assert result["details"]["accuracies"].keys() == {"lin", "net"}


def test_tasks_on_the_same_data_differ_in_division_and_initial_weights():
    experiment = experiment_of(compose_config(SMALL).to_json())
    first, second, _ = experiment.tasks.values()
    assert first.shares[0].train.labels.tolist() != second.shares[0].train.labels.tolist()
    one, other = (t.initial_arrays()["1.weight"].numpy() for t in (first, second))
    assert not np.array_equal(one, other)


def test_the_slides_experiment_has_their_nodes_budget_and_capacities():
    config = compose_config(["experiment=multi_model_slides"])
    assert (config.nodes, config.strategy["budget"]) == (120, 12)
    experiment = MultiModelExperiment(config)
    assert np.bincount(experiment.capacities).tolist() == [0, 30, 60, 30]
    assert np.bincount(experiment.holds.sum(axis=1)).tolist() == [0, 0, 12, 108]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["multi_model.tasks=[{dataset: faces}]"], "dataset is 'faces'; there are cifar10"),
        (["strategy=fedavg", "multi_model.tasks=[{}]"], "are for strategy=multi_model"),
        (["stream.batches_per_round=1"], "has no streams"),
        (["nodes=1", "multi_model.lacking=1"], "no node has data for"),
        (["strategy.sampling=best"], "strategy=multi_model: sampling must be one of"),
        (["strategy.sampling={floor: 1}"], "strategy=multi_model: sampling must be one of"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(overrides, words):
    def prepare():
        experiment = experiment_of(compose_config([*SMALL, *overrides, "label=any"]).to_json())
        return experiment.shares, experiment.strategy(None, [])

    with pytest.raises(ConfigError, match=words):
        prepare()


def test_a_node_with_data_of_its_own_does_not_take_part(tmp_path):
    text = compose_config(SMALL).to_json()
    words = "several models take their data .* start the node with partition-id"
    with pytest.raises(ConfigError, match=words):
        experiment_of(text, str(tmp_path))
