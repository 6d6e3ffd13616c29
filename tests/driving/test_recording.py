"""Recordings: the same bytes every time, whole files only, clean labels, no leak of the label."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gems_flwr.runtime.seeding import generator
from simulations.config import ConfigError
from simulations.driving import recording
from simulations.driving.__main__ import main
from simulations.driving.recording import (
    RecordingOptions,
    held_noise,
    load_recording,
    record_track,
    recorded_track_seed,
    track_file,
    unseen_track_seed,
)
from simulations.driving.simulator import HEIGHT, WIDTH, Simulator, camera_image

ROOT = Path(__file__).resolve().parents[2]
SMALL = RecordingOptions(tracks=2, frames_per_track=101, seed=5)
WORDS = ("record", "--tracks", "2", "--frames-per-track", "101", "--seed", "5", "--data-dir")


def test_no_track_is_ever_both_recorded_and_driven():
    """Recorded ones have even seeds, others odd ones, whatever the seeds of the commands are."""
    for seed in range(20):
        for track in range(20):
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
    assert len(noise) == 5000
    assert np.abs(noise).max() <= 0.5
    changes = np.flatnonzero(np.diff(noise)) + 1
    lengths = np.diff(changes)
    assert lengths.min() >= 10
    assert lengths.max() <= 40
    values = noise[changes]
    assert (values[1::2] == 0).all()
    assert (values[0::2] != 0).all()


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"tracks": 0}, "--tracks"),
        ({"frames_per_track": 1}, "--frames-per-track"),
        ({"seed": -1}, "--seed"),
        ({"noise": 1.5}, "--noise"),
    ],
)
def test_an_option_out_of_range_is_named(options, culprit):
    with pytest.raises(ConfigError, match=culprit):
        RecordingOptions(**options)


def test_a_missing_extra_says_what_to_install(monkeypatch, capsys, tmp_path):
    there = recording.Simulator.__init__.__globals__["importlib"].util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: None if name in ("Box2D", "pygame") else there(name),
    )
    for words in ((*WORDS, str(tmp_path)), ("drive", "--model", "expert")):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert told.startswith("pip install 'gems-flwr[driving]'")
        assert "Box2D, pygame" in told
    assert not list(tmp_path.iterdir())


def test_the_commands_can_be_imported_without_the_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['gymnasium', 'Box2D', 'pygame']));"
        "import simulations.driving.__main__"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data = tmp_path_factory.mktemp("recorded")
    assert main((*WORDS, str(data))) == 0
    return data


@pytest.mark.slow
def test_a_file_holds_images_angles_and_how_it_was_made(folder):
    assert sorted(p.name for p in (folder / "driving").iterdir()) == [
        "track-000.npz",
        "track-001.npz",
    ]
    with np.load(track_file(folder, 1), allow_pickle=False) as archive:
        images, angles = archive["images"], archive["angles"]
        meta = json.loads(str(archive["meta"]))
    assert (images.shape, images.dtype) == ((101, HEIGHT, WIDTH), np.uint8)
    assert (angles.shape, angles.dtype) == ((101,), np.float32)
    assert np.abs(angles).max() <= 1
    assert angles.std() > 0.1
    assert images.std() > 10
    assert meta["seed"] == 5
    assert meta["track"] == 1
    assert meta["version"] == recording.VERSION


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
        wheels = np.array([done[k * half + 50 :][:80:2] for k in range(2)]).ravel()
        extra = wheels - made.angles
        if noise == 0:
            np.testing.assert_allclose(extra, 0, atol=1e-6)
        else:
            assert 0.2 < np.abs(extra).max() <= 1


@pytest.mark.slow
def test_a_killed_recording_goes_on_and_has_the_same_bytes(folder, tmp_path):
    words = [sys.executable, "-m", "simulations.driving", *WORDS, str(tmp_path)]
    first, second = (track_file(tmp_path, track) for track in range(2))
    with subprocess.Popen(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        while not first.exists() and process.poll() is None:
            time.sleep(0.02)
        process.kill()
    before = first.stat().st_mtime_ns
    was_cut = not second.exists()
    assert main((*WORDS, str(tmp_path))) == 0
    assert first.stat().st_mtime_ns == before
    assert was_cut
    for path in (first, second):
        assert path.read_bytes() == track_file(folder, int(path.stem[-3:])).read_bytes()


@pytest.mark.slow
def test_files_of_other_options_are_refused_by_name(folder, capsys):
    kept = track_file(folder, 0).read_bytes()
    for word, value, told in (("--seed", "6", "seed=5"), ("--noise", "0.5", "noise=1.0")):
        assert main((*WORDS, str(folder), word, value)) == 2
        complaint = capsys.readouterr().err.replace("\n", "")
        assert "track-000.npz" in complaint
        assert told in complaint
    assert track_file(folder, 0).read_bytes() == kept


@pytest.mark.slow
def test_more_tracks_of_the_same_options_are_added(folder, tmp_path):
    """How many there are is no business of a single file."""
    path = track_file(folder, 0)
    assert len(load_recording(path, RecordingOptions(9, 101, 5).meta(0)).angles) == 101


def test_a_file_that_is_no_recording_is_named(tmp_path):
    path = track_file(tmp_path, 0)
    path.parent.mkdir()
    for content in (b"", b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"track-000\.npz is no recording"):
            load_recording(path, SMALL.meta(0))
