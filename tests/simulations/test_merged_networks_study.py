"""The study of merged networks: its rows are those of ordinary runs, and are run once."""

import json

import pytest
from rich.console import Console

from simulations.config import ConfigError, compose_config
from simulations.reproduce.studies import merged_networks
from simulations.run import run

QUIET = Console(quiet=True)
SMALL = ["dataset=digits", "model=cnn", "nodes=2", "train.epochs=1", "steps=100", "choose=50"]
COMPRESSED = "FedFisher, diagonal, compressed"
ROWS = ("average", "neuron matching", "FedFisher, diagonal", COMPRESSED)


@pytest.fixture
def short(monkeypatch):
    rows = {name: merged_networks.MERGED[name] for name in ROWS}
    monkeypatch.setattr(merged_networks, "MERGED", rows)
    others = {"GEMS, cones on random filters": ("model=random_filters", "strategy=gems")}
    monkeypatch.setattr(merged_networks, "OTHERS", others)


def test_rows_made_of_prepared_nodes_are_those_of_ordinary_runs(short, tmp_path):
    path = merged_networks.run(SMALL, tmp_path, QUIET, seeds=[0])
    rows = json.loads(path.read_text())["rows"]
    common = [*SMALL[:4], "partition=dirichlet", "progress=false"]
    for name in (ROWS[0], ROWS[2], COMPRESSED):
        options = [word.format(choose=50, steps=100) for word in merged_networks.MERGED[name]]
        result = run(compose_config([*common, *options]), tmp_path / name, QUIET)
        # Of a run in half precision the initial weights are rounded, too, before anybody trains.
        near = 0.05 if name == COMPRESSED else 0.0
        assert rows[name]["0"]["accuracy"] == pytest.approx(result["accuracy"], abs=near), name
        # Metrics of training are not in the prepared replies. Weights that did not move since the
        # rounded start cost nothing, those since the exact one do.
        up, off = result["bytes_up"] / 2 / 1000, 0.1 if name == COMPRESSED else 0.002
        assert rows[name]["0"]["kilobytes_up"] == pytest.approx(up, rel=off), name
    assert rows[ROWS[1]]["0"]["accuracy"] == rows[ROWS[0]]["0"]["accuracy"]
    assert rows["GEMS, cones on random filters"]["0"]["accuracy"] > rows[ROWS[0]]["0"]["accuracy"]
    # A second time nothing is run; with other options everything is.
    kept = {
        "options": SMALL,
        "rows": {name: {"0": {**row["0"], "accuracy": 2.0}} for name, row in rows.items()},
    }
    path.write_text(json.dumps(kept))
    merged_networks.run(SMALL, tmp_path, QUIET, seeds=[0])
    assert json.loads(path.read_text()) == kept


def test_a_number_of_steps_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="steps must be a whole number, got 'many'"):
        merged_networks.run(["steps=many"], tmp_path, QUIET, seeds=[0])
