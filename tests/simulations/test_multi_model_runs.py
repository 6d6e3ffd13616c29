"""Runs with several models on the digits, the slides' data skew, and what their configs allow."""

import json

import numpy as np
import pytest
from rich.console import Console

from gems_flwr.client.task import TaskSet
from gems_flwr.server.members import split_models
from gems_flwr.strategies.multi_model.sampling_rules import ResidualSampling
from simulations.config import ConfigError, RunConfig, compose_config, variant_of
from simulations.experiment.experiment import experiment_of
from simulations.experiment.multi_model_experiment import MultiModelExperiment
from simulations.options import MultiModelConfig
from simulations.partitions.skew import Skew
from simulations.run import run

SMALL = ["strategy=multi_model", "partition=iid", "nodes=6", "rounds=2", "progress=false"]


def finish(folder, *overrides):
    return run(compose_config([*SMALL, *overrides]), folder, Console(quiet=True))


@pytest.mark.parametrize(
    "sampling", ["random", "full", "lvr", "gvr", "stale", "fedvarp", "mifa", "scaffold"]
)
def test_every_method_runs_on_the_digits_and_says_what_it_did(sampling, tmp_path):
    result = finish(tmp_path, f"strategy.sampling={sampling}", "multi_model.lacking=0.2")
    assert json.loads((tmp_path / "result.json").read_text()) == result
    details = result["details"]
    assert details["label"] == sampling
    assert details["models"] == ["task-1", "task-2", "task-3"]
    assert result["accuracy"] == pytest.approx(np.mean(list(details["accuracies"].values())))
    assert result["nodes_failed"] == 0
    assert details["lost"] == []
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    for model in details["models"]:
        assert last["train_metrics"][f"step_size/{model}"] >= 0
        assert last["train_metrics"][f"variance/{model}"] >= 0
        assert 0 <= last["server_metrics"][f"accuracy/{model}"] <= 1
    # One of six nodes lacks one model.
    held = [len(models) for models in details["examples"].values()]
    assert sorted(held) == [2, 3, 3, 3, 3, 3]
    assert (details["server_memory_bytes"] > 0) == (
        sampling in ("stale", "fedvarp", "mifa", "scaffold")
    )
    division = json.loads((tmp_path / "partition.json").read_text())
    assert division["classes"] == 30


def test_a_rule_of_ones_own_is_a_class_and_its_name_in_a_config(tmp_path):
    rule = "strategy.sampling={_target_: helpers_multi_model.DataSampling}"
    result = finish(tmp_path, rule, "label=by data", "strategy.budget=3")
    assert (result["details"]["sampling"], result["details"]["label"]) == (
        "DataSampling",
        "by data",
    )
    assert result["nodes_failed"] == 0


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ("gvr", False),
        ("stale", True),
        ("scaffold", True),
        ("{_target_: helpers_multi_model.DataSampling}", False),
        (f"{{_target_: {ResidualSampling.__module__}.ResidualSampling}}", True),
    ],
)
def test_the_rule_says_whether_a_run_goes_on_only_with_the_nodes_it_began_with(sampling, kept):
    config = compose_config([*SMALL, f"strategy.sampling={sampling}", "label=any"])
    assert MultiModelExperiment(config).keeps_models_on_nodes == kept


def test_full_participation_learns_every_model(tmp_path):
    result = finish(tmp_path, "strategy.sampling=full", "rounds=8", "train.epochs=2")
    assert min(result["details"]["accuracies"].values()) > 0.8


def test_one_seed_reproduces_a_run_to_the_last_digit(tmp_path):
    one, other = (finish(tmp_path / name, "strategy.sampling=stale") for name in "ab")
    keys = ("accuracy", "loss", "bytes_up", "bytes_down")
    assert [one[k] for k in keys] == [other[k] for k in keys]
    assert one["details"]["sampled"] == other["details"]["sampled"]


def test_tasks_may_differ_in_data_model_and_share(tmp_path):
    tasks = "[{name: lin, share: 0.5}, {name: net, model: mlp}]"
    config = compose_config([*SMALL, f"multi_model.tasks={tasks}", "strategy.sampling=full"])
    experiment = experiment_of(config.to_json())
    assert isinstance(experiment, MultiModelExperiment)
    sizes = [
        sum(len(s.train) + len(s.validation) for s in t.shares) for t in experiment.tasks.values()
    ]
    assert sizes[0] == sizes[1] // 2
    models = split_models({k: v.numpy() for k, v in experiment.initial_arrays().items()})
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


# --- the slides' setting ------------------------------------------------------------------------


