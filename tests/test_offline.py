"""Aggregation by files, as a user types it."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from gems_flwr.__main__ import main
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.layer_radius import build_ball
from gems_flwr.radii.quality import Quality
from gems_flwr.spaces.space_files import load_space, save_space

CENTERS = np.array([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]])


def data(labels, seed, count=80):
    rng = np.random.default_rng(seed)
    y = np.repeat(labels, count)
    return (
        torch.from_numpy(CENTERS[y] + rng.normal(size=(len(y), 3))).float(),
        torch.from_numpy(y),
    )


@pytest.fixture
def files(tmp_path):
    """Three nodes with two classes of three each, as cones."""
    paths = []
    for node, labels in enumerate([[0, 1], [1, 2], [0, 2]]):
        path = tmp_path / f"node-{node}.safetensors"
        save_space(path, build_cone(*data(labels, node), 3))
        paths.append(path)
    return paths


def accuracy(path, keys=("weight", "bias")):
    arrays = load_file(path)
    x, y = data([0, 1, 2], 50)
    scores = x.numpy() @ arrays[keys[0]].T + arrays[keys[1]]
    return float((scores.argmax(1) == y.numpy()).mean())


def aggregate(*arguments):
    return main(["aggregate", *map(str, arguments)])


def test_files_become_a_model_that_knows_all_classes(files, tmp_path, capsys):
    assert aggregate(*files, "-o", tmp_path / "m.safetensors") == 0
    assert accuracy(tmp_path / "m.safetensors") > 0.95
    said = capsys.readouterr().out
    assert "3 nodes, good enough for every node" in said
    assert "node-2: margin +" in said


def test_a_file_that_comes_later_is_added_to_what_was_there(files, tmp_path, capsys):
    output, at_once = tmp_path / "m.safetensors", tmp_path / "once.safetensors"
    assert aggregate(files[0], "-o", output) == 0
    before = accuracy(output)
    assert aggregate("--add", *files[1:], "-o", output) == 0
    assert accuracy(output) > before
    aggregate(*files, "-o", at_once)
    later, once = load_file(output), load_file(at_once)
    assert later["weight"] == pytest.approx(once["weight"], rel=1e-2, abs=1e-3)
    assert "3 nodes" in capsys.readouterr().out


def test_without_add_the_earlier_files_are_forgotten(files, tmp_path, capsys):
    output = tmp_path / "m.safetensors"
    aggregate(*files, "-o", output)
    aggregate(files[0], "-o", output)
    aggregate("--add", files[1], "-o", output)
    assert "2 nodes" in capsys.readouterr().out.splitlines()[-3]


def test_a_bad_file_is_named_and_the_others_are_aggregated(files, tmp_path, capsys):
    files[1].write_bytes(files[1].read_bytes()[:100])
    assert aggregate(*files, tmp_path / "none.safetensors", "-o", tmp_path / "m.safetensors") == 0
    said = capsys.readouterr()
    assert "left out: node node-1" in said.err
    assert "left out: node none" in said.err
    assert "2 nodes" in said.out


def test_no_usable_file_is_an_error(files, tmp_path, capsys):
    files[0].write_bytes(b"")
    assert aggregate(files[0], "-o", tmp_path / "m.safetensors") == 2
    assert "none of 1 files holds a usable space" in capsys.readouterr().err
    assert not (tmp_path / "m.safetensors").exists()


def ball_file(path, labels, seed, method="worst", epsilon=0.5):
    x, y = data(labels, seed)
    weight = torch.from_numpy(CENTERS).float() / 4 + 0.3 * seed * torch.eye(3)
    layer = LayerData(weight, torch.zeros(3), x, y)
    save_space(path, build_ball(layer, Quality(epsilon), method))
    return path


def test_balls_need_the_number_of_classes_and_keys_can_be_chosen(tmp_path, capsys):
    paths = [ball_file(tmp_path / f"{i}.safetensors", [0, 1, 2], i) for i in range(2)]
    output = tmp_path / "m.safetensors"
    assert aggregate(*paths, "-o", output) == 2
    assert "say how many classes" in capsys.readouterr().err
    keys = ("1.weight", "1.bias")
    assert aggregate(*paths, "-o", output, "--classes", 3, "--keys", *keys) == 0
    assert accuracy(output, keys) > 0.9
    assert "plain average" in capsys.readouterr().out
    assert aggregate("--add", paths[0], "-o", output, "--classes", 3) == 2
    assert "has no ['weight', 'bias']" in capsys.readouterr().err
    assert aggregate(*paths, "-o", output, "--classes", 7) == 2
    assert "do not make a layer of 7 classes" in capsys.readouterr().err


def test_spaces_that_do_not_fit_together_are_told_apart(files, tmp_path, capsys):
    ball = ball_file(tmp_path / "ball.safetensors", [0, 1, 2], 0)
    other = tmp_path / "other.safetensors"
    x, y = data([0, 1], 3)
    save_space(other, build_cone(x[:, :2], y, 3))
    assert aggregate(*files, ball, other, "-o", tmp_path / "m.safetensors") == 0
    said = capsys.readouterr().err
    assert "left out: node ball: kind: expected cone" in said
    assert "left out: node other: dimension: expected 12" in said


def test_an_empty_intersection_has_an_exit_status_of_its_own(tmp_path, capsys):
    paths = [
        ball_file(tmp_path / f"{i}.safetensors", [0, 1, 2], 5 * i, "certified", 0.9)
        for i in range(2)
    ]
    arguments = (*paths, "-o", tmp_path / "m.safetensors", "--classes", 3)
    assert aggregate(*arguments, "--on-empty", "fail") == 3
    assert "proved to be empty" in capsys.readouterr().err
    assert aggregate(*arguments) == 0
    assert "no model is good enough for every node (proved)" in capsys.readouterr().out


def test_show_says_what_a_space_reveals(files, tmp_path, capsys):
    ball = ball_file(tmp_path / "ball.safetensors", [0, 1, 2], 0)
    assert main(["show", str(files[0]), str(ball)]) == 0
    said = capsys.readouterr().out
    assert "samples per class: 0: 80, 1: 80" in said
    assert "means and covariances are those of the data" in said
    assert "worst, for epsilon 0.5" in said
    assert load_space(ball).kind == "ball"
    assert main(["show", str(tmp_path / "nothing")]) == 2
