"""The studies run on the digits and say what they should."""

import json

import pytest
from rich.console import Console

from simulations.reproduce.studies import honest_radii, layer_size, leaks, multi_model_rates

QUIET = Console(quiet=True)


def test_only_sampled_balls_meet_and_they_do_not_keep_their_promise(tmp_path):
    """The claim of the study: what counts as good enough is not, for some node."""
    figure = honest_radii.run(["train.epochs=10"], tmp_path, QUIET)
    assert figure.stat().st_size > 10_000
    rows = json.loads(figure.with_suffix(".json").read_text())
    at = [row for row in rows if row["epsilon"] == 0.4]
    radius = {m: [r["radius"] for r in at if r["method"] == m] for m in honest_radii.METHODS}
    for sampled, worst, certified in zip(*radius.values(), strict=True):
        assert sampled > worst >= certified
    sampled = [row for row in at if row["method"] == "sampled"]
    assert {row["status"] for row in sampled} == {"feasible"}
    assert min(row["accuracy"] for row in sampled) < 0.4


@pytest.mark.slow
def test_more_neurons_are_better_and_less_than_an_ensemble_suffices(tmp_path, monkeypatch):
    settings = (layer_size.Setting("kmeans", 10), layer_size.Setting("concat"))
    monkeypatch.setattr(layer_size, "SEEDS", (0,))
    monkeypatch.setattr(layer_size, "SETTINGS", settings)
    options = ["train.epochs=15", "train.patience=null", "strategy.head.space.epsilon=0.5"]
    figure = layer_size.run(options, tmp_path, QUIET)
    assert figure.stat().st_size > 10_000
    rows = json.loads(figure.with_suffix(".json").read_text())
    small, large = (rows[str(setting)] for setting in settings)
    assert small["hidden"][0] <= 250 / 4
    assert large["hidden"] == rows["ensemble, majority vote"]["hidden"] == [250]
    assert small["cone"] < large["cone"]
    assert large["cone"] > rows["ensemble, softmax mean"]["ensemble"]


@pytest.mark.slow
def test_a_learning_rate_is_chosen_on_validation_data(tmp_path):
    console = Console(record=True, width=100)
    overrides = ["dataset=digits", "nodes=12", "rounds=1", "strategy.budget=4"]
    overrides.append("multi_model.tasks=[{name: a}, {name: b}]")
    multi_model_rates.run(overrides, tmp_path, console)
    text = console.export_text()
    assert all(f"{rate:g} " in text for rate in multi_model_rates.RATES)


def test_full_moments_give_samples_away_and_automatic_ones_do_not(tmp_path, monkeypatch):
    """Eight digits of 64 pixels: full moments give away every one of them."""
    monkeypatch.setattr(leaks, "SIZES", (8,))
    monkeypatch.setattr(leaks, "ITERATIONS", 1000)
    figure = leaks.run(["dataset=digits"], tmp_path, QUIET)
    assert figure.stat().st_size > 10_000
    rows = {row["form"]: row for row in json.loads(figure.with_suffix(".json").read_text())}
    assert rows[leaks.FULL]["rebuilt"] == 8
    assert rows[leaks.FULL]["nearest"] < 0.02
    assert rows[leaks.FULL]["auc"] > 0.95
    assert rows[leaks.FIXED]["auc"] is None
    assert rows[leaks.AUTOMATIC]["rebuilt"] == rows[leaks.PRIVATE]["rebuilt"] == 0
    assert rows[leaks.AUTOMATIC]["auc"] < 0.8
    assert rows[leaks.PRIVATE]["auc"] < 0.8
