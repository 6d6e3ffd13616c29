"""Models behind the wheel: found by name, driven in closed loop, filmed and drawn."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from simulations.config import ConfigError
from simulations.driving.__main__ import main
from simulations.driving.closed_loop import Journey, drive_track, expert
from simulations.driving.recording import unseen_track_seed
from simulations.driving.road import Road
from simulations.driving.simulator import HEIGHT, WIDTH
from simulations.driving.wheel_models import load_model, named_drivers, steering


def one_number(*, input_shape, classes=1):
    """Stand in for a network of `simulations.models`: one number out of an image."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 1))


@pytest.fixture
def run_folder(tmp_path):
    """A run's folder with a model that steers by 0.25, and as much more as the image is bright."""
    model = one_number(input_shape=(1, HEIGHT, WIDTH))
    with torch.no_grad():
        model[1].weight.fill_(1 / (HEIGHT * WIDTH))
        model[1].bias.fill_(0.25)
    folder = tmp_path / "dynamic-s0"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    target = f"{__name__}.{one_number.__name__}"
    (folder / "config.yaml").write_text(f"model:\n  _target_: {target}\n")
    return folder


def test_a_model_sees_bytes_as_numbers_between_0_and_1(run_folder):
    """All bytes 51 are 0.2 each, so the mean is 0.2 and the angle 0.45."""
    steer = steering(load_model(run_folder))
    assert steer(np.full((HEIGHT, WIDTH), 51, np.uint8)) == pytest.approx(0.45, abs=1e-5)
    assert steer(np.zeros((HEIGHT, WIDTH), np.uint8)) == pytest.approx(0.25, abs=1e-6)


def test_models_are_called_as_their_folders_or_as_the_user_says(run_folder):
    file = run_folder / "model.safetensors"
    assert list(named_drivers([str(run_folder), f"mine={file}", "expert", "straight"])) == [
        "dynamic-s0",
        "mine",
        "expert",
        "straight",
    ]
    assert list(named_drivers([str(file)])) == ["dynamic-s0"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["expert", "expert"], "two called 'expert'"),
        (["a/b=expert"], "part of file names"),
        (["nowhere/at-all"], "is not there"),
    ],
)
def test_a_model_that_cannot_be_had_is_named(words, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        named_drivers(words)


def test_what_does_not_fit_is_named(run_folder):
    (run_folder / "model.safetensors").write_bytes(b"nothing of that kind")
    with pytest.raises(ConfigError, match=r"model\.safetensors is no model that steers"):
        load_model(run_folder)
    save_file({"other": torch.zeros(2)}, run_folder / "model.safetensors")
    with pytest.raises(ConfigError, match="no model that steers"):
        load_model(run_folder)


def test_a_model_with_several_outputs_does_not_steer():
    model = nn.Sequential(nn.Flatten(), nn.Linear(HEIGHT * WIDTH, 3))
    with pytest.raises(ConfigError, match="3 numbers"):
        steering(model)(np.zeros((HEIGHT, WIDTH), np.uint8))


@pytest.mark.slow
def test_the_controller_drives_a_lap_without_touching_a_sideline():
    journey = drive_track(expert, unseen_track_seed(1, 0), laps=1)
    drive = journey.drive()
    assert journey.ending == "all laps"
    assert drive.is_finished
    assert (drive.crossings, drive.on_line_seconds) == (0, 0)
    # About 1,000 metres at 20 a second, and the start.
    assert drive.on_road_seconds == pytest.approx(journey.road.length_m / 20, rel=0.05)


@pytest.mark.slow
def test_a_drive_is_the_same_every_time():
    one, other = (drive_track(lambda moment: 0.05, unseen_track_seed(1, 0)) for _ in range(2))
    assert one.ending == "left the road"
    np.testing.assert_array_equal(one.positions, other.positions)


def journey_of(progress, ending):
    """Return a drive in the middle of a straight road, two metres a step if it goes on."""
    steps = len(progress)
    road = Road(np.array([(0.0, 0.0), (0.0, 90.0), (90.0, 90.0)]), 6.0)
    wheels = np.full((steps, 4), 1.0)
    zeros = np.zeros(steps)
    return Journey(road, ending, np.zeros((steps, 2)), zeros, np.array(progress), wheels, zeros)


def test_the_time_of_a_car_that_turns_back_ends_where_it_was_farthest():
    """50 steps are a second: farthest at the third step, which is 0.06 s."""
    drive = journey_of([0.0, 2.0, 4.0, 2.0, 1.0, 1.0], "stuck").drive()
    assert (drive.on_road_seconds, drive.is_finished) == (0.06, False)
    assert journey_of([0.0, 2.0, 4.0, 2.0, 1.0, 6.0], "all laps").drive().on_road_seconds == 0.12


@pytest.mark.slow
def test_a_car_that_comes_no_farther_is_stuck_after_five_seconds(monkeypatch):
    monkeypatch.setattr("simulations.driving.closed_loop.hold_speed", lambda speed: (0.0, 1.0))
    journey = drive_track(expert, unseen_track_seed(1, 0))
    assert journey.ending == "stuck"
    assert 5 * 50 <= len(journey.angles) <= 6 * 50
    assert not journey.drive().is_finished


@pytest.mark.slow
def test_an_angle_that_is_no_number_is_no_steering():
    journey = drive_track(lambda moment: float("nan"), unseen_track_seed(1, 0))
    assert (journey.angles == 0).all()


@pytest.mark.slow
def test_models_are_compared_filmed_and_drawn(run_folder, tmp_path, capsys):
    output = tmp_path / "out"
    words = ("drive", "--model", f"bends={run_folder}", "--model", "straight", "--tracks", "2")
    assert main((*words, "--output", str(output))) == 0
    shown = capsys.readouterr().out
    assert "bends" in shown
    assert "L_dd" in shown

    found = json.loads((output / "drives.json").read_text())
    assert set(found["models"]) == {"bends", "straight"}
    for loss in found["models"].values():
        total = 0.8 * loss["time_lost"] + 0.15 * loss["crossings_share"]
        assert loss["driving_loss"] == pytest.approx(total + 0.05 * loss["on_line_share"])
    with (output / "drives.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["track"]) for row in rows] == [
        ("bends", "0"),
        ("bends", "1"),
        ("straight", "0"),
        ("straight", "1"),
    ]
    assert all(int(row["track_seed"]) % 2 == 1 for row in rows)
    for name in ("bends", "straight"):
        with Image.open(output / f"film-{name}.gif") as film:
            assert film.n_frames >= 3
            film.seek(film.n_frames - 1)
            assert np.asarray(film.convert("RGB")).std() > 10
        with Image.open(output / f"path-{name}.png") as picture:
            assert min(picture.size) > 500
            assert np.asarray(picture.convert("L")).std() > 10


def test_a_command_without_a_model_says_so(capsys):
    with pytest.raises(SystemExit) as stop:
        main(("drive",))
    assert stop.value.code == 2
    assert "--model" in capsys.readouterr().err
