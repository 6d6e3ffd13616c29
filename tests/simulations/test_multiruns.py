"""Multiruns: in parallel as one after the other, failures that count, plugins that are missing."""

import gzip
import json
import math
import os
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers_commands import run_command
from helpers_patience import HANG_SECONDS
from hydra.errors import HydraException
from rich.console import Console
from safetensors.numpy import load_file

import simulations
from simulations.config import compose_config, explain
from simulations.data import images
from simulations.data.archives import read_idx
from simulations.multirun import missing_plugin
from simulations.run import run

ROOT = Path(simulations.__file__).resolve().parent.parent
COMMON = ("nodes=2", "rounds=1", "train.epochs=1")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return run_command(tmp_path, monkeypatch, capsys)


def call(folder, *words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "simulations.run", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=HANG_SECONDS,
    )


def untimed(values):
    """Return nested values without durations."""
    if not isinstance(values, dict):
        return values
    return {k: untimed(v) for k, v in values.items() if "seconds" not in k}


def contents(folder):
    """Return what a run's folder holds, but for how long it took, and by which command."""
    found = {}
    for path in (p for p in folder.rglob("*") if p.is_file() and p.name != "model_card.md"):
        value = path.read_bytes()
        if path.suffix == ".json":
            value = untimed(json.loads(value))
        elif path.suffix == ".jsonl":
            value = [untimed(json.loads(line)) for line in value.splitlines()]
        elif path.suffix == ".safetensors":
            # The order of what it says about itself is random.
            value = {k: v.tobytes() for k, v in load_file(path).items()}
        elif path.name == "config.yaml":
            value = yaml.safe_load(value)
        found[str(path.relative_to(folder))] = value
    return found


