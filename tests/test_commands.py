"""A user's mistake ends a command with a line that says what is wrong, never with a traceback."""

import contextlib
import importlib.util
import inspect
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.common.logger import log

import gems_flwr
import simulations.run
from gems_flwr import GemsError, OptionError, build_cone, save_space
from gems_flwr.__main__ import main as gems_flwr_main
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.radius import Radius
from simulations.data.archives import MissingDataError
from simulations.deployment.federation import DeploymentError
from simulations.report.__main__ import main as report_main
from simulations.report.runs import NoRunsError

ROOT = Path(__file__).resolve().parent.parent


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


def ends(main, *arguments):
    """Return the status of a command, whichever way it tells it."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as left:  # argparse
        return left.code


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Space files: a cone, two balls that do not meet, and one that is none."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save_space("cone.safetensors", build_cone(torch.randn(200, 3), torch.arange(200) % 2, 2))
    for name, place in (("here", 0.0), ("there", 9.0)):
        radius = Radius(0.1, "worst", 0.5, 3)
        save_space(f"{name}.safetensors", BallSpace(np.full(8, place), radius))
    Path("bad.safetensors").write_text("no space")
    Path("full.safetensors").mkdir()
    return tmp_path


OUT = ("-o", "model.safetensors")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "arguments are required"),
        (("agregate",), 2, "invalid choice"),
        (("aggregate", "cone.safetensors"), 2, "required: -o"),
        (("aggregate", "gone.safetensors", *OUT), 2, "gone.safetensors"),
        (("aggregate", "bad.safetensors", *OUT), 2, "bad.safetensors"),
        (("aggregate", "full.safetensors", *OUT), 2, "full"),
        (("aggregate", "cone.safetensors", "-o", "."), 2, "is a folder"),
        (("aggregate", "cone.safetensors", "-o", "full.safetensors"), 2, "is a folder"),
        (("aggregate", "cone.safetensors", "-o", "cone.safetensors"), 2, "one of the space files"),
        (("aggregate", "cone.safetensors", "-o", "/proc/no/m.safetensors"), 2, "/proc/no"),
        (("aggregate", "cone.safetensors", *OUT, "--keys", "w", "w"), 2, "different names"),
        (("aggregate", "cone.safetensors", *OUT, "--ridge", "-1"), 2, "ridge"),
        (("aggregate", "cone.safetensors", *OUT, "--ridge", "much"), 2, "invalid float"),
        (("aggregate", "here.safetensors", *OUT), 2, "how many classes"),
        (("aggregate", "here.safetensors", *OUT, "--classes", "0"), 2, "at least 1 class"),
        (("aggregate", "here.safetensors", *OUT, "--classes", "3"), 2, "3 classes"),
        (
            ("aggregate", "here.safetensors", *OUT, "--classes", "2", "--select", "objective"),
            2,
            "only cones",
        ),
        (
            ("aggregate", "here.safetensors", "there.safetensors", *OUT, "--on-empty", "fail"),
            3,
            "proved to be empty",
        ),
        (("show", "gone.safetensors"), 2, "gone.safetensors"),
        (("show", "bad.safetensors"), 2, "bad.safetensors"),
    ],
)
def test_a_mistake_with_files_is_named(files, capsys, arguments, status, said):
    assert ends(gems_flwr_main, *arguments) == status
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_an_input_is_not_overwritten(files):
    before = Path("cone.safetensors").read_bytes()
    assert ends(gems_flwr_main, "aggregate", "cone.safetensors", "-o", "cone.safetensors") == 2
    assert Path("cone.safetensors").read_bytes() == before


def test_an_interrupt_is_no_traceback(files, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gems_flwr.__main__.load_space", interrupted)
    assert ends(gems_flwr_main, "show", "cone.safetensors") == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.fixture
def flower(tmp_path, monkeypatch):
    """A Flower home of its own, with a connection to a SuperLink that is not there."""
    home = tmp_path / "flower"
    home.mkdir()
    connection = '[superlink]\ndefault = "gone"\n\n[superlink.gone]\n'
    connection += 'address = "127.0.0.1:1"\ninsecure = true\n'
    (home / "config.toml").write_text(connection)
    monkeypatch.setenv("FLWR_HOME", str(home))
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-app", "gone"), "no-app"),
        ((ROOT, "nowhere"), "'nowhere' not found"),
        ((ROOT, "gone"), "SuperLink is unavailable"),
        ((ROOT, "gone", "-c", "x==="), "invalid format"),
    ],
)
def test_what_flower_refuses_is_said_in_one_line(flower, capsys, arguments, said):
    assert ends(gems_flwr_main, "submit", *arguments) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ((".",), "gems-flwr submit ."),
        (("my-app", "my-superlink"), "gems-flwr submit my-app"),
        (("-c", "rounds=3"), "gems-flwr submit APP"),
    ],
)
def test_whoever_submits_an_app_by_the_simulations_command_is_told_the_other(
    capsys, arguments, instead
):
    assert ends(gems_flwr_main, "run", *arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(instead)
    assert told.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "report", "reproduce", "driving"])
def test_without_the_extra_a_command_says_what_to_install(capsys, monkeypatch, command):
    there = importlib.util.find_spec
    gone = ("hydra", "ray")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in gone else there(name)
    )
    assert ends(gems_flwr_main, command) == 2
    told = capsys.readouterr().err
    assert told.startswith("pip install 'gems-flwr[simulations]'")
    assert "hydra, ray" in told
    assert told.count("\n") == 1


@pytest.mark.slow
def test_the_command_finds_the_simulations_wherever_the_user_is(tmp_path):
    """Also where the user has a package of the same name; runs land in the user's folder."""
    (tmp_path / "simulations").mkdir()
    (tmp_path / "simulations" / "__init__.py").write_text("raise ImportError('not this one')")
    done = subprocess.run(
        [sys.executable, "-m", "gems_flwr", "run", "-m", "strategy=gems", *SMALL, "seed=0,1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/**/result.json"))) == 2


