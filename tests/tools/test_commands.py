"""A user's mistake ends a command with a line that says what is wrong, never with a traceback."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flwr.common.logger import log

import simulations.run
from gems_flwr import errors
from simulations.report.__main__ import main as report

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("dataset=digits", "nodes=3", "rounds=1", "progress=false")


@contextlib.contextmanager
def same_logging():
    """Undo what Hydra does to the loggers of a process that has other things to do afterwards."""
    loggers = [logging.getLogger(name) for name in [None, *logging.root.manager.loggerDict]]
    before = [(each.disabled, each.level, each.propagate, each.handlers[:]) for each in loggers]
    try:
        yield
    finally:
        for each, (disabled, level, propagate, handlers) in zip(loggers, before, strict=True):
            each.disabled, each.level, each.propagate = disabled, level, propagate
            each.handlers[:] = handlers


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run ``gems-flwr run`` in this process; return its status and what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["simulations.run", *SMALL, *words])
        with same_logging():
            status = simulations.run.main()
        return status, capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("strategy=gem",), "Could not find 'strategy/gem'"),
        (("stategy=gems",), "stategy"),
        (("strategy.fraction_train=2",), "fraction_train must be between 0 and 1"),
        (("strategy.fraction_train=all",), "strategy.fraction_train"),
        (("strategy=gems", "strategy/space=ball", "strategy.space.rank=20"), "rank"),
        (("nodes=0",), "nodes must be at least 1"),
        (("nodes=5000",), "nodes must be"),
        (("strategy.min_nodes=9",), "min_nodes"),
        (("dataset=mnist", "data_dir=/nowhere"), "/nowhere"),
        (("hydra.run.dir=/proc/no",), "/proc/no"),
        (("strategy",), "strategy"),
    ],
)
def test_a_mistake_in_a_run_is_named(run, words, reason):
    status, printed = run(*words)
    assert status == 2
    assert reason in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("name", ["result.json", "checkpoint.safetensors"])
def test_a_damaged_file_of_a_run_is_named(run, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("{")
    status, printed = run("hydra.run.dir=run")
    assert status == 2
    assert name in printed
    assert "Traceback" not in printed


def test_a_report_on_nothing_and_one_that_cannot_be_written_say_where(run, tmp_path, capsys):
    for make in (lambda: None, (tmp_path / "gone").mkdir):
        make()
        assert report(["gone"]) == 2
        assert "gone" in capsys.readouterr().err
    assert run("hydra.run.dir=run")[0] == 0
    assert report([str(tmp_path / "run"), "--output", "/proc/no"]) == 2
    printed = capsys.readouterr().err
    assert "/proc/no" in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_the_command_finds_the_simulations_wherever_the_user_is(tmp_path):
    """Also where the user has a package of the same name; runs land in the user's folder."""
    (tmp_path / "simulations").mkdir()
    (tmp_path / "simulations" / "__init__.py").write_text("raise ImportError('not this one')")
    words = [sys.executable, "-m", "gems_flwr", "run", "-m", "strategy=gems", *SMALL, "seed=0,1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/**/result.json"))) == 2


@pytest.mark.slow
def test_an_interrupted_run_says_so_and_ends_with_the_shells_status(tmp_path):
    """Interrupted as soon as it has started to write."""
    words = ["strategy=fedavg", *SMALL, "rounds=5000", "hydra.run.dir=run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "simulations.run", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        while not (tmp_path / "run" / "rounds.jsonl").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Interrupted" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_flowers_log_of_a_failed_server_has_one_line_for_our_errors(caplog, level):
    """Flower logs what a ServerApp raised in this way; at the level DEBUG all of it is shown."""
    flower = logging.getLogger("flwr")
    before, flower.propagate = flower.level, True
    flower.setLevel(level)
    try:
        for error in (errors.GemsError("the spaces do not meet"), KeyError("a bug")):
            try:
                raise error
            except Exception as raised:
                log(logging.ERROR, "%s raised an exception", "ServerApp", exc_info=raised)
    finally:
        flower.setLevel(before)
        flower.propagate = False
    ours = caplog.text.split("KeyError")[0]
    assert "the spaces do not meet" in ours
    first = ours.split("ServerApp raised an exception")[1]
    assert ("Traceback" in first) == (level == logging.DEBUG)
    assert "Traceback" in caplog.text  # a bug is shown in full
