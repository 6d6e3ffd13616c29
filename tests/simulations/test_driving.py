"""Driving in closed loop: the road, the loss of A.4, recordings, models behind the wheel."""

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from gems_flwr.core import generator
from gems_flwr.errors import OptionError
from simulations.config import ConfigError
from simulations.driving import recording
from simulations.driving.__main__ import main
from simulations.driving.controller import FULL_LOCK_RADIANS, CarState, pursue
from simulations.driving.drive import Journey, drive_track
from simulations.driving.loss import Drive, driving_losses
from simulations.driving.models import load_models, steering
from simulations.driving.recording import (
    RecordingOptions,
    held_noise,
    load_recording,
    record_track,
    recorded_track_seed,
    unseen_track_seed,
)
from simulations.driving.road import (
    Place,
    Road,
    first_lasting,
    is_off_road,
    measure_drive,
    progress_m,
    touch_begins,
    touches_sideline,
)
from simulations.driving.simulator import HEIGHT, WIDTH, Simulator, camera_image
from simulations.models import pilotnet, pilotnet_small

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("record", "--tracks", "2", "--frames-per-track", "71", "--seed", "5", "--data-dir")
# A square of 10 metres, driven counterclockwise: along x, then y.
SQUARE = Road(np.array([(0.0, 0.0), (10.0, 0.0), (10.0, 10.0), (0.0, 10.0)]), 2.0)
LONG = Road(np.array([(0.0, 0.0), (0.0, 500.0), (200.0, 500.0), (200.0, 0.0)]), 6.0)


# --- the road ---------------------------------------------------------------------------------


def test_what_is_right_of_the_direction_of_travel_has_a_positive_offset():
    """Travelling along x, right is towards negative y; the other way round it is left."""
    assert SQUARE.length_m == 40
    assert SQUARE.locate((4.0, -1.5)) == Place(4.0, 1.5)
    assert SQUARE.locate((4.0, 1.5)) == Place(4.0, -1.5)
    # From the same first point backwards: down the last side first, so 4 metres are 36.
    back = SQUARE.reversed().locate((4.0, -1.5))
    assert (back.along_m, back.offset_m) == (36.0, -1.5)
    assert SQUARE.locate((-1.0, 4.0)) == Place(36.0, 1.0)


@given(st.floats(0, 40, exclude_max=True))
def test_a_point_of_the_line_is_located_where_it_was_taken_from(along):
    place = SQUARE.locate(SQUARE.point_at(along + 3 * 40.0))
    assert abs(progress_m(place.along_m, along, SQUARE.length_m)) < 1e-9
    assert abs(place.offset_m) < 1e-9


def test_another_stretch_close_by_is_no_progress():
    """(5, 6) is nearer to the far side (25 metres along) than to the near one, where we were."""
    assert SQUARE.locate((5.0, 6.0)).along_m == 25
    assert SQUARE.locate((5.0, 6.0), near_m=4.0, reach_m=3.0) == Place(5.0, -6.0)
    assert SQUARE.distances([(5.0, 6.0), (5.0, -3.0)]).tolist() == [4.0, 3.0]
    assert [progress_m(a, b, 40) for a, b in ((39, 1), (1, 39), (3, 5))] == [2, -2, 2]


def car(x, y, heading=0.0):
    return CarState(np.array([x, y]), heading, 20.0, np.zeros((4, 2)))


def test_the_steering_is_that_of_the_circle_through_the_point_ahead():
    """From the rear axle 1.64 m behind, a point 9 m ahead of the middle and 2 m aside.

    The circle that touches the car's axis and goes through (a, s) has the curvature
    2 s / (a² + s²) with a = 10.64, s = 2; a car with axles 3.24 m apart drives it at
    atan(3.24 · curvature).
    """
    expected = math.atan(3.24 * 2 * 2 / (10.64**2 + 2**2)) / FULL_LOCK_RADIANS
    steer = partial(pursue, road=LONG, look_ahead_m=9)
    assert steer(car(-2, 100), place=Place(100, -2)) == pytest.approx(expected)
    assert steer(car(2, 100), place=Place(100, 2)) == pytest.approx(-expected)
    # Who looks back turns at full lock.
    assert steer(car(1, 100, heading=math.pi), place=Place(100, 1)) == 1