@pytest.fixture
def submitted(monkeypatch):
    """What ``flwr`` is asked to submit; it completes at once."""
    asked = []

    class Completes:
        def __init__(self, superlink):
            self.superlink = superlink

        def submit(self, app, *options):
            asked.append((app, self.superlink, *options))
            return 7

        def follow(self, run_id):
            assert run_id == 7

        def wait(self, run_id):
            return "finished:completed"

    monkeypatch.setattr("gems_flwr.__main__.FlowerCli", Completes)
    return asked


def test_an_app_is_told_to_write_below_its_own_folder(flower, submitted, tmp_path, capsys):
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text('[tool.flwr.app.config]\noutput = ""\n')
    assert ends(gems_flwr_main, "submit", "app", "gone", "-c", "rounds=3") == 0
    where = f'output="{app}/runs/"'
    assert submitted == [("app", "gone", "-c", "rounds=3", "-c", where)]
    assert f"results will be below {app}/runs/" in capsys.readouterr().out
    assert ends(gems_flwr_main, "submit", "app", "gone", "-c", "output='/srv'") == 0
    assert submitted[1] == ("app", "gone", "-c", "output='/srv'")


SMALL = ("dataset=digits", "nodes=3", "rounds=1", "progress=false")
BALLS = ("strategy=gems", "strategy/space=ball", "strategy.space.epsilon=0.9")
BALLS = (*BALLS, "strategy.space.directions=20")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run ``python -m simulations.run`` in this process; return its status and what it said."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["simulations.run", *SMALL, *words])
        with same_logging():
            status = simulations.run.main()
        return status, capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("strategy=gem",), "Could not find 'strategy/gem'"),
        (("stategy=gems",), "stategy"),
        (("strategy.fraction_train=2",), "fraction_train must be between 0 and 1"),
        (("strategy.fraction_train=all",), "strategy.fraction_train"),
        (("strategy=gems", "strategy.on_empty=hope"), "on_empty must be one of"),
        (("strategy=gems", "strategy/space=ball", "strategy.space.rank=20"), "rank"),
        (("strategy=merge", "strategy.method=magic"), "method must be one of"),
        (("strategy=merge", "strategy.choose=-1"), "choose must be from 0"),
        (("strategy=dynamic", "strategy.delta=0"), "delta must be"),
        (("nodes=0",), "nodes must be at least 1"),
        (("nodes=5000",), "nodes must be"),
        (("train.batch_size=0",), "batch_size"),
        (("strategy.min_nodes=9",), "must not be below min_nodes (9)"),
        (("dataset=mnist", "data_dir=/nowhere"), "/nowhere"),
        (("hydra.run.dir=/proc/no",), "/proc/no"),
        (("strategy",), "strategy"),
    ],
)
def test_a_mistake_in_a_run_is_named(run, words, said):
    status, told = run(*words)
    assert status == 2
    assert said in told
    assert "Traceback" not in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named(run):
    status, told = run("backend.device=cuda")
    assert status == 2
    assert "device=cuda was asked for, but PyTorch finds none" in told
    assert "Traceback" not in told