def test_the_slides_experiment_has_their_nodes_budget_and_capacities():
    config = compose_config(["experiment=multi_model_slides"])
    assert (config.nodes, config.strategy["budget"]) == (120, 12)
    assert [config.multi_model.name_of(i) for i in range(3)] == [f"fashion-{i}" for i in (1, 2, 3)]
    experiment = MultiModelExperiment(config)
    assert np.bincount(experiment.capacities).tolist() == [0, 30, 60, 30]
    assert np.bincount(experiment.holds.sum(axis=1)).tolist() == [0, 0, 12, 108]


@pytest.mark.parametrize("seed", range(4))
def test_a_tenth_of_the_nodes_holds_the_slides_share_of_the_data(seed):
    labels = np.random.default_rng(seed).permutation(np.arange(12_000) % 10)
    parts = Skew()(labels, nodes=120, classes=10, seed=seed)
    assert sorted(np.concatenate(parts)) == list(range(12_000))
    assert all(len(set(labels[part])) == 3 for part in parts)
    sizes = np.sort([len(part) for part in parts])[::-1]
    assert sizes[:12].sum() / 12_000 == pytest.approx(0.526, abs=0.001)
    # Ten times as much as another has.
    assert sizes[:12].mean() / sizes[12:].mean() == pytest.approx(10, rel=0.01)
    again = Skew()(labels, nodes=120, classes=10, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_skews_that_cannot_be_are_refused():
    labels = np.arange(100) % 10
    with pytest.raises(ValueError, match="cannot hold all labels: raise partition"):
        Skew()(labels, nodes=3, classes=10, seed=0)
    with pytest.raises(ValueError, match="gets no examples"):
        Skew()(np.arange(10), nodes=9, classes=10, seed=0)
    for option, value in {"label_share": 0, "rich_nodes": 1, "rich_data": 0}.items():
        with pytest.raises(ValueError, match=f"partition.{option} must be"):
            Skew(**{option: value})


# --- configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["multi_model.tasks=[{share: 2}]"], r"tasks\[0\].share must be in \(0, 1\]"),
        (["multi_model.tasks=[{data: mnist}]"], r"tasks\[0\] has \['data'\], allowed are"),
        (["multi_model.tasks=[{name: x}, {name: x}]"], "different names"),
        (["multi_model.capacities=[0.5, 0.2]"], "shares of the nodes that sum to 1"),
        (["multi_model.lacking=2"], "lacking must be between 0 and 1"),
    ],
)
def test_values_out_of_range_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        compose_config([*SMALL, *overrides])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["multi_model.tasks=[{dataset: faces}]"], "dataset is 'faces'; there are cifar10"),
        (["strategy=fedavg", "multi_model.tasks=[{}]"], "are for strategy=multi_model"),
        (["stream.batches_per_round=1"], "has no streams"),
        (["nodes=1", "multi_model.lacking=1"], "no node has data for"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_runs(overrides, words):
    with pytest.raises(ConfigError, match=words):
        _ = experiment_of(compose_config([*SMALL, *overrides]).to_json()).shares


@pytest.mark.parametrize("sampling", ["best", "3", "{floor: 1}", "{_target_: gems_flwr.FedAvg}"])
def test_what_is_no_sampling_rule_is_the_configs_fault(sampling, tmp_path):
    with pytest.raises(ConfigError, match="strategy=multi_model: sampling must be one of"):
        finish(tmp_path, f"strategy.sampling={sampling}", "label=any")


def test_a_target_without_a_signature_is_the_configs_fault_too(tmp_path):
    with pytest.raises(ConfigError, match=r"strategy.sampling._target_ says nothing of its"):
        finish(tmp_path, "strategy.sampling={_target_: builtins.dict}", "label=any")


def test_a_node_with_data_of_its_own_is_told_that_several_models_do_not_take_it(tmp_path):
    text = compose_config(SMALL).to_json()
    words = "several models take their data .* start the node with partition-id"
    with pytest.raises(ConfigError, match=words):
        experiment_of(text, str(tmp_path))
    assert isinstance(experiment_of(text), MultiModelExperiment)


def test_runs_without_tasks_keep_their_names():
    """The fingerprint of a run must not change because a section was added."""
    config = compose_config([])
    values = json.loads(config.to_json())
    del values["multi_model"]
    assert RunConfig.from_json(json.dumps(values)).fingerprint() == config.fingerprint()
    several = compose_config(["strategy=multi_model"])
    changed = compose_config(["strategy=multi_model", "multi_model.lacking=0.5"])
    assert several.fingerprint() != changed.fingerprint()
    assert variant_of(changed) == "multi_model.lacking=0.5"
    assert MultiModelConfig().tasks == []