@pytest.mark.slow
def test_runs_in_parallel_are_those_made_one_after_the_other_and_a_failed_one_shows(tmp_path):
    """Two runs succeed, two lack their data: all are made, the failures are explained, status 2."""
    done = call(
        *(tmp_path, "-m", *COMMON, "strategy=gems,fedavg", "dataset=digits,mnist"),
        *("data_dir=/nowhere", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for strategy in ("gems", "fedavg"):
        alone = compose_config([*COMMON, f"strategy={strategy}", "data_dir=/nowhere"])
        folder = tmp_path / "alone" / strategy
        run(alone, folder, Console(quiet=True))
        assert contents(tmp_path / "runs" / alone.run_name()) == contents(folder)
        (line,) = [x for x in done.stderr.splitlines() if f"runs/{alone.run_name()}" in x]
        assert line.startswith(strategy)
        (line,) = [
            x
            for x in done.stderr.splitlines()
            if f"strategy={strategy} dataset=mnist data_dir=/nowhere: mnist is not there" in x
        ]


def test_a_failed_run_of_a_search_is_no_score(command):
    status, said = command("search=gems", "dataset=mnist", "data_dir=/nowhere")
    assert status == 2
    assert "search=gems dataset=mnist data_dir=/nowhere: mnist is not there" in said
    assert "best on" not in said


@pytest.mark.slow
def test_without_its_plugin_a_search_says_what_to_install(tmp_path):
    # A package in its place hides the namespace of all plugins.
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "__init__.py").touch()
    done = call(tmp_path, "search=gems", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    wanted = "hydra/sweeper=optuna is a plugin: pip install 'gems-flwr[search]'\n"
    assert done.stderr == wanted


@pytest.mark.parametrize(
    ("launcher", "package"),
    [
        ("slurm", "hydra-submitit-launcher"),
        ("submitit_slurm", "hydra-submitit-launcher"),
        ("ray_cluster", "hydra-ray-launcher"),
    ],
)
def test_without_its_plugin_a_launcher_says_what_to_install(command, launcher, package):
    """These plugins are in no extra, and so not here."""
    status, said = command("-m", f"hydra/launcher={launcher}", "seed=0,1")
    assert status == 2
    assert said == f"hydra/launcher={launcher} is a plugin: pip install {package}\n"


def test_a_launcher_that_nobody_knows_is_hydras_affair():
    with pytest.raises(HydraException) as caught:
        compose_config(["hydra/launcher=nonsense"])
    assert "Could not find 'hydra/launcher/nonsense'" in explain(caught.value)
    assert missing_plugin(str(caught.value)) is None


@pytest.mark.parametrize("launcher", ["slurm", "ray_cluster"])
def test_the_launchers_of_clusters_compose_without_their_plugins(launcher):
    config = compose_config([f"hydra/launcher={launcher}", "strategy=gems"])
    assert config.fingerprint() == compose_config(["strategy=gems"]).fingerprint()


def test_two_runs_of_a_multirun_that_fail_are_both_explained(command):
    """One after the other as well, also if the config is to blame."""
    status, said = command("-m", "seed=0,1", "partition=shards", "partition.shards_per_node=999")
    assert status == 2
    lines = [line for line in said.splitlines() if line.strip()]
    assert [line.split(" ")[0] for line in lines] == ["seed=0", "seed=1"]


# --- at the same time -------------------------------------------------------------------------


@pytest.mark.deep
def test_processes_that_start_the_same_and_other_runs_at_once_leave_whole_results(tmp_path):
    """Of those that start the same run one makes it; the others are told, or find it finished."""
    runs = {"gems": 2, "fedavg": 1}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "simulations.run", *COMMON, f"strategy={strategy}"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for strategy, count in runs.items()
        for _ in range(count)
    ]
    said = [process.communicate(timeout=HANG_SECONDS)[1] for process in started]
    for process, text in zip(started, said, strict=True):
        assert "Traceback" not in text
        told = "is in use by process" in text
        assert process.returncode == (2 if told else 0), text
        assert told or "accuracy" in text or "finished already" in text
    assert sum("accuracy" in text for text in said) == len(runs)
    for strategy in runs:
        alone = compose_config([*COMMON, f"strategy={strategy}"])
        folder = tmp_path / "alone" / strategy
        run(alone, folder, Console(quiet=True))
        assert contents(tmp_path / "runs" / alone.run_name()) == contents(folder)


def test_one_downloads_and_the_others_find_it_whole(tmp_path, monkeypatch):
    """Three at once, each of which would have found nothing; files lie there in pieces first."""
    fetched = []

    class Fetched:
        def __init__(self, folder, train, download=False):
            assert download
            fetched.append(train)
            raw = folder / "MNIST" / "raw"
            raw.mkdir(parents=True, exist_ok=True)
            for part, shape in (("images-idx3", (40, 28, 28)), ("labels-idx1", (40,))):
                path = raw / f"{'train' if train else 't10k'}-{part}-ubyte.gz"
                whole = gzip.compress(idx(np.arange(math.prod(shape)).reshape(shape) % 10))
                path.write_bytes(whole[: len(whole) // 2])
                time.sleep(0.1)
                path.write_bytes(whole)
            self.data = torch.from_numpy(
                read_idx(raw / path.name.replace("labels-idx1", "images-idx3")).copy()
            )
            self.targets = torch.from_numpy(read_idx(path).copy()).long()

    monkeypatch.setattr(images, "_torchvision", lambda kind: Fetched)
    barrier = threading.Barrier(3)

    def load():
        barrier.wait()
        return images.mnist(data_dir=tmp_path, seed=0, public=5, download=True)

    with ThreadPoolExecutor(3) as pool:
        loaded = [each.result() for each in [pool.submit(load) for _ in range(3)]]
    assert fetched == [True, False]
    assert [len(each.train) + len(each.test) for each in loaded] == [75, 75, 75]
    assert not list(tmp_path.glob(".*"))


def idx(array):
    """Return an array in the format of MNIST's files."""
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()
