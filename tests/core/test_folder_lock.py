"""A run folder has one owner: the second run is told who, and a dead owner holds nothing."""

import errno
import multiprocessing
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers_patience import HANG_SECONDS

from conftest import initial_arrays, toy_app
from gems_flwr import FedAvg, InProcessGrid
from gems_flwr.core import disk as lock
from gems_flwr.core.disk import LOCK_FILE, check_held, hold_folder
from gems_flwr.errors import DiskError, FolderInUseError

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from gems_flwr.core.disk import hold_folder
with hold_folder(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Start a process that holds a folder until its input ends."""
    started = []

    def start(folder):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.stdin.close()
        process.wait(HANG_SECONDS)
        process.stdout.close()


def fed_avg(folder, nodes=3, rounds=2, resume=False, **options):
    strategy = FedAvg(fraction_evaluate=0.0, checkpoint_dir=folder, **options)
    return strategy.start(InProcessGrid(toy_app(), nodes), initial_arrays(), rounds, resume=resume)


def test_the_second_run_is_told_in_one_line_who_has_the_folder(holder, tmp_path):
    process = holder(tmp_path / "run")
    who = (tmp_path / "run" / LOCK_FILE).read_text()
    assert who.startswith(f"process {process.pid} on {platform.node()} since 2")
    with pytest.raises(FolderInUseError) as caught:
        fed_avg(tmp_path / "run")
    said = str(caught.value)
    assert "\n" not in said
    assert f"{tmp_path / 'run'} is in use by {who}" in said
    assert "choose another folder" in said
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK_FILE]


def test_an_owner_that_was_killed_holds_nothing(holder, tmp_path):
    process = holder(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / LOCK_FILE).exists()
    fed_avg(tmp_path)
    assert not (tmp_path / LOCK_FILE).exists()


def count_up(folder, times):
    """Read a number and write it back plus one, which only works one at a time."""
    for _ in range(times):
        with hold_folder(folder, wait=True):
            path = Path(folder) / "number"
            path.write_text(str(int(path.read_text()) + 1))


def test_whoever_waits_gets_the_folder_alone(tmp_path, monkeypatch):
    """Each owner removes the lock file that the others wait for: none may hold the removed one."""
    monkeypatch.setattr(lock, "_POLL_SECONDS", 0.001)
    (tmp_path / "number").write_text("0")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=count_up, args=(tmp_path, 100)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(HANG_SECONDS)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "number").read_text() == "400"


def test_a_run_within_whoever_holds_its_folder_goes_on(tmp_path):
    with hold_folder(tmp_path / "run"):
        fed_avg(tmp_path / "." / "run")
        assert (tmp_path / "run" / LOCK_FILE).exists()
        with pytest.raises(ZeroDivisionError), hold_folder(tmp_path / "run"):
            raise ZeroDivisionError
        check_held(tmp_path / "run")
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def in_a_thread(task):
    """Return what a task raises in a thread of its own; None if nothing."""
    raised = []

    def work():
        try:
            task()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(HANG_SECONDS)
    return raised[0] if raised else None


def test_another_run_in_the_same_process_is_refused_too(tmp_path):
    with hold_folder(tmp_path):
        error = in_a_thread(lambda: fed_avg(tmp_path))
    assert isinstance(error, FolderInUseError)
    assert f"process {os.getpid()} " in str(error)
    assert in_a_thread(lambda: fed_avg(tmp_path)) is None


def test_a_folder_that_was_made_for_nothing_goes(tmp_path):
    with hold_folder(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a" / "b").exists()
    (tmp_path / "mine").mkdir()
    with hold_folder(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").exists()


def test_a_folder_that_was_removed_or_replaced_is_noticed(tmp_path):
    folder = tmp_path / "run"
    with hold_folder(folder):
        check_held(folder)
        folder.rename(tmp_path / "elsewhere")
        with pytest.raises(DiskError, match="removed or replaced"):
            check_held(folder)
        folder.mkdir()
        (folder / LOCK_FILE).touch()
        with pytest.raises(DiskError, match="removed or replaced"):
            check_held(folder)
    # It is not ours to remove.
    assert (folder / LOCK_FILE).exists()


def test_a_file_system_without_locks_costs_a_warning(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="nothing keeps a second run out"):
        fed_avg(tmp_path)


@pytest.mark.parametrize("text", ["", "process 1\x1b[2J", "x" * 4000])
def test_an_owner_who_cannot_be_read_is_still_an_owner(tmp_path, text):
    with hold_folder(tmp_path):
        (tmp_path / LOCK_FILE).write_text(text)
        error = in_a_thread(lambda: fed_avg(tmp_path))
    assert "in use by another process:" in str(error)