def wheels(*outermost):
    """Four wheels: two at a distance, two that lie 2.2 metres (the car's track) further in."""
    return np.array([(d, d, d - 2.2, d - 2.2) for d in outermost])


def test_wheels_touch_with_their_tread_and_leave_all_together():
    """A tread is 0.28 metres to either side of a wheel's middle."""
    assert touches_sideline(wheels(5.0, 5.71, 5.73), 6.0).tolist() == [False, False, True]
    assert is_off_road(wheels(6.1, 8.1, 8.3), 6.0).tolist() == [False, False, True]
    assert touch_begins([1, 1, 0, 0, 1, 0, 1, 1]).tolist() == [0, 4, 6]
    assert first_lasting([0, 1, 1, 0, 1, 1, 1], 3) == 4
    assert first_lasting([1, 1, 0, 1, 1], 3) is None


def test_times_of_a_drive_that_leaves_the_road():
    """At 10 steps a second half a second is 5 steps.

    10 steps inside, 2 on the line, 8 inside, 3 on the line, 4 off (too short to have left), 3 on
    the line, 5 off: it leaves after 30 steps. Touches begin at steps 10 and 20, and last 2 and
    3 + 4 + 3 steps.
    """
    line, off = [6.0], [9.0]
    drive = [3.0] * 10 + line * 2 + [3.0] * 8 + line * 3 + off * 4 + line * 3 + off * 5 + [0.0] * 9
    times = measure_drive(wheels(*drive), 6.0, 10)
    assert (times.on_road_seconds, times.crossings, times.on_line_seconds) == (3.0, 2, 1.2)
    times = measure_drive(wheels(*[1.0] * 25), 6.0, 10)
    assert (times.on_road_seconds, times.crossings) == (2.5, 0)


# --- the loss ---------------------------------------------------------------------------------


def test_the_formula_of_the_paper_on_one_track():
    """t_max = 100 s, of the one that finished.

    good: 2 crossings in 100 s, c = 0.02; on the line for 5 s.
    bad: t = 25 s, 2 crossings, c = 0.08 = c_max; on the line for 10 s.
    L(good) = 0.8 · 0 + 0.15 · 0.02 / 0.08 + 0.05 · 5 / 100 = 0.0375 + 0.0025 = 0.04.
    L(bad) = 0.8 · 75 / 100 + 0.15 · 1 + 0.05 · 10 / 25 = 0.6 + 0.15 + 0.02 = 0.77.
    """
    losses = driving_losses({"good": [Drive(100, 2, 5, True)], "bad": [Drive(25, 2, 10, False)]})
    assert losses["good"].total == pytest.approx(0.04)
    assert losses["bad"].total == pytest.approx(0.77)
    assert losses["bad"].time_lost == 0.75


def test_several_tracks_are_one_long_drive():
    """t_max = 100 + 60. The second model: 100 (finished) and 20 of 60, so 40 of 160 s are lost.

    Its crossings: 3 in 120 s, on the line for 6 of them. The first has 0: c_max = 3 / 120.
    """
    losses = driving_losses(
        {
            "first": [Drive(97, 0, 0, True), Drive(60, 0, 0, True)],
            "second": [Drive(100, 1, 2, True), Drive(20, 2, 4, False)],
        }
    )
    # Who cuts corners is there earlier, and has lost nothing.
    assert losses["first"].time_lost == 0
    second = losses["second"]
    assert (second.time_lost, second.crossings) == (pytest.approx(0.25), 1)
    assert second.on_line == pytest.approx(0.05)
    assert second.total == pytest.approx(0.2 + 0.15 + 0.0025)


# Times are whole steps of the simulator, 50 a second.
drives = st.builds(
    lambda steps, share, c, done: Drive(steps / 50, c, share * steps / 50, done),
    st.integers(0, 25_000),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.integers(0, 50),
    st.booleans(),
)


def test_what_cannot_be_compared_is_refused():
    for by_model in ({"a": [Drive(1, 0, 0, True)], "b": []}, {}):
        with pytest.raises(OptionError, match="same tracks"):
            driving_losses(by_model)


# --- recordings -------------------------------------------------------------------------------


