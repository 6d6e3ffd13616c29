"""Data that lies with the nodes: what is read, what is refused, and a server without any."""

import json

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp

from gems_flwr.runtime.inprocess_grid import InProcessGrid
from simulations import app as flower_app
from simulations.config import ConfigError, compose_config
from simulations.data.archives import MissingDataError
from simulations.data.own_data import own, read_own_data
from simulations.experiment.experiment import experiment_of

SHAPE = "dataset=own dataset.input_shape=[4] dataset.classes=3"


def blobs(count, seed, classes=(0, 1, 2)):
    rng = np.random.default_rng(seed)
    labels = rng.choice(classes, size=count)
    centres = np.eye(3, 4) * 4
    return (centres[labels] + rng.normal(size=(count, 4))).astype(np.float32), labels


def write(path, features, labels):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, features=features, labels=labels)


@pytest.fixture
def folders(tmp_path):
    """Three nodes that know one class each, in folders of their own."""
    paths = []
    for node in range(3):
        path = tmp_path / f"node-{node}"
        write(path / "data.npz", *blobs(80, node, classes=(node,)))
        paths.append(path)
    return paths


def run_app(overrides, folders, output, node_config=None):
    """Run the repository's Flower app on nodes with such a --node-config."""
    run_config = {"overrides": overrides, "output": str(output)}
    configs = [(node_config or (lambda k: {"data": str(folders[k])}))(k) for k in range(3)]
    grid = InProcessGrid(flower_app.client_app, configs, run_config)
    server: ServerApp = flower_app.server_app
    context = Context(
        run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config
    )
    server(grid, context)
    return json.loads((output / "result.json").read_text())


def test_gems_learns_from_folders_with_a_test_file_at_the_server(folders, tmp_path):
    write(tmp_path / "test.npz", *blobs(300, 9))
    result = run_app(
        f"strategy=gems nodes=3 {SHAPE} dataset.test={tmp_path / 'test.npz'}",
        folders,
        tmp_path / "out",
    )
    assert result["accuracy"] > 0.9
    assert result["nodes_failed"] == 0


def test_a_server_without_data_leaves_scoring_to_the_nodes(folders, tmp_path):
    result = run_app(
        f"strategy=gems strategy.verify=true nodes=3 {SHAPE}", folders, tmp_path / "out"
    )
    assert result["accuracy"] is None
    scores = result["details"]["node_scores"]
    assert len(scores) == 3
    assert min(scores.values()) > 0.8


def test_learners_on_streams_pass_over_their_own_data(folders, tmp_path):
    result = run_app(f"strategy=dynamic rounds=30 nodes=3 {SHAPE}", folders, tmp_path / "out")
    assert result["details"]["batches"] == 90
    assert result["details"]["correct"] > 0.5 * 90


def test_a_node_that_does_not_know_its_data_says_how_to_tell_it(folders, tmp_path):
    def forgetful(node):
        return {"name": "a"} if node == 0 else {"data": str(folders[node])}

    result = run_app(f"strategy=gems nodes=3 {SHAPE}", folders, tmp_path / "out", forgetful)
    [failure] = result["details"]["failures"]
    assert failure["node"] == "a"
    assert "--node-config \"data='/folder'\"" in failure["reason"]


def test_a_partition_of_nothing_is_refused():
    text = compose_config(SHAPE.split()).to_json()
    with pytest.raises(ConfigError, match="has no shares to divide"):
        experiment_of(text).task(0)


def test_a_validation_file_is_the_validation_part(tmp_path):
    write(tmp_path / "data.npz", *blobs(50, 0))
    write(tmp_path / "validation.npz", *blobs(7, 1))
    text = compose_config(SHAPE.split()).to_json()
    [share] = experiment_of(text, str(tmp_path)).shares
    assert (len(share.train), len(share.validation)) == (50, 7)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MissingDataError, match=r"there is no .*data\.npz.*'features'"):
        read_own_data(tmp_path, own(input_shape=[4], classes=3))


features, labels = blobs(6, 0)
BAD = {
    "another shape": (features[:, :3], labels, r"shape \(6, 3\), expected rows of \(4,\)"),
    "no rows": (features[:0], labels[:0], r"shape \(0, 4\)"),
    "NaN": (features * np.nan, labels, "NaN or infinity"),
    "a label too high": (features, labels + 3, "labels must be 0 … 2"),
    "labels that are no numbers": (features, labels + 0.5, "labels whole numbers"),
    "too few labels": (features, labels[:-1], "one row of features per label"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_file_with_something_else_is_refused_by_name(fault, tmp_path):
    rows, classes, complaint = BAD[fault]
    write(tmp_path / "data.npz", rows, classes)
    with pytest.raises(ValueError, match=rf"data\.npz: .*{complaint}"):
        read_own_data(tmp_path, own(input_shape=[4], classes=3))


@pytest.mark.parametrize(
    ("override", "complaint"),
    [("dataset.classes=1", "at least 2"), ("dataset.input_shape=[0]", "lengths from 1")],
)
def test_an_impossible_description_is_refused(override, complaint):
    config = compose_config([*SHAPE.split(), override])
    with pytest.raises(ConfigError, match=complaint):
        _ = experiment_of(config.to_json()).dataset
