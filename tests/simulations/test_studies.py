"""Our own studies run on the digits, small, and their claims hold there."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from simulations.report import read_runs
from simulations.reproduce.findings import Finding, Findings
from simulations.reproduce.runner import run_study
from simulations.reproduce.studies import frontier, hostile, leaks, lies
from simulations.reproduce.study import Scope

QUIET = Console(quiet=True)


def found_by(study, tmp_path, *overrides):
    return run_study(study, Scope(tmp_path, seeds=1, jobs=1, overrides=overrides), QUIET)


def test_full_moments_give_samples_away_and_automatic_ones_do_not(tmp_path, monkeypatch):
    """Eight digits of 64 pixels: full moments give away every one of them."""
    monkeypatch.setattr(leaks, "SIZES", (8,))
    monkeypatch.setattr(leaks, "ITERATIONS", 1000)
    found = found_by(leaks.STUDY, tmp_path, "dataset=digits")
    share = {each.method: each.mean for each in found.of(leaks.REBUILT)}
    assert share[leaks.FULL] == 1
    assert share[leaks.AUTOMATIC] == share[leaks.PRIVATE] == 0
    auc = {each.method: each.by_seed[0] for each in found.of(leaks.AUC)}
    assert auc[leaks.FULL] > 0.95
    assert auc[leaks.FIXED] is None
    assert max(auc[leaks.AUTOMATIC], auc[leaks.PRIVATE]) < 0.8
    assert len(leaks.draw(found).axes) == 2


@pytest.mark.parametrize("attack", ["far", "counts"])
@pytest.mark.parametrize("method", ["ball", "cone"])
def test_a_lie_owns_the_result_and_screening_takes_it_back(method, attack, monkeypatch):
    """One of five lies; every node has every class."""
    if (method, attack) == ("ball", "counts"):
        pytest.skip("balls have no counts")
    words = [*hostile.METHODS[method], "partition=iid", "nodes=5"]
    off, robust = hostile.DEFENCES[method].values()
    honest = hostile._score(words, off, "none", 1, 0)
    assert hostile._score(words, robust, "none", 1, 0) == honest
    if attack == "far":
        assert hostile._score(words, off, attack, 1, 0) < honest - 0.3
    assert hostile._score(words, robust, attack, 1, 0) > honest - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "dynamic", "layerwise"])
def test_averages_are_owned_by_a_liar_unless_they_are_robust(method):
    """Hidden neurons so far away are refused on arrival, whether the server is robust or not."""
    short = [each.replace("rounds=40", "rounds=15") for each in hostile.METHODS[method]]
    words = [*short, "partition=iid", "nodes=5"]
    off, robust, *_ = hostile.DEFENCES[method].values()
    honest = hostile._score(words, off, "none", 1, 0)
    attacked = hostile._score(words, off, "far", 1, 0)
    assert attacked < honest - 0.1 if method != "layerwise" else attacked > honest - 0.05
    assert hostile._score(words, robust, "far", 1, 0) > honest - 0.05


def test_the_study_of_hostile_nodes_tries_every_attack_on_every_method(monkeypatch, tmp_path):
    monkeypatch.setattr(hostile, "_score", lambda *case: 0.5)
    found = found_by(replace(hostile.STUDY, quick=()), tmp_path)
    rows = {(each.setting, each.method) for each in found.findings}
    # Counts are no attack on balls and on dynamic averaging; defences are one, or two for averages.
    cases = {"ball": (5, 2), "cone": (6, 2), "fedavg": (6, 3), "dynamic": (5, 3)}
    cases["layerwise"] = (6, 2)
    assert len(rows) == 2 * 2 * sum(attacks * columns for attacks, columns in cases.values())
    assert {setting.rpartition(", ")[2] for setting, _ in rows} == set(lies.ATTACKS)


def curve(family, name, *points):
    """Return findings of a method: kilobytes and accuracy by round."""
    *_, (sent, last) = points
    yield Finding(family, name, "accuracy", [last], [sent])
    for number, (sent, accuracy) in enumerate(points, 1):
        yield Finding(family, name, f"accuracy after round {number}", [accuracy], [sent])


def test_the_factor_is_the_cheapest_rivals_bytes_for_the_last_models_accuracy():
    """Of .90 after 100 KB: slow has it after 2000, fast .91 after 800; 800 / 100 = 8."""
    found = Findings("frontier", False, False, [0], [])
    found.findings += curve(frontier.CONES, "ours", (50, 0.8), (100, 0.9))
    found.findings += curve(frontier.CONES, "best", (50, 0.99))
    found.findings += curve(frontier.FLOWER, "slow", (1000, 0.5), (2000, 0.9), (3000, 0.95))
    # What was reached once was reached, whatever comes later.
    found.findings += curve(frontier.FLOWER, "fast", (400, 0.7), (800, 0.91), (1200, 0.85))
    frontier.add_factors(found)
    factors = {each.method: each.by_seed for each in found.of(frontier.FACTOR)}
    assert factors == {"ours": [8.0], "best": [None]}


def test_options_are_chosen_on_validation_data_with_a_seed_of_their_own(tmp_path):
    """One rate does not learn, the other does; a candidate is run once."""
    tuning = frontier.Tuning(("dataset=digits", "nodes=3"), 3, tmp_path)
    candidates = [("train.lr=1e-6",), ("train.lr=0.3",)]
    for words in (("strategy=fedavg",), frontier.METHODS[frontier.FLOWER, "SCAFFOLD"]):
        assert tuning._best(words, candidates) == ("train.lr=0.3",)
    runs = read_runs([tmp_path]).runs
    assert {run.seed for run in runs} == {frontier.TUNING_SEED}
    configs = [path.read_text() for path in tmp_path.rglob("config.yaml")]
    assert len(configs) == 4
    assert all("evaluate_on: validation" in text for text in configs)


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "SCAFFOLD", "FedAvg, filters"])
def test_every_member_of_the_family_has_its_learning_rate_tuned(tmp_path, monkeypatch, name):
    """The best is a rate of 0.1 with few epochs, and each method's own options near it."""
    tuning, seen = frontier.Tuning((), 2, tmp_path), []

    def best(words, candidates):
        seen.extend(candidates := list(candidates))
        return min(
            candidates,
            key=lambda c: (abs(float(c[0].partition("=")[2]) - 0.1), "epochs=1" not in c[2], c),
        )

    monkeypatch.setattr(tuning, "_best", best)
    options = tuning.options_for(name, frontier.METHODS[frontier.FLOWER, name])
    assert options[0] == "train.lr=0.1"
    assert len({candidate[0] for candidate in seen}) >= 3
    assert any(each.startswith("strategy.inner") for each in options) == (name == "FedAdam")


