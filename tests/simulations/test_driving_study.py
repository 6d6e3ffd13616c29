"""The experiment on driving: models of runs behind a made-up wheel, and what is made of it."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from gems_flwr.server.members import join_members
from simulations.command_line import UsageError
from simulations.config import ConfigError
from simulations.driving import closed_loop, simulator
from simulations.driving.driving_loss import Drive
from simulations.driving.wheel_models import load_model, load_models
from simulations.driving_networks import pilotnet, pilotnet_small
from simulations.reproduce.catalogue import PAPERS
from simulations.reproduce.entry import Options
from simulations.reproduce.papers import driving2018
from simulations.reproduce.papers.driven_runs import L_DD, LAPS, TIME_LOST, Roads, drive_runs
from simulations.reproduce.papers.driving2018 import BEATEN, BESIDE_SERIAL, compare_drivers
from simulations.reproduce.papers.equal_loss import BYTES
from simulations.reproduce.papers.findings import Finding, Findings, Timeline
from simulations.reproduce.papers.spec import Scope

SHAPE = (1, 64, 64)


def arrays(angle):
    """A network that says the same whatever it sees."""
    model = pilotnet_small(input_shape=SHAPE, classes=0)
    with torch.no_grad():
        model[-1].weight.zero_()
        model[-1].bias.fill_(angle)
    return {name: each.numpy() for name, each in model.state_dict().items()}


def run_folder(folder, weights):
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    target = "simulations.driving_networks.pilotnet_small"
    (folder / "config.yaml").write_text(f"model:\n  _target_: {target}\n")
    return folder


class Journey:
    """As long as the model says."""

    def __init__(self, angle):
        self.ending, self.laps, self.seconds = "left the road", angle, 100 * angle

    def drive(self):
        return Drive(self.seconds, 0, 0.0, False)


# The largest disturbance of each drive.
wind = []


@pytest.fixture
def wheel(monkeypatch):
    """Instead of the simulator; counts the drives."""
    driven = []
    wind.clear()

    def drive_track(driver, seed, *, laps, noise):
        angle = driver(closed_loop.Moment(np.zeros((64, 64), np.uint8), None, None, None))
        driven.append((round(angle, 3), seed, laps))
        wind.append(float(np.abs(noise).max()))
        return Journey(angle)

    monkeypatch.setattr(closed_loop, "drive_track", drive_track)
    monkeypatch.setattr(simulator, "require_simulator", lambda: None)
    return driven


def test_models_of_runs_are_compared_with_each_other(wheel, tmp_path):
    """80 seconds are the longest, so 20 lose (80 - 20) / 80 of the time, with a weight of 0.8."""
    runs = [(name, run_folder(tmp_path / name, arrays(a))) for name, a in (("a", 0.8), ("b", 0.2))]
    found = drive_runs(runs, Roads(tracks=2, laps=1))
    assert found["a"][L_DD] == pytest.approx(0.0, abs=1e-6)
    assert found["b"][TIME_LOST] == pytest.approx(0.75)
    assert found["b"][L_DD] == pytest.approx(0.6)
    assert found["b"][LAPS] == pytest.approx(0.4)
    # Both on the same two tracks.
    assert [seed for _, seed, _ in wheel[:2]] == [seed for _, seed, _ in wheel[2:]]


def test_of_a_run_without_an_average_three_learners_drive_and_the_mean_counts(wheel, tmp_path):
    members = join_members({str(n): arrays(a) for n, a in enumerate((0.8, 0.4, 0.0, 0.9))})
    alone = run_folder(tmp_path / "nosync", members)
    found = drive_runs([("nosync", alone)], Roads(tracks=1, laps=1))
    assert [angle for angle, _, _ in wheel] == [0.8, 0.4, 0.0]
    assert found["nosync"][TIME_LOST] == pytest.approx((0 + 0.5 + 1) / 3)
    with pytest.raises(ConfigError, match="models of 4 nodes, not averaged"):
        load_model(alone)
    assert list(load_models(alone)) == ["0", "1", "2", "3"]


def test_a_model_drives_once_and_again_when_it_is_another(wheel, tmp_path):
    folder = run_folder(tmp_path / "run", arrays(0.5))
    for _ in range(2):
        drive_runs([("run", folder)], Roads(tracks=1, laps=1))
    assert len(wheel) == 1
    save_file(arrays(0.7), folder / "model.safetensors")
    drive_runs([("run", folder)], Roads(tracks=1, laps=1))
    assert len(wheel) == 2
    assert json.loads((folder / "drives-1-1-0.json").read_text())["learners"][""][0]["laps"] > 0.6


def test_disturbed_drives_are_kept_apart_from_the_papers(wheel, tmp_path):
    folder = run_folder(tmp_path / "run", arrays(0.5))
    for noise in (0.0, 1.0, 0.0):
        drive_runs([("run", folder)], Roads(tracks=1, laps=1, noise=noise))
    assert len(wheel) == 2
    assert wind[0] == 0
    assert 0.5 < wind[1] <= 1
    files = sorted(path.name for path in folder.glob("drives*"))
    assert files == ["drives-1-1-0-noise-1.json", "drives-1-1-0.json"]


def test_where_all_drive_alike_nobody_is_said_to_be_outperformed_or_not():
    found = findings(("b = 1", 0.0, 100.0), ("Δ = 0.1", 0.0, 20.0), ("serial", 0.0, 0.0))
    compare_drivers(found)
    assert not found.of(BEATEN)


def findings(*triples):
    found = Findings("dynamic_driving", False, False, [0], [])
    for method, loss, sent in triples:
        found.add(Finding(driving2018.SETTING, method, L_DD, [loss]))
        found.add(Finding(driving2018.SETTING, method, BYTES, [sent]))
        found.timelines.append(
            Timeline(driving2018.SETTING, method, [1, 2], [1.0, 2.0], [sent / 2 + 0.1, sent + 0.1])
        )
    return found


def test_a_periodic_protocol_is_outperformed_by_one_that_drives_better_and_sends_less():
    """Of these b = 1 is, by Δ = 0.1; b = 8 sends less than any, b = 4 drives better than any."""
    found = findings(
        ("b = 1", 0.5, 100.0),
        ("b = 4", 0.1, 25.0),
        ("b = 8", 0.6, 5.0),
        ("Δ = 0.1", 0.2, 20.0),
        ("serial", 0.15, 0.0),
    )
    compare_drivers(found)
    (share,) = found.of(BEATEN)
    assert share.mean == pytest.approx(1 / 3)
    gaps = {each.method: each.mean for each in found.of(BESIDE_SERIAL)}
    assert gaps["Δ = 0.1"] == pytest.approx(0.05)
    assert "serial" not in gaps


def test_the_picture_has_both_families_both_references_and_bytes_over_time():
    found = findings(
        ("b = 1", 0.5, 100.0), ("Δ = 0.1", 0.2, 20.0), ("nosync", 0.9, 1.0), ("serial", 0.1, 0.0)
    )
    upper, lower = PAPERS["dynamic_driving"].draw(found).axes
    named = {text.get_text() for text in upper.get_legend().get_texts()}
    assert named == {"periodic", "dynamic", "nosync", "serial"}
    assert [text.get_text() for text in lower.get_legend().get_texts()] == ["b = 1", "Δ = 0.1"]


def test_the_papers_ten_protocols_are_run_and_end_in_a_model_to_drive():
    cells = {cell.method: cell for cell in PAPERS["dynamic_driving"].cells(Scope())}
    assert len(cells) == 10
    assert not [w for cell in cells.values() for w in cell.overrides if "final_sync" in w]


def test_no_digits_stand_in_for_driving(tmp_path):
    with pytest.raises(UsageError, match="leave --dataset out"):
        PAPERS["dynamic_driving"].check(Options(tmp_path, dataset="digits"))


def test_the_network_of_table_6_has_the_papers_weights_at_the_papers_size():
    """348,219 for 68×320 colour pixels; 142,219 for ours, by hand."""

    def weights(model):
        return sum(weight.numel() for weight in model.parameters())

    assert weights(pilotnet(input_shape=(3, 68, 320), classes=0)) == 348_219
    convolutions = 25 * 24 + 24 + 25 * 24 * 36 + 36 + 25 * 36 * 48 + 48
    convolutions += 9 * 48 * 64 + 64 + 9 * 64 * 64 + 64
    dense = 64 * 100 + 100 + 5050 + 510 + 11
    assert weights(pilotnet(input_shape=SHAPE, classes=0)) == convolutions + dense == 142_219
    assert weights(pilotnet_small(input_shape=SHAPE, classes=0)) == 14_189


@pytest.mark.parametrize(("build", "side"), [(pilotnet, 61), (pilotnet_small, 29)])
def test_the_smallest_images_leave_one_place_and_smaller_ones_are_refused(build, side):
    model = build(input_shape=(1, side, side), classes=0)
    assert model(torch.zeros(2, 1, side, side)).shape == (2, 1)
    assert not list(model.buffers())
    with pytest.raises(ValueError, match=f"at least {side}×{side} pixels"):
        build(input_shape=(1, side - 1, side), classes=0)
