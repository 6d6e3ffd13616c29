"""What earlier versions wrote is read: spaces, checkpoints, kept replies, states, names of runs.

Interrupted runs go on to the results that the version that began them reached. Numbers that were
computed are compared to what another processor's rounding allows, all others exactly.
"""

import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers_old_nodes import go_on
from rich.console import Console
from safetensors.numpy import load_file

from gems_flwr.__main__ import main
from gems_flwr.runtime.checkpoint import CheckpointFolder, load_arrays
from gems_flwr.server.round_log import RoundLog
from gems_flwr.spaces.space_files import SpaceFolder, load_space, save_space, space_to_arrays
from gems_flwr.wire.model_replies import unpack_name
from gems_flwr.wire.records import to_numpy
from simulations.config import compose_config
from simulations.run import run

ARTIFACTS = Path(__file__).parent / "artifacts"
SPACES = ARTIFACTS / "spaces"
EXPECTED = json.loads((ARTIFACTS / "expected.json").read_text())
MODELS = load_file(ARTIFACTS / "expected.safetensors")


def alike(ours, theirs):
    """Whether two records are the same but for rounding, and for metrics that came later."""
    if isinstance(theirs, dict):
        ours = {k: v for k, v in ours.items() if k in theirs or not k.startswith("residual/")}
        return ours.keys() == theirs.keys() and all(alike(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    if isinstance(theirs, float) and not isinstance(ours, str):
        return math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-6)
    return ours == theirs


def assert_model(name, arrays):
    expected = {k.partition(":")[2]: a for k, a in MODELS.items() if k.startswith(f"{name}:")}
    assert arrays.keys() == expected.keys()
    for key, array in expected.items():
        assert arrays[key].dtype == array.dtype
        np.testing.assert_allclose(arrays[key], array, rtol=1e-4, atol=1e-5, err_msg=key)


def records(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


# --- spaces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED["spaces"])
def test_a_space_file_is_read_to_the_last_bit_and_written_alike(name, tmp_path):
    expected = EXPECTED["spaces"][name]
    space = load_space(SPACES / f"{name}.safetensors")
    arrays, meta = space_to_arrays(space)
    assert meta == expected["meta"]
    for key, array in arrays.items():
        array = np.asarray(array)
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        assert f"{array.dtype}{list(array.shape)} {digest}" == expected["arrays"][key]
    save_space(tmp_path / "again.safetensors", space)
    old, new = load_file(SPACES / f"{name}.safetensors"), load_file(tmp_path / "again.safetensors")
    assert old.keys() == new.keys()
    assert all(np.array_equal(old[key], new[key]) for key in old)


KINDS = sorted({name.rpartition("-")[0] for name in EXPECTED["spaces"]})


@pytest.mark.parametrize("kind", KINDS)
def test_old_space_files_are_aggregated_as_ever(kind, tmp_path, capsys):
    files = [str(SPACES / f"{kind}-{node}.safetensors") for node in range(3)]
    classes = [] if kind.startswith("cone") else ["--classes", "3"]
    output = tmp_path / "model.safetensors"
    assert main(["aggregate", *files, *classes, "-o", str(output)]) in (0, 3)
    assert_model(f"spaces-{kind}", load_file(output))


def test_a_space_is_added_to_what_was_aggregated_before(tmp_path, capsys):
    shutil.copytree(SPACES / "aggregated", tmp_path, dirs_exist_ok=True)
    output = tmp_path / "model.safetensors"
    late = SPACES / "cone_full-2.safetensors"
    assert main(["aggregate", "--add", str(late), "-o", str(output)]) == 0
    assert_model("spaces-added", load_file(output))


# --- runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED["runs"])
def test_an_interrupted_run_goes_on_to_the_result_that_it_would_have_had(name, tmp_path):
    """Those whose nodes keep models start again: simulated nodes end with their process."""
    expected, folder = EXPECTED["runs"][name], tmp_path / "run"
    shutil.copytree(ARTIFACTS / "runs" / name, folder)
    before = (folder / "rounds.jsonl").read_text()
    config = compose_config([*expected["overrides"], "progress=false"])
    run(config, folder, Console(quiet=True))
    # With the seconds in it: a run that begins anew has other lines.
    resumed = (folder / "rounds.jsonl").read_text().startswith(before)
    assert resumed == expected["resumed"]
    assert alike(records(folder / "rounds.jsonl"), expected["rounds"])
    assert_model(f"run-{name}", load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("overrides", EXPECTED["names"])
def test_a_run_is_called_what_it_was_called(overrides):
    """So a finished run is found, and not made again."""
    assert compose_config(overrides.split()).run_name() == EXPECTED["names"][overrides]


CHECKPOINTS = sorted(path.parent for path in ARTIFACTS.rglob("checkpoint.safetensors"))


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda p: str(p.relative_to(ARTIFACTS)))
def test_every_checkpoint_loads_with_its_history(folder):
    groups, meta = load_arrays(folder / "checkpoint.safetensors")
    model = {name: np.zeros(shape, dtype) for name, (dtype, shape) in meta["model"].items()}
    log = RoundLog(folder, strategy=meta["strategy"], seed=meta["seed"], model=model)
    state = log.load()
    assert state.round == meta["round"] > 0
    assert state.arrays.keys() == groups["arrays"].keys()
    assert [record.round for record in state.history] == list(range(meta["round"] + 1))


REPLIES = sorted(ARTIFACTS.rglob("*.reply"))


@pytest.mark.parametrize("path", REPLIES, ids=lambda p: str(p.relative_to(ARTIFACTS / "runs")))
def test_every_kept_reply_is_found_again(path, tmp_path):
    shutil.copytree(path.parent.parent, tmp_path, dirs_exist_ok=True)
    exchange, node, _ = path.stem.rsplit("-", 2)
    assert unpack_name(CheckpointFolder(tmp_path).kept_reply(exchange, node)) == node


def test_the_spaces_of_a_run_are_found_again():
    spaces = SpaceFolder(ARTIFACTS / "runs" / "gems-retrain" / "spaces").load()
    assert sorted(spaces) == ["1", "2"]


# --- strategies whose nodes live on -----------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED["nodes"])
def test_a_strategy_goes_on_with_nodes_that_lived_on_or_lost_everything(name, tmp_path):
    expected, (strategy, _, nodes) = EXPECTED["nodes"][name], name.rpartition("-")
    shutil.copytree(ARTIFACTS / "nodes" / strategy, tmp_path, dirs_exist_ok=True)
    if nodes == "fresh":
        shutil.rmtree(tmp_path / "states", ignore_errors=True)
    result = go_on(strategy, tmp_path)
    assert_model(f"nodes-{name}", to_numpy(result.arrays))
    history = json.loads(json.dumps([record.to_json() for record in result.history]))
    for record in history:
        del record["seconds"]
    assert alike(history, expected["rounds"])
    assert alike(json.loads(json.dumps(result.details)), expected["details"])