def test_methods_are_run_once_and_what_does_not_exist_is_left_out(tmp_path, monkeypatch):
    few = {
        (frontier.FLOWER, "FedAvg"): ("strategy=fedavg",),
        (frontier.CONES, "cone"): ("strategy=gems",),
        (frontier.CONES, "nowhere"): ("strategy=gems", "strategy.no_such_option=1"),
        (frontier.POOLED, "pooled"): ("strategy=global",),
    }
    monkeypatch.setattr(frontier, "METHODS", few)
    monkeypatch.setattr(frontier.Tuning, "options_for", lambda *_: ("train.lr=0.1",))
    monkeypatch.setattr(frontier, "SETTING", ("dataset=digits", "partition=labels"))
    words = ("nodes=3", "train.epochs=1", "rounds=3")
    found = found_by(frontier.STUDY, tmp_path, *words)
    curves = {each.name: [p.round for p in each.points] for each in frontier.curves_of(found)}
    assert curves == {"FedAvg": [1, 2, 3, 10**9], "cone": [1, 10**9]}
    (level,) = [each for each in found.of("accuracy") if each.setting == frontier.POOLED]
    assert level.mean > 0.9
    results = [json.loads(p.read_text()) for p in tmp_path.rglob("result.json")]
    assert sorted(each["rounds"] for each in results) == [1, 1, 3]
