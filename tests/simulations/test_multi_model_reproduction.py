"""The slides' Table I: what is read off runs, what is made of it, and what is said about it."""

import json

import numpy as np
import pytest

from simulations.reproduce.catalogue import PAPERS
from simulations.reproduce.papers import multi_model_claims, multi_model_measures
from simulations.reproduce.papers.findings import Finding, Findings, compare
from simulations.reproduce.papers.multi_model_measures import LATE_ACCURACY, SHORT, accuracy_after
from simulations.reproduce.papers.multi_model_names import (
    AS_PUBLISHED,
    LARGE_STEPS,
    UNIT_STEPS,
    WARM,
    relative,
)
from simulations.reproduce.papers.multi_model_rules import UnitSteps
from simulations.reproduce.papers.spec import Scope

NAME = "slides_multi_model"


def findings(*parts):
    return Findings(NAME, False, False, [0, 1], list(parts))


@pytest.fixture
def folder(tmp_path):
    """Three rounds of one model on two nodes, of which one has data."""
    lines = [
        {"round": 0, "train_metrics": {}, "server_metrics": {"accuracy": 0.1}},
        *(
            {
                "round": number,
                "train_metrics": {
                    "pairs_drawn": 1.0,
                    "step_size/a": size,
                    "variance/a": 2 * size,
                    "residual/a": rest,
                },
                "server_metrics": {"accuracy": number / 10},
            }
            for number, size, rest in ((1, 9.0, 9.0), (2, 1.0, 0.5), (3, 3.0, 1.5))
        ),
    ]
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)))
    nodes = [{"train": [3, 0]}, {"train": [0, 0]}]
    (tmp_path / "partition.json").write_text(json.dumps({"nodes": nodes}))
    return tmp_path


def test_noise_is_read_after_the_first_round_and_draws_over_pairs_that_there_are(folder):
    """Rounds 2 and 3 have sizes 1 and 3, sd 1, mean 2; three draws of the one pair."""
    result = {"details": {"accuracies": {"a": 0.3}}}
    assert multi_model_measures.draws_per_pair(result, folder) == 3
    assert multi_model_measures.step_noise(folder) == 1
    assert multi_model_measures.mean_variance(folder) == 4
    assert multi_model_measures.residual(folder) == 1
    assert multi_model_measures.late_accuracy(folder) == pytest.approx(0.25)


def test_accuracies_are_divided_by_full_participation_of_the_same_seed_and_setting():
    found = findings(
        Finding(AS_PUBLISHED, "full", "accuracy", [0.8, 0.5]),
        Finding(AS_PUBLISHED, "random", "accuracy", [0.4, 0.4]),
        Finding(LARGE_STEPS, "full", "accuracy", [0.9, None]),
        Finding(LARGE_STEPS, "random", "accuracy", [0.45, 0.4]),
        Finding("rate 0.1, steps of size 1", "random", "accuracy", [0.9, 0.4]),
    )
    PAPERS[NAME].derive(found)
    shares = {(f.setting, f.method): f.by_seed for f in found.of(relative("accuracy"))}
    assert shares[AS_PUBLISHED, "random"] == pytest.approx([0.5, 0.8])
    assert shares[LARGE_STEPS, "random"] == [pytest.approx(0.5), None]
    assert shares["rate 0.1, steps of size 1", "random"] == [pytest.approx(1), None]
    (line,) = [
        each for each in compare(found) if each.published and each.finding.method == "random"
    ]
    assert (line.published.mean, line.published.sd) == (0.778, 0.19)


@pytest.mark.parametrize(("gain", "word"), [(0.001, "within"), (-0.2, "within"), (0.2, "beyond")])
def test_old_updates_are_said_to_help_beyond_the_spread_only_if_they_do(gain, word):
    """GVR has 0.8 and 0.9, so a spread of 0.07; both together 0.1."""
    late = relative(LATE_ACCURACY)
    found = findings(
        Finding(AS_PUBLISHED, "gvr", late, [0.8, 0.9]),
        Finding(AS_PUBLISHED, "stale", late, [0.8 + gain, 0.9 + gain]),
    )
    said = multi_model_claims.found(found)
    assert f"{gain:+.3f}" in said
    assert f"{word} the joint spread of 0.100" in said


@pytest.mark.parametrize(
    ("warm", "unit", "lacks"),
    [(0.65, 0.9, "an even step, Σ d/p, rather"), (0.9, 0.65, "draws rather")],
)
def test_what_random_draws_lack_is_what_helps_them_most(warm, unit, lacks):
    shares = {AS_PUBLISHED: 0.8, LARGE_STEPS: 0.6, WARM: warm, UNIT_STEPS: unit}
    early = relative(accuracy_after(SHORT))
    parts = [Finding(s, "random", early, [v, v]) for s, v in shares.items()]
    assert f"what they lack is {lacks}" in multi_model_claims.found(findings(*parts))


def test_one_seed_has_no_spread():
    late = relative(LATE_ACCURACY)
    parts = [Finding(AS_PUBLISHED, rule, late, [0.8]) for rule in ("gvr", "stale")]
    assert "of one seed" in multi_model_claims.found(findings(*parts))


def test_the_picture_has_a_curve_for_every_rule_and_a_bar_for_every_change():
    parts = [
        Finding(AS_PUBLISHED, rule, accuracy_after(number), [0.5, 0.6])
        for rule in ("full", "random")
        for number in (10, 20)
    ]
    parts += [
        Finding(setting, rule, relative(accuracy_after(SHORT)), [0.5, 0.6])
        for setting in (AS_PUBLISHED, LARGE_STEPS)
        for rule in ("random", "mifa")
    ]
    curves, bars = multi_model_claims.draw(findings(*parts)).axes
    assert len(curves.containers) == 2
    assert len(bars.patches) == 4
    assert not any(axes.containers for axes in multi_model_claims.draw(findings()).axes)


def test_unit_steps_sum_to_one_where_somebody_was_drawn():
    shares = np.array([[0.5, 1.0], [0.25, 0.0], [0.25, 0.0]])
    drawn = np.array([[True, False], [True, False], [False, False]])
    found = UnitSteps().coefficients(shares, np.full((3, 2), 0.5), drawn)
    assert found.tolist() == [[pytest.approx(2 / 3), 0], [pytest.approx(1 / 3), 0], [0, 0]]


def test_all_rules_are_run_as_published_and_the_baselines_at_a_larger_rate():
    cells = PAPERS[NAME].cells(Scope())
    assert len({c.method for c in cells if c.setting == AS_PUBLISHED}) == 8
    larger = {c.method for c in cells if c.setting == LARGE_STEPS}
    assert larger == {"full", "lvr", "mifa", "scaffold", "fedvarp", "random"}
