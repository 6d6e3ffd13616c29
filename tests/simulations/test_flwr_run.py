"""The repository is a Flower app: ``flwr run`` gives what the in-process backend gives."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_patience import HANG_SECONDS
from rich.console import Console

from simulations.config import compose_config
from simulations.deployment.federation import free_port
from simulations.run import run

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def stop_superlink(home):
    """End the SuperLink that belongs to a FLWR_HOME: politely, then not."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        listing = subprocess.run(["ps", "axwwo", "pid,args"], capture_output=True, text=True)
        for line in listing.stdout.splitlines():
            pid, _, arguments = line.strip().partition(" ")
            if "flower-superlink" in arguments and str(home) in arguments:
                os.kill(int(pid), how)
        time.sleep(2)


@pytest.fixture
def flower(tmp_path):
    """Environment of a Flower of its own; its SuperLink is stopped afterwards."""
    home, neutral = tmp_path / "home", tmp_path / "neutral"
    home.mkdir()
    neutral.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
    }
    yield environment, neutral
    stop_superlink(home)


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps to stop what it started")
def test_flwr_run_gives_the_numbers_of_the_inprocess_backend(flower, tmp_path):
    environment, neutral = flower
    overrides = "strategy=fedavg rounds=2 nodes=3 partition=iid"
    done = subprocess.run(
        [
            BIN / "flwr",
            "run",
            ROOT,
            "--stream",
            "--federation-config",
            "num-supernodes=3 client-resources-num-cpus=1",
            "-c",
            f"overrides='{overrides}' output='{tmp_path / 'out'}'",
        ],
        cwd=neutral,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert (tmp_path / "out" / "result.json").exists(), done.stdout + done.stderr
    flowers = json.loads((tmp_path / "out" / "result.json").read_text())
    config = compose_config([*overrides.split(), "progress=false"])
    ours = run(config, tmp_path / "ours", Console(quiet=True))
    for key in ("accuracy", "loss", "bytes_up", "bytes_down", "messages", "rounds"):
        assert flowers[key] == ours[key], key
