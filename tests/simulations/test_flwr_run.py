"""The repository is a Flower app: ``flwr run`` gives what the in-process backend gives."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers_flower_home import BIN, ROOT, flower_of_its_own
from helpers_patience import HANG_SECONDS
from rich.console import Console

from simulations.app import results_folder
from simulations.config import compose_config
from simulations.run import run

OVERRIDES = "strategy=fedavg rounds=2 nodes=3 partition=iid"
NAME = "digits/fedavg-s0"
PROJECT = '[project]\nname = "{}"\n[tool.flwr.app]\npublisher = "{}"\n'


def flwr_run(environment, start_in, **config):
    """Call ``flwr run`` in a folder, from where it also starts the SuperLink; return the log."""
    values = " ".join(f"{key}='{value}'" for key, value in config.items())
    done = subprocess.run(
        [
            *(BIN / "flwr", "run", ROOT, "--stream", "-c", values),
            *("--federation-config", "num-supernodes=3 client-resources-num-cpus=1"),
        ],
        cwd=start_in,
        env={**environment, "PWD": str(start_in)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    return done.stdout + done.stderr


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps to stop what it started")
def test_flwr_run_gives_the_inprocess_numbers_and_writes_below_the_apps_folder(tmp_path):
    """The user stands in a checkout of the app; what runs is Flower's copy of it."""
    checkout = tmp_path / "checkout" / "notes"
    checkout.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", checkout.parent)
    with flower_of_its_own(tmp_path) as (environment, _):
        log = flwr_run(environment, checkout, overrides=OVERRIDES)
    (found,) = Path(tmp_path).glob("**/result.json")
    assert found.is_relative_to(checkout.parent / "runs"), log
    flowers = json.loads(found.read_text())
    config = compose_config([*OVERRIDES.split(), "progress=false"])
    ours = run(config, tmp_path / "ours", Console(quiet=True))
    for key in ("accuracy", "loss", "bytes_up", "bytes_down", "messages", "rounds"):
        assert flowers[key] == ours[key], key
    # At the start and at the end.
    assert log.count(f"folder={found.parent}") >= 2
    assert "Traceback" not in log


def app(folder, name="my-app", publisher="me"):
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(name, publisher))
    return folder


@pytest.fixture
def bundle(tmp_path):
    """Where Flower has unpacked the app."""
    return app(tmp_path / "home" / "apps" / "me.my-app")


@pytest.fixture
def start_in(monkeypatch):
    """Return a function that starts the SuperLink in a folder, as a shell there would."""

    def start_in(folder, word=None):
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PWD", str(word or folder))
        return folder

    return start_in


def test_a_given_folder_is_taken_and_one_with_a_slash_takes_many_runs(bundle, tmp_path, start_in):
    here = start_in(app(tmp_path / "project"))
    assert results_folder("/srv/out", NAME, bundle=bundle) == Path("/srv/out")
    assert results_folder("/srv/out/", NAME, bundle=bundle) == Path("/srv/out", NAME)
    assert results_folder("out", NAME, bundle=bundle) == here / "out"


def test_else_it_is_the_apps_folder_or_where_the_superlink_was_started(bundle, tmp_path, start_in):
    """Also by a link to another disk, and past a project file that cannot be read."""
    project, disk = app(tmp_path / "project"), tmp_path / "disk"
    disk.mkdir()
    (project / "linked").symlink_to(disk)
    (project / "broken").mkdir()
    (project / "broken" / "pyproject.toml").write_text("[project\n")
    for below in (".", "notebooks/first", "linked", "broken"):
        start_in(disk if below == "linked" else project / below, word=project / below)
        assert results_folder("", NAME, bundle=bundle) == project / "runs" / NAME, below
    elsewhere = app(tmp_path / "a", "other-app", "me"), app(tmp_path / "b", "my-app", "somebody")
    for here in (*elsewhere, tmp_path / "empty"):
        start_in(here)
        assert results_folder("", NAME, bundle=bundle) == here / "runs" / NAME, here