def test_no_track_is_ever_both_recorded_and_driven():
    """Recorded ones have even seeds, others odd ones, whatever the seeds of the commands are."""
    for seed in range(10):
        for track in range(10):
            assert recorded_track_seed(seed, track) % 2 == 0
            assert unseen_track_seed(seed, track) % 2 == 1
    assert len({recorded_track_seed(0, track) for track in range(100)}) == 100


def test_the_camera_sees_neither_the_instruments_nor_the_car():
    """The panel is the bottom 12 of 96 rows; the car's front wheels are drawn turned above it."""
    view = np.zeros((96, 96, 3), dtype=np.uint8)
    view[66:] = 255
    assert not camera_image(view).any()
    assert camera_image(view).shape == (HEIGHT, WIDTH)


def test_disturbances_are_held_and_every_second_one_is_zero():
    noise = held_noise(generator(0, "noise"), 5000, 0.5)
    assert (len(noise), np.abs(noise).max() <= 0.5) == (5000, True)
    changes = np.flatnonzero(np.diff(noise)) + 1
    assert 10 <= np.diff(changes).min() <= np.diff(changes).max() <= 40
    values = noise[changes]
    assert (values[1::2] == 0).all()
    assert (values[0::2] != 0).all()


@pytest.mark.parametrize("wrong", [{"frames_per_track": 1}, {"noise": 2}, {"seed": -1}])
def test_an_option_out_of_range_is_named(wrong):
    with pytest.raises(ConfigError, match="--frames-per-track of at least 2"):
        RecordingOptions(**wrong)


def test_a_missing_extra_says_what_to_install(monkeypatch, capsys, tmp_path):
    there = recording.Simulator.__init__.__globals__["importlib"].util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: None if name in ("Box2D", "pygame") else there(name),
    )
    assert main((*WORDS, str(tmp_path))) == 2
    told = capsys.readouterr().err
    assert told.startswith("pip install 'gems-flwr[driving]'")
    assert "Box2D, pygame" in told
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data = tmp_path_factory.mktemp("recorded")
    assert main((*WORDS, str(data))) == 0
    return data / "driving"


@pytest.mark.slow
def test_a_file_holds_images_angles_and_how_it_was_made(folder):
    assert sorted(p.name for p in folder.iterdir()) == ["track-000.npz", "track-001.npz"]
    # How many there are is no matter of a single file.
    made = load_recording(folder / "track-001.npz", RecordingOptions(9, 71, 5).meta(1))
    assert (made.images.shape, made.images.dtype) == ((71, HEIGHT, WIDTH), np.uint8)
    assert (made.angles.shape, made.angles.dtype) == ((71,), np.float32)
    assert 0.005 < made.angles.std() < np.abs(made.angles).max() <= 1
    assert made.images.std() > 10


@pytest.mark.slow
def test_the_label_is_what_the_controller_wants_not_what_the_wheels_do(monkeypatch):
    """Without disturbances both are one; with them the wheels get more."""
    done: list[float] = []
    step = Simulator.step

    def note(self, angle, gas, brake):
        done.append(angle)
        step(self, angle, gas, brake)

    monkeypatch.setattr(Simulator, "step", note)
    for noise in (0.0, 1.0):
        done.clear()
        made = record_track(RecordingOptions(1, 80, 5, noise), 0)
        half = len(done) // 2
        steered = np.array([done[k * half + 50 :][:80:2] for k in range(2)]).ravel()
        largest = np.abs(steered - made.angles).max()
        assert largest < 1e-6 if noise == 0 else 0.2 < largest <= 1


