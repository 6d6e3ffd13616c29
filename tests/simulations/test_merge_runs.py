"""The peers of GEMS as whole runs on the digits."""

import json

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from simulations.config import compose_config
from simulations.run import run

QUIET = Console(quiet=True)
SHORT = ["strategy=merge", "train.epochs=8", "progress=false"]


def finish(folder, *overrides):
    return run(compose_config([*SHORT, *overrides]), folder, QUIET)


@pytest.mark.parametrize("method", ["regmean", "fisher", "kfac", "matching"])
@pytest.mark.parametrize(
    "model", [["model=logistic"], ["model=mlp", "model.hidden=[12,8]", "own_initial_weights=true"]]
)
def test_every_peer_runs_on_nodes_that_have_two_labels_each(tmp_path, method, model):
    result = finish(tmp_path, f"strategy.method={method}", *model)
    assert result["nodes_failed"] == 0
    assert result["messages"] == 2 * 5
    assert result["details"]["method"] == result["details"]["label"] == method
    assert json.loads((tmp_path / "result.json").read_text()) == result
    merged = load_file(tmp_path / "model.safetensors")
    assert all(np.isfinite(array).all() for array in merged.values())
    # Matching sends what averaging does; the others send more than the model alone.
    model_bytes = 4 * sum(array.size for array in merged.values())
    beyond = result["bytes_up"] / 5 - model_bytes
    assert beyond < 2000 if method == "matching" else beyond > model_bytes / 2


@pytest.mark.parametrize(
    "method", ["regmean", "fisher", "kfac", "matching", "fedfisher_diagonal", "fedfisher_kfac"]
)
def test_every_peer_merges_convolutional_networks(tmp_path, method):
    """A run over messages, with the digits' public sample where there is something to choose."""
    choose = [] if method in ("fisher", "matching") else ["strategy.choose=50"]
    steps = ["strategy.steps=200"] if method.startswith("fedfisher") else []
    overrides = ["model=cnn", "nodes=2", "train.epochs=1", *choose, *steps]
    result = finish(tmp_path, f"strategy.method={method}", *overrides)
    assert result["nodes_failed"] == 0
    merged = load_file(tmp_path / "model.safetensors")
    assert sorted(array.ndim for array in merged.values()) == [1] * 4 + [2, 2, 4, 4]
    assert all(np.isfinite(array).all() for array in merged.values())
    if choose:
        assert 0 <= result["details"]["public_score"] <= 1


@pytest.mark.slow
def test_half_the_bytes_of_a_model_are_room_for_its_statistics(tmp_path):
    """FedFisher's promise: no more bytes than the average's model, records apart."""
    common = ["model=cnn", "nodes=2", "train.epochs=1", "strategy.steps=100"]
    result = finish(
        tmp_path,
        "strategy.method=fedfisher_kfac",
        "strategy.statistics_share=0.5",
        "strategy.compress=float16",
        *common,
    )
    merged = load_file(tmp_path / "model.safetensors")
    model_bytes = 4 * sum(array.size for array in merged.values())
    assert result["nodes_failed"] == 0
    assert 0.8 * model_bytes < result["bytes_up"] / 2 < model_bytes + 3000


@pytest.mark.slow
def test_least_squares_and_kronecker_factors_beat_the_average_of_logistic_models(tmp_path):
    """Two of ten labels per node: the average forgets most of them (matching is the average)."""
    accuracy = {
        method: finish(tmp_path / method, f"strategy.method={method}")["accuracy"]
        for method in ("matching", "regmean", "kfac")
    }
    assert accuracy["matching"] + 0.2 < min(accuracy["regmean"], accuracy["kfac"])


@pytest.mark.slow
def test_one_seed_repeats_a_run_with_drawn_labels_and_another_does_not(tmp_path):
    overrides = ["strategy.method=kfac", "strategy.labels=sampled", "train.epochs=3"]
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        finish(tmp_path / name, *overrides, f"seed={seed}")
        weights.append(load_file(tmp_path / name / "model.safetensors")["1.weight"])
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])
