"""Searches: judged on validation data, repeatable, and silent about test figures."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from helpers_commands import run_command
from rich.console import Console

from simulations.config import CONFIG_DIR, ConfigError, RunConfig, compose_config, variant_of
from simulations.experiment.experiment import Experiment
from simulations.experiment.search_objective import check_objective, objective
from simulations.run import run

SEARCH = ("search=gems", "nodes=3", "hydra.sweeper.n_trials=2", "progress=false")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return run_command(tmp_path, monkeypatch, capsys)


def results(folder="."):
    found = {p: json.loads(p.read_text()) for p in Path(folder).rglob("result.json")}
    return dict(sorted(found.items(), key=lambda each: str(each[0])))


@pytest.mark.slow
def test_a_search_goes_by_validation_data_and_tells_the_command_for_test_figures(command):
    status, said = command(*SEARCH)
    assert status == 0, said
    trials = results("searches/gems-digits-s0")
    assert len(trials) == 2
    best = max(trials.values(), key=lambda each: each["accuracy"])
    # Every figure that is shown is one of validation data.
    shown = re.findall(r"(\w+ accuracy) ([\d.]+)", said)
    assert {name for name, _ in shown} == {"validation accuracy"}
    assert sorted(value for _, value in shown) == sorted(
        f"{each['accuracy']:.4f}" for each in trials.values()
    )
    assert f"best on validation data: {best['accuracy']:.4f}" in said
    # What is printed runs what was found, now on test data.
    (line,) = re.findall("on test data: python -m simulations.run (.*)", said)
    status, said = command(*shlex.split(line))
    assert status == 0, said
    (tested,) = results("runs").values()
    assert "evaluated_on" not in tested["details"]
    label = best["details"]["label"].replace("evaluate_on=validation ", "")
    assert tested["details"]["label"] == label
    assert f" accuracy {tested['accuracy']:.4f}" in said
    assert "validation accuracy" not in said


@pytest.mark.slow
def test_a_search_repeats_itself(command, tmp_path):
    for folder in ("one", "other"):
        assert command(*SEARCH, f"hydra.sweep.dir={tmp_path}/{folder}")[0] == 0
    one, other = (results(tmp_path / name) for name in ("one", "other"))
    assert [p.parent.name for p in one] == [p.parent.name for p in other]
    found = [tmp_path / name / "optimization_results.yaml" for name in ("one", "other")]
    assert found[0].read_text() == found[1].read_text()


def test_validation_scores_are_those_that_the_nodes_themselves_report(tmp_path):
    """Nodes answer `verify` with accuracies on their own parts; weighted by their sizes the mean
    is what a run is scored by.
    """
    config = compose_config(
        [
            "strategy=gems",
            "strategy.verify=true",
            "nodes=4",
            "progress=false",
            "evaluate_on=validation",
        ]
    )
    result = run(config, tmp_path, Console(quiet=True))
    counts = json.loads((tmp_path / "partition.json").read_text())["nodes"]
    sizes = {node["name"]: sum(node["validation"]) for node in counts}
    scores = result["details"]["node_scores"]
    assert scores.keys() == sizes.keys()
    mean = np.average([scores[n] for n in scores], weights=[sizes[n] for n in scores])
    assert result["accuracy"] == pytest.approx(mean, abs=1e-12)
    assert result["details"]["evaluated_on"] == "validation"


def test_nothing_of_the_test_set_is_looked_at():
    config = compose_config(["evaluate_on=validation"])
    experiment = Experiment(config)
    assert len(experiment.held_out) == sum(len(s.validation) for s in experiment.shares)
    test = {each.tobytes() for each in experiment.dataset.test.features}
    assert not test & {each.tobytes() for each in experiment.held_out.features}


def test_the_option_is_a_run_of_its_own_and_leaves_other_names_alone():
    """The digest is that of commit 4b81937."""
    plain, other = compose_config([]), compose_config(["evaluate_on=validation"])
    assert plain.fingerprint() == compose_config(["evaluate_on=test"]).fingerprint() == "e73ce020"
    assert other.fingerprint() != plain.fingerprint()
    assert variant_of(other) == "evaluate_on=validation"
    assert RunConfig.from_json(other.to_json()) == other
    assert compose_config(["objective=loss"]).fingerprint() == plain.fingerprint()


def test_a_search_by_test_figures_is_refused(command):
    status, said = command(*SEARCH, "evaluate_on=test")
    assert status == 2
    assert "a search goes by validation data" in said


def test_a_search_where_nobody_knows_validation_data_is_refused(command):
    status, said = command(*SEARCH, "experiment=mnist_100", "dataset=digits")
    assert status == 2
    assert "evaluate_on=validation is not for streams" in said


@pytest.mark.parametrize(
    ("overrides", "direction", "complaint"),
    [
        ([], "minimize", "a search by accuracy needs hydra.sweeper.direction=maximize"),
        (["objective=loss"], "maximize", "a search by loss needs .*direction=minimize"),
        (
            ["objective=speed"],
            "maximize",
            "objective must be accuracy or balanced_accuracy or loss",
        ),
    ],
)
def test_a_search_for_the_worst_is_refused(overrides, direction, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_objective(compose_config(overrides), direction)


def test_what_a_search_goes_by_can_be_chosen():
    result = {"accuracy": 0.5, "loss": 1.5, "details": {"balanced_accuracy": 0.25}}
    values = {"accuracy": 0.5, "loss": 1.5, "balanced_accuracy": 0.25}
    for name, value in values.items():
        config = compose_config([f"objective={name}"])
        check_objective(config, "minimize" if name == "loss" else "maximize")
        assert objective(config, result) == value
    assert objective(compose_config([]), result) == 0.5
    assert objective(compose_config([]), {"rmse": 2.0, "details": {}}) == 2.0


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONFIG_DIR / "search").glob("*.yaml")))
def test_every_search_composes(name):
    config = compose_config([f"search={name}", "hydra.mode=RUN"])
    assert config.evaluate_on is None
    assert compose_config([f"search={name}"]).evaluate_on == "validation"