# The command, but that it stands still in the middle of the second track.
STANDING_STILL = """
import signal, sys
from simulations.driving import recording
from simulations.driving.__main__ import main
real = recording.record_track
def still():
    print("in the second track", flush=True)
    signal.pause()
recording.record_track = lambda options, track, tick: real(options, track, still if track else tick)
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_recording_goes_on_and_has_the_same_bytes(folder, tmp_path):
    words = [sys.executable, "-c", STANDING_STILL, *WORDS, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert any("in the second track" in line for line in process.stdout)
        process.kill()
    first, second = (tmp_path / "driving" / f"track-00{track}.npz" for track in range(2))
    before = first.stat().st_mtime_ns
    assert not second.exists()
    assert main((*WORDS, str(tmp_path))) == 0
    assert first.stat().st_mtime_ns == before
    for path in (first, second):
        assert path.read_bytes() == (folder / path.name).read_bytes()


@pytest.mark.slow
def test_files_of_other_options_and_no_recordings_are_refused_by_name(folder, tmp_path, capsys):
    kept = (folder / "track-000.npz").read_bytes()
    for word, value, told in (("--seed", "6", "seed=5"), ("--noise", "0.5", "noise=1.0")):
        assert main((*WORDS, str(folder.parent), word, value)) == 2
        complaint = capsys.readouterr().err.replace("\n", "")
        assert "track-000.npz" in complaint
        assert told in complaint
    assert (folder / "track-000.npz").read_bytes() == kept
    path = tmp_path / "track-000.npz"
    path.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ConfigError, match=r"track-000\.npz is no recording"):
        load_recording(path, {})


# --- models behind the wheel ------------------------------------------------------------------


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
    [model] = load_models(run_folder).values()
    assert steering(model)(np.full((HEIGHT, WIDTH), 51, np.uint8)) == pytest.approx(0.45, abs=1e-5)
    several = nn.Sequential(nn.Flatten(), nn.Linear(HEIGHT * WIDTH, 3))
    with pytest.raises(ConfigError, match="3 numbers"):
        steering(several)(np.zeros((HEIGHT, WIDTH), np.uint8))


def test_a_file_that_is_no_model_is_refused_by_name(run_folder, tmp_path):
    (run_folder / "model.safetensors").write_bytes(b"nothing of that kind")
    with pytest.raises(ConfigError, match=r"model\.safetensors is no model that steers"):
        load_models(run_folder)
    with pytest.raises(ConfigError, match="is not there"):
        load_models(tmp_path / "nowhere")


@pytest.mark.deep
def test_the_controller_drives_a_lap_without_touching_a_sideline():

    def expert(moment):
        return pursue(moment.state, moment.road, moment.place)

    journey = drive_track(expert, unseen_track_seed(1, 0), laps=1)
    drive = journey.drive()
    assert (journey.ending, drive.is_finished) == ("all laps", True)
    assert (drive.crossings, drive.on_line_seconds) == (0, 0)
    # About 1,000 metres at 20 a second, and the start.
    assert drive.on_road_seconds == pytest.approx(journey.road.length_m / 20, rel=0.05)


@pytest.mark.slow
def test_a_drive_is_repeated_and_an_angle_that_is_no_number_is_0():
    seed = unseen_track_seed(1, 0)
    plain, same = (drive_track(lambda _, a=a: a, seed) for a in (0.0, float("nan")))
    np.testing.assert_array_equal(plain.progress_m, same.progress_m)
    assert plain.ending == "left the road"


def test_the_time_of_a_car_that_turns_back_ends_where_it_was_farthest():
    """50 steps are a second: farthest at the third step, which is 0.06 s."""
    for ending, seconds in (("stuck", 0.06), ("left the road", 0.12)):
        progress, near = np.array([0.0, 2.0, 4.0, 2.0, 1.0, 1.0]), np.full((6, 4), 1.0)
        journey = Journey(SQUARE, ending, progress, near)
        assert journey.drive().on_road_seconds == seconds
        assert not journey.drive().is_finished


# --- networks ---------------------------------------------------------------------------------


def test_the_network_of_table_6_has_the_papers_weights_at_the_papers_size():
    """348,219 for 68×320 colour pixels; 142,219 for ours, by hand."""

    def weights(model):
        return sum(weight.numel() for weight in model.parameters())

    assert weights(pilotnet(input_shape=(3, 68, 320), classes=0)) == 348_219
    convolutions = 25 * 24 + 24 + 25 * 24 * 36 + 36 + 25 * 36 * 48 + 48
    convolutions += 9 * 48 * 64 + 64 + 9 * 64 * 64 + 64
    dense = 64 * 100 + 100 + 5050 + 510 + 11
    assert weights(pilotnet(input_shape=(1, 64, 64), classes=0)) == convolutions + dense == 142_219
    for build, side in ((pilotnet, 61), (pilotnet_small, 29)):
        model = build(input_shape=(1, side, side), classes=0)
        assert model(torch.zeros(2, 1, side, side)).shape == (2, 1)
        with pytest.raises(ValueError, match=f"at least {side}×{side} pixels"):
            build(input_shape=(1, side - 1, side), classes=0)
