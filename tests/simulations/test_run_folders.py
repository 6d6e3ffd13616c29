"""Run folders: one owner, and strange or failing ones end a command with one clear line."""

import errno
import json
import threading
from pathlib import Path

import pytest
from helpers_commands import run_command
from helpers_patience import HANG_SECONDS
from rich.console import Console

from conftest import refuse_writing
from gems_flwr.core.disk import LOCK_FILE, hold_folder
from gems_flwr.core.folder import CheckpointFolder
from gems_flwr.errors import CheckpointError
from simulations.config import compose_config
from simulations.run import run

ONE = ("strategy=local", "nodes=2", "train.epochs=1", "progress=false")
THREE_ROUNDS = ("rounds=3", "nodes=2", "train.epochs=1", "progress=false")


def finish(folder, *overrides, **options):
    return run(compose_config(list(overrides or ONE)), folder, Console(quiet=True), **options)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return run_command(tmp_path, monkeypatch, capsys)


def folder_of(*overrides):
    return Path("runs") / compose_config(list(overrides)).run_name()


def refused(command, *words):
    """Run a command that must fail; return the one line that it prints."""
    status, printed = command(*words)
    assert status == 2
    assert printed.count("\n") == 1, printed
    return printed


def test_whoever_waits_for_the_same_run_takes_its_result(tmp_path):
    """Two jobs of ``simulations.reproduce`` may need one run: it is made once."""
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


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"[1, 2]", "expected an object with 'details'"),
        (b'{"details": [1]}', "expected an object with 'details'"),
        (b"", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
    ],
)
def test_a_result_that_is_none_is_left_where_it_is(tmp_path, content, complaint):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        finish(tmp_path)
    assert f"{path} is not the result of a run: {complaint}" in str(caught.value)
    assert "fresh=true" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


def test_a_strange_result_ends_the_command_with_one_line(command):
    path = folder_of(*ONE) / "result.json"
    path.mkdir(parents=True)
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


@pytest.mark.parametrize("content", ["", "a: [", "\x00\x01", "rounds: many\n"])
def test_a_strange_config_does_not_cost_the_checkpoint(tmp_path, monkeypatch, content):
    interrupted(tmp_path, monkeypatch)
    whole = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.yaml is not the config of a run") as caught:
        finish(tmp_path, *THREE_ROUNDS)
    assert "\n" not in str(caught.value)
    assert CheckpointFolder(tmp_path).load()[1]["round"] == 1
    (tmp_path / "config.yaml").write_text(whole)
    resumed, unbroken = finish(tmp_path, *THREE_ROUNDS), finish(tmp_path / "new", *THREE_ROUNDS)
    assert resumed["loss"] == unbroken["loss"]


@pytest.mark.parametrize("where", [LOCK_FILE, "config.yaml", "rounds.jsonl", "result.json"])
def test_a_full_disk_ends_the_command_with_one_line_and_the_next_one_goes_on(
    command, monkeypatch, where
):
    folder = folder_of(*THREE_ROUNDS)
    with monkeypatch.context() as broken:
        refuse_writing(broken, errno.ENOSPC, where)
        printed = refused(command, *THREE_ROUNDS)
    assert "No space left on device (free some space)" in printed
    assert not (folder / "result.json").exists()
    if where == "result.json":
        # All rounds are played, and need not be played again.
        assert CheckpointFolder(folder).load()[1]["round"] == 3
    assert command(*THREE_ROUNDS)[0] == 0
    assert json.loads((folder / "result.json").read_text())["rounds"] == 3
