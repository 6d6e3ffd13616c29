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

from gems_flwr import join_models
from simulations.config import ConfigError
from simulations.driving.__main__ import main
from simulations.driving.closed_loop import Journey, drive_track, expert, straight
from simulations.driving.drive_command import DriveOptions
from simulations.driving.recording import unseen_track_seed
from simulations.driving.road import Road
from simulations.driving.simulator import HEIGHT, WIDTH
from simulations.driving.wheel_models import load_model, load_models, named_drivers, steering


def one_number(*, input_shape, classes=0):
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


def test_a_run_that_kept_every_nodes_model_is_told_apart(run_folder):
    one = load_model(run_folder).state_dict()
    both = join_models({"north": one, "south": one})
    save_file(
        {name: value.clone() for name, value in both.items()},
        run_folder / "model.safetensors",
    )
    assert len(load_models(run_folder)) == 2
    with pytest.raises(ConfigError, match="models of 2 nodes"):
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
def test_the_simulator_agrees_on_which_wheels_are_on_the_road():
    """It keeps for every wheel the tiles of the road that it touches, none on the grass.

    Tiles are straight and a wheel touches with its edge, so within a metre of the sideline both
    may be right.
    """
    seen = {True: 0, False: 0}

    def compare(simulator, step, laps, angle):
        distances = simulator.road.distances(simulator.state.wheels)
        for wheel, distance in zip(simulator._env.car.wheels, distances, strict=True):
            if step and abs(distance - simulator.road.half_width_m) > 1:
                assert bool(wheel.tiles) == (distance < simulator.road.half_width_m)
                seen[bool(wheel.tiles)] += 1

    for track in range(2):
        drive_track(straight, unseen_track_seed(1, track), watch=compare)
    assert min(seen.values()) > 50


@pytest.mark.parametrize(
    ("options", "culprit"),
    [({"speed_m_per_s": 0}, "--speed"), ({"noise": 2}, "--noise"), ({"seed": -1}, "--seed")],
)
def test_an_option_out_of_range_is_named(options, culprit):
    with pytest.raises(ConfigError, match=culprit):
        DriveOptions(**options)


def test_without_noise_nobody_disturbs_the_steering():
    assert not DriveOptions().gusts(0).any()
    np.testing.assert_array_equal(
        DriveOptions(noise=1.0).gusts(1), DriveOptions(noise=1.0).gusts(1)
    )


@pytest.mark.slow
def test_disturbances_move_the_car_and_not_what_the_driver_wants():
    """Half of full lock to the right all the time leads off a driver that never steers."""
    journey = drive_track(straight, unseen_track_seed(1, 0), noise=[0.5])
    assert (journey.angles == 0).all()
    assert journey.offsets_m[-1] > journey.road.half_width_m
    assert len(journey.angles) < 150


@pytest.mark.slow
def test_the_speed_is_held():
    """At 10 metres a second the same two seconds lead less far than at 20."""
    slow, fast = (
        drive_track(straight, unseen_track_seed(1, 0), speed_m_per_s=speed).progress_m[100]
        for speed in (10.0, 20.0)
    )
    assert slow == pytest.approx(10 * 2, rel=0.2)
    assert fast == pytest.approx(20 * 2, rel=0.2)


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
    monkeypatch.setattr("simulations.driving.closed_loop.hold_speed", lambda *speeds: (0.0, 1.0))
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
