"""The repository is a Flower app: ``flwr run`` gives what the in-process backend gives."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers_flower_home import BIN, ROOT, flower_of_its_own
from helpers_patience import HANG_SECONDS
from rich.console import Console

from simulations.config import compose_config
from simulations.run import run

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps to stop what it started"),
]
OVERRIDES = "strategy=fedavg rounds=2 nodes=3 partition=iid"


@pytest.fixture
def flower(tmp_path):
    """Environment of a Flower of its own; its SuperLink is stopped afterwards."""
    with flower_of_its_own(tmp_path) as (environment, neutral):
        yield environment, neutral


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


def test_flwr_run_gives_the_numbers_of_the_inprocess_backend(flower, tmp_path):
    environment, neutral = flower
    log = flwr_run(environment, neutral, overrides=OVERRIDES, output=tmp_path / "out")
    assert (tmp_path / "out" / "result.json").exists(), log
    flowers = json.loads((tmp_path / "out" / "result.json").read_text())
    config = compose_config([*OVERRIDES.split(), "progress=false"])
    ours = run(config, tmp_path / "ours", Console(quiet=True))
    for key in ("accuracy", "loss", "bytes_up", "bytes_down", "messages", "rounds"):
        assert flowers[key] == ours[key], key
    # Said at the start and at the end.
    assert log.count(f"folder={tmp_path / 'out'}") >= 2
    assert "Traceback" not in log


def test_results_land_in_the_apps_folder_if_the_superlink_was_started_below_it(flower, tmp_path):
    """The user stands in a checkout of the app; what runs is Flower's copy of it."""
    environment, _ = flower
    checkout = tmp_path / "checkout" / "notes"
    checkout.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", checkout.parent)
    log = flwr_run(environment, checkout, overrides=OVERRIDES)
    (found,) = Path(tmp_path).glob("**/result.json")
    assert found.is_relative_to(checkout.parent / "runs"), log
    assert f"folder={found.parent}" in log
