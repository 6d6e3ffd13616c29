"""Run folders: one owner, and strange or failing ones end a command with one clear line."""

import errno
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from helpers_commands import run_command
from helpers_patience import HANG_SECONDS
from rich.console import Console

from conftest import refuse_writing
from gems_flwr.disk.lock import LOCK_FILE, hold_folder
from gems_flwr.errors import CheckpointError, FolderInUseError
from gems_flwr.runtime.checkpoint import CheckpointFolder
from simulations.config import compose_config
from simulations.experiment.remembered import TrainingMemory, _Outcome
from simulations.report.__main__ import main as report
from simulations.run import run

QUIET = Console(quiet=True)
ONE = ("strategy=local", "nodes=2", "train.epochs=1", "progress=false")
THREE_ROUNDS = ("rounds=3", "nodes=2", "train.epochs=1", "progress=false")


def finish(folder, *overrides, **options):
    return run(compose_config(list(overrides or ONE)), folder, QUIET, **options)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return run_command(tmp_path, monkeypatch, capsys)


def folder_of(*overrides):
    return Path("runs") / compose_config(list(overrides)).run_name()


def refused(command, *words):
    """Run a command that must fail; return the one line that it says."""
    status, said = command(*words)
    assert status == 2
    assert said.count("\n") == 1, said
    return said


# --- one owner ------------------------------------------------------------------------------


def test_a_second_command_is_told_who_has_the_folder(command):
    held, done = threading.Event(), threading.Event()

    def hold():
        with hold_folder(folder_of(*ONE)):
            held.set()
            done.wait(HANG_SECONDS)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(HANG_SECONDS)
    try:
        said = refused(command, *ONE)
    finally:
        done.set()
        other.join()
    assert f"in use by process {os.getpid()}" in said
    assert command(*ONE)[0] == 0


def test_whoever_waits_for_the_same_run_takes_its_result(tmp_path):
    """Two jobs of ``simulations.reproduce`` may need one run: it is done once."""
    results, stamps = [], []

    def work():
        results.append(finish(tmp_path, *ONE, wait=True))
        stamps.append((tmp_path / "result.json").stat().st_mtime_ns)

    workers = [threading.Thread(target=work) for _ in range(2)]
    with hold_folder(tmp_path):
        for worker in workers:
            worker.start()
    for worker in workers:
        worker.join(HANG_SECONDS)
    assert len(results) == 2
    assert results[0] == results[1]
    assert stamps[0] == stamps[1]


def test_a_finished_run_is_read_whoever_has_the_folder(tmp_path):
    first = finish(tmp_path)
    raised = []

    def work():
        try:
            assert finish(tmp_path) == first
            finish(tmp_path, *ONE, "fresh=true")
        except Exception as error:
            raised.append(error)

    with hold_folder(tmp_path):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join(HANG_SECONDS)
    assert [type(error) for error in raised] == [FolderInUseError]
    assert not (tmp_path / LOCK_FILE).exists()


# --- strange files --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[1, 2]", "it is a list"),
        ('"done"', "it is a text"),
        ("7", "it is a number"),
        ("null", "it is null"),
        ('{"accuracy": 1}', "it is an object without 'details'"),
        ('{"details": [1]}', "it is an object without 'details'"),
        ("{nope", "it is not JSON"),
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("9" * 5000, "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
    ],
)
def test_a_result_that_is_none_is_left_where_it_is(tmp_path, content, complaint):
    path = tmp_path / "result.json"
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        finish(tmp_path)
    said = str(caught.value)
    assert f"{path} is not the result of a run: {complaint}" in said
    assert "fresh=true" in said
    assert "\n" not in said
    assert path.read_bytes() == data


def test_a_strange_result_ends_the_command_with_one_line(command):
    folder_of(*ONE).mkdir(parents=True)
    path = folder_of(*ONE) / "result.json"
    path.write_text("[1, 2]")
    assert "result.json is not the result of a run: it is a list" in refused(command, *ONE)
    path.unlink()
    path.mkdir()
    assert "a folder is in the way" in refused(command, *ONE)
    path.rmdir()
    assert command(*ONE)[0] == 0
    # The right fingerprint, but no number where others read one.
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "accuracy": "high"}))
    assert "its 'accuracy' is no number" in refused(command, *ONE)
    assert command(*ONE, "fresh=true")[0] == 0
    assert json.loads(path.read_text())["accuracy"] == result["accuracy"]


class StopsError(Exception):
    """Something that ends a run in the middle."""


def interrupted(folder, monkeypatch):
    """Leave a run after its first round."""
    real = CheckpointFolder.save

    def save(self, groups, meta):
        real(self, groups, meta)
        raise StopsError

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFolder, "save", save)
        with pytest.raises(StopsError):
            finish(folder, *THREE_ROUNDS)


