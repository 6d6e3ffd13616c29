"""The studies run on the digits and say what they should."""

import json

import pytest
from rich.console import Console

from simulations.studies import frontiers, honest_radii, layer_size, leaks, multi_model_rates

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


def test_frontiers_compare_bytes_at_equal_loss(tmp_path, monkeypatch):
    """A quick look at two protocols, and the interpolation by hand.

    Between (loss 1, 100 bytes) and (loss 3, 10,000 bytes) lies (2, √(100 · 10,000) = 1,000).
    """
    chosen = [p for p in frontiers.protocols() if p[1] in ("periodic b=4", "dynamic Δ=0.7")]
    monkeypatch.setattr(frontiers, "protocols", lambda: chosen)
    small = ["nodes=3", "rounds=12", "stream.drift.rounds=[8]", "dataset=graphical"]
    page = frontiers.run_all(["backend=lockstep", *small], tmp_path, QUIET)
    assert page.stat().st_size > 1000
    periodic = [(1.0, 100), (3.0, 10_000)]
    assert frontiers.equal_loss_bytes(periodic, 2.0) == pytest.approx(1000)
    assert frontiers.equal_loss_bytes(periodic, 4.0) is None


def test_a_burst_is_what_is_sent_after_a_drift_beside_quiet_times(tmp_path):
    """Rounds 100 … 149 send 8 bytes each, all others 2: four times as much."""
    lines = [
        {
            "round": r,
            "bytes_up": 4 if 100 <= r < 150 else 1,
            "bytes_down": 4 if 100 <= r < 150 else 1,
        }
        for r in range(300)
    ]
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert frontiers.burst(tmp_path, [100]) == pytest.approx(4)
    assert frontiers.burst(tmp_path, []) is None


@pytest.mark.slow
def test_a_learning_rate_is_chosen_on_validation_data(tmp_path):
    console = Console(record=True, width=100)
    overrides = ["dataset=digits", "nodes=12", "rounds=1", "strategy.budget=4"]
    multi_model_rates.run_all(overrides, tmp_path, console)
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
