"""The studies of hostile and unreliable nodes, small, on the digits."""

import json
import os
import subprocess
import sys
import time

import pytest
from helpers_patience import patience
from rich.console import Console

from gems_flwr.runtime.inprocess_grid import InProcessGrid
from simulations.config import compose_config
from simulations.experiment.execution import run_server
from simulations.experiment.experiment import experiment_of
from simulations.reproduce.studies import hostile, hostile_models, soak

QUIET = Console(quiet=True)


def test_lies_own_the_result_and_screening_takes_it_back(tmp_path, monkeypatch):
    """One of five lies; every node has every class."""
    monkeypatch.setattr(hostile, "SEEDS", (0,))
    monkeypatch.setattr(hostile, "SETTINGS", ((5, 1),))
    monkeypatch.setattr(hostile, "SPLITS", ("iid",))
    monkeypatch.setattr(hostile, "ATTACKS", ("none", "far"))
    path = hostile.run(["train.epochs=15"], tmp_path, QUIET)
    found = json.loads(path.read_text())

    def of(space, attack, defence):
        return found[f"{space}/iid/5/1/{attack}/{defence}/0"]

    honest = {space: of(space, "none", "off") for space in ("ball", "cone")}
    for space, attack in (("ball", "far"), ("cone", "far")):
        assert of(space, attack, "off") < honest[space] - 0.3
        assert of(space, attack, "robust") > honest[space] - 0.05
    assert {space: of(space, "none", "robust") for space in honest} == honest
    # What is done is not done again.
    monkeypatch.setattr(hostile, "trained_nodes", None)
    assert json.loads(hostile.run(["train.epochs=15"], tmp_path, QUIET).read_text()) == found


@pytest.mark.deep
def test_averages_and_hidden_layers_are_owned_by_a_liar_unless_they_are_robust(
    tmp_path, monkeypatch
):
    """One of five is far away; the digits, every class on every node.

    Hidden neurons so far away are refused on arrival, whether the server is robust or not.
    """
    columns = [(m, hostile_models.DEFENCES[m][i]) for m in hostile_models.METHODS for i in (0, 1)]
    monkeypatch.setattr(hostile_models, "SETTINGS", ((5, 1),))
    monkeypatch.setattr(hostile_models, "SPLITS", ("iid",))
    monkeypatch.setattr(hostile_models, "ATTACKS", ("none", "far"))
    monkeypatch.setattr(hostile_models, "COLUMNS", columns)
    shorter = [each.replace("rounds=40", "rounds=15") for each in hostile_models.METHODS["dynamic"]]
    monkeypatch.setitem(hostile_models.METHODS, "dynamic", shorter)
    path = hostile_models.run([], tmp_path, QUIET)
    found = json.loads(path.read_text())
    assert len(found) == 12
    for method, defence in columns:
        honest = found[f"{method}/iid/5/1/none/off/0"]
        attacked = found[f"{method}/iid/5/1/far/{defence}/0"]
        owned = defence == "off" and method != "layerwise"
        assert attacked < honest - 0.1 if owned else attacked > honest - 0.05


def test_one_reply_in_ten_fails_and_the_run_goes_on(tmp_path):
    options = ["rounds=12", "nodes=5", "backend=inprocess", "model=logistic"]
    config = compose_config([*soak.SETTING, *options])
    readings = soak.Readings()
    grid = InProcessGrid(soak.unreliable_app(config), config.nodes)
    result = run_server(experiment_of(config.to_json()), grid, tmp_path, [readings])
    failures = result["details"]["failures"]
    assert 0 < len(failures) < result["messages"] / 2 / 4
    assert {"before", "after"} <= {f["reason"].split("failed ")[1].split()[0] for f in failures}
    assert [row["round"] for row in readings.rows] == list(range(1, 13))
    growth = readings.growth()
    assert 0 < growth["server_early_megabytes"] < 2 * growth["server_late_megabytes"]


def test_the_memory_of_processes_is_read_off_the_kernel():
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(50_000_000); input()"], stdin=-1)
    try:
        assert child.pid in soak.descendants(os.getpid())
        assert not soak.is_actor(child.pid)
        with patience("reading the memory of a process that is about to take some"):
            while soak.private_megabytes(child.pid) <= 50:
                time.sleep(0.01)
        assert soak.private_megabytes(child.pid) == pytest.approx(55, abs=6)
    finally:
        child.kill()
        child.wait()
    assert soak.private_megabytes(child.pid) == 0.0