@pytest.mark.parametrize("content", ["", "[1, 2]", "a: [", "\x00\x01", "rounds: many\n", "7"])
def test_a_strange_config_does_not_cost_the_checkpoint(tmp_path, monkeypatch, content):
    interrupted(tmp_path, monkeypatch)
    whole = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.yaml is not the config of a run") as caught:
        finish(tmp_path, *THREE_ROUNDS)
    assert "\n" not in str(caught.value)
    assert "fresh=true" in str(caught.value)
    assert CheckpointFolder(tmp_path).load()[1]["round"] == 1
    (tmp_path / "config.yaml").write_text(whole)
    resumed, unbroken = finish(tmp_path, *THREE_ROUNDS), finish(tmp_path / "new", *THREE_ROUNDS)
    assert resumed["loss"] == unbroken["loss"]


def test_a_strange_config_where_nothing_can_be_lost_is_replaced(tmp_path):
    (tmp_path / "config.yaml").write_text("[1, 2]")
    assert finish(tmp_path)["rounds"] == 1


# --- disks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where",
    [
        LOCK_FILE,
        "config.yaml",
        "partition.json",
        "rounds.jsonl",
        "model.safetensors",
        "result.json",
    ],
)
def test_a_full_disk_ends_the_command_with_one_line_and_the_next_one_goes_on(
    command, monkeypatch, where
):
    folder = folder_of(*THREE_ROUNDS)
    with monkeypatch.context() as broken:
        refuse_writing(broken, errno.ENOSPC, where)
        said = refused(command, *THREE_ROUNDS)
    assert "No space left on device (free some space)" in said
    assert not (folder / "result.json").exists()
    if where in ("model.safetensors", "result.json"):
        # All rounds are played, and need not be played again.
        assert CheckpointFolder(folder).load()[1]["round"] == 3
    assert command(*THREE_ROUNDS)[0] == 0
    assert json.loads((folder / "result.json").read_text())["rounds"] == 3


def test_a_checkpoint_that_finds_no_room_is_one_line_too(command, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with monkeypatch.context() as broken:
        refuse_writing(broken, errno.ENOSPC, f"{folder_of(*THREE_ROUNDS)}/.checkpoint")
        said = refused(command, *THREE_ROUNDS)
    assert "the state after round 1 is not saved" in said
    assert f"it is in {tmp_path}" in said


def test_a_file_in_the_way_of_the_runs_is_one_line(command, tmp_path):
    (tmp_path / "runs").write_text("mine")
    assert "a file is in the way" in refused(command, *ONE)
    assert "a file is in the way" in refused(command, "-m", *ONE)
    assert (tmp_path / "runs").read_text() == "mine"


def test_a_multirun_goes_on_with_the_others(command):
    folder_of(*ONE, "seed=0").mkdir(parents=True)
    (folder_of(*ONE, "seed=0") / "result.json").write_text("[]")
    status, said = command("-m", *ONE, "seed=0,1")
    assert status == 2
    assert "is a list" in said
    assert "Traceback" not in said
    assert (folder_of(*ONE, "seed=1") / "result.json").exists()


def test_a_read_only_disk_is_one_line_and_what_is_finished_is_still_read(command, tmp_path):
    words = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if os.name != "posix" or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("needs to be allowed to mount a disk of its own")
    try:
        os.chdir(tmp_path)
        assert command(*ONE)[0] == 0
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        assert "finished already" in command(*ONE)[1]
        assert os.strerror(errno.EROFS) in refused(command, *ONE, "fresh=true")
        assert os.strerror(errno.EROFS) in refused(command, *ONE, "seed=1")
        assert report(["runs"]) == 2
    finally:
        os.chdir("/")
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# --- reports and the memory of trainings ----------------------------------------------------


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, capsys):
    finish(tmp_path / "runs" / "a")
    (tmp_path / "out").write_text("mine")
    assert report([str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "out: File exists (a file is in the way" in said


@pytest.mark.parametrize(
    "change",
    [
        {"accuracy": 10**400},
        {"bytes_up": 10**400},
        {"seconds": -(10**400)},
        {"strategy": "\ud800"},
        {"details": {"label": "\udfff"}},
        {"details": []},
        {"strategy": ["\ud800"]},
    ],
)
def test_a_report_on_strange_results_is_made_or_refused(tmp_path, capsys, change):
    result = finish(tmp_path / "good")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "result.json").write_text(json.dumps({**result, **change}))
    assert report([str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    (tmp_path / "strange" / "result.json").write_text("[" * 100_000)
    assert report([str(tmp_path / "strange")]) == 2
    assert "not valid JSON" in capsys.readouterr().err


def test_a_disk_that_fails_costs_remembered_trainings_alone(tmp_path, monkeypatch):
    """Were it to raise, the node would be left out, and the run's numbers would be others."""
    outcome = _Outcome({"weight": torch.ones(2)}, {"loss": 1.0})
    memory = TrainingMemory(0, tmp_path / "trained")
    with monkeypatch.context() as broken:
        refuse_writing(broken, errno.ENOSPC, "trained")
        memory.keep(b"a", outcome)
    assert memory.recall(b"a") is None
    memory.keep(b"a", outcome)
    assert memory.recall(b"a").metrics == {"loss": 1.0}
    (path,) = (tmp_path / "trained").iterdir()
    path.write_bytes(path.read_bytes()[:20])
    assert memory.recall(b"a") is None
