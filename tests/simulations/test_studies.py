"""The studies run on the digits and say what they should."""

import json

import pytest
from rich.console import Console

from simulations.studies import honest_radii, layer_size, tuning

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
def test_public_data_never_harms_the_cone_and_alone_is_worse(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SEEDS", (0,))
    figure = tuning.run(["train.epochs=5"], tmp_path, QUIET)
    assert figure.stat().st_size > 10_000
    result = json.loads(figure.with_suffix(".json").read_text())
    for rate in map(str, tuning.RATES):
        for size in ("100", "200"):
            cone = result["curves"]["cone, joint objective"][rate][size][0]
            assert cone > result["curves"]["public sample alone"][rate][size][0]
            assert cone >= result["untuned"]["cone, joint objective"][0] - 0.01


@pytest.mark.slow
def test_more_neurons_are_better_and_less_than_an_ensemble_suffices(tmp_path, monkeypatch):
    settings = (layer_size.Setting("kmeans", 10), layer_size.Setting("concat"))
    monkeypatch.setattr(layer_size, "SEEDS", (0,))
    monkeypatch.setattr(layer_size, "SETTINGS", settings)
    options = ["train.epochs=15", "train.patience=null", "strategy.output.epsilon=0.5"]
    figure = layer_size.run(options, tmp_path, QUIET)
    assert figure.stat().st_size > 10_000
    rows = json.loads(figure.with_suffix(".json").read_text())
    small, large = (rows[str(setting)] for setting in settings)
    assert small["hidden"][0] <= 250 / 4
    assert large["hidden"] == rows["ensemble, majority vote"]["hidden"] == [250]
    assert small["cone"] < large["cone"]
    assert large["cone"] > rows["ensemble, softmax mean"]["ensemble"]