def test_on_empty_fail_is_one_line(run):
    status, told = run(*BALLS, "strategy.on_empty=fail")
    assert status == 2
    assert told.count("\n") == 1
    assert "the intersection of 3 spaces is proved to be empty" in told


@pytest.mark.parametrize("name", ["result.json", "checkpoint.safetensors"])
def test_a_damaged_file_of_a_run_is_named(run, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("{")
    status, told = run("hydra.run.dir=run")
    assert status == 2
    assert name in told
    assert "Traceback" not in told


def test_a_damaged_data_file_is_named(run, tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{part}-ubyte.gz").write_text("no archive")
    status, told = run("dataset=mnist", f"data_dir={tmp_path}")
    assert status == 2
    assert "not a complete gzip file" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    """Interrupted as soon as it has begun to write: the shell's status for that, and one line."""
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
        _, told = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Interrupted" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: None, "gone"),
        (lambda: Path("gone").mkdir(), "gone"),
        (lambda: Path("gone").write_text("a file"), "gone"),
    ],
)
def test_a_report_on_nothing_says_where_it_looked(tmp_path, monkeypatch, capsys, make, said):
    monkeypatch.chdir(tmp_path)
    make()
    assert ends(report_main, "gone") == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_a_report_that_cannot_be_written_says_so(run, tmp_path, capsys):
    assert run("hydra.run.dir=run")[0] == 0
    assert ends(report_main, tmp_path / "run", "--output", "/proc/no") == 2
    told = capsys.readouterr().err
    assert "/proc/no" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_flowers_log_of_a_failed_server_has_one_line_for_our_errors(caplog, level):
    """Flower logs what a ServerApp raised in this way; at the level DEBUG all of it is shown."""
    flower = logging.getLogger("flwr")
    before, flower.propagate = flower.level, True
    flower.setLevel(level)
    try:
        for error in (GemsError("the spaces do not meet"), KeyError("a bug")):
            try:
                raise error
            except Exception as raised:
                log(logging.ERROR, "%s raised an exception", "ServerApp", exc_info=raised)
    finally:
        flower.setLevel(before)
        flower.propagate = False
    ours, other = caplog.text.split("KeyError")[0], caplog.text
    assert "the spaces do not meet" in ours
    first = ours.split("ServerApp raised an exception")[1]
    assert ("Traceback" in first) == (level == logging.DEBUG)
    assert "Traceback" in other  # a bug is shown in full


def test_there_is_one_family_of_errors():
    family = [getattr(gems_flwr, name) for name in gems_flwr.__all__ if name.endswith("Error")]
    family += [MissingDataError, NoRunsError, DeploymentError, simulations.run.ConfigError]
    assert all(inspect.isclass(each) and issubclass(each, GemsError) for each in family)
    assert issubclass(OptionError, ValueError)
