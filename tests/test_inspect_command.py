"""``gems-flwr inspect``: a status for scripts, tables for people, JSON for programs."""

import json

import numpy as np
import pytest
import torch
from helpers_leaks import node

from gems_flwr import build_cone, save_space
from gems_flwr.__main__ import main
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.radius import Radius


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Spaces of a node with 33 samples of class 1, and its data."""
    monkeypatch.chdir(tmp_path)
    data, held_out = node(), node(seed=1, small=40, large=40)
    for name, samples in (("data", data), ("held", held_out), ("other", node(seed=2))):
        np.savez(f"{name}.npz", inputs=samples.inputs, labels=samples.labels)
    np.savez("short.npz", inputs=data.inputs[:-1], labels=data.labels[:-1])
    table, labels = torch.from_numpy(data.inputs).float(), torch.from_numpy(data.labels)
    save_space("full.safetensors", build_cone(table, labels, 3, rank="full"))
    save_space("auto.safetensors", build_cone(table, labels, 3))
    ball = BallSpace(np.zeros(8), Radius(1.0, "sampled", 0.5))
    save_space("ball.safetensors", ball)
    (tmp_path / "none.safetensors").write_text("no space")


def test_a_class_of_33_samples_with_full_moments_is_caught_and_named(capsys):
    assert main(["inspect", "full.safetensors", "--data", "data.npz", "--no-options"]) == 4
    out = capsys.readouterr().out
    assert "class 1: 33 samples of 120 features, 33 of 33 were rebuilt within .1" in out
    assert "do not send" in out
    assert "DO NOT SEND: class 0, 1, 2" in out
    assert max(map(len, out.splitlines())) <= 80


def test_so_it_is_without_any_data(capsys):
    assert main(["inspect", "full.safetensors"]) == 4
    out = " ".join(capsys.readouterr().out.split())
    assert "class 1: 33 samples of 120 features, 32 directions of 33 samples are the" in out


def test_the_default_on_the_same_data_passes(capsys):
    words = ["inspect", "auto.safetensors", "--data", "data.npz", "--held-out", "held.npz"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Nothing alarming." in out
    assert "makes these very bytes of the data" in out
    assert "Cone(dp_epsilon=1)" in out
    assert max(map(len, out.splitlines())) <= 80


def inspected(capsys, *words):
    status = main(["inspect", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_json_has_what_the_tables_have(capsys):
    status, found = inspected(capsys, "full.safetensors", "--data", "data.npz")
    assert status == 4
    assert found["given_away"] == [0, 1, 2]
    small = found["classes"][1]
    assert (small["label"], small["samples"], small["directions"]) == (1, 33, 32)
    assert small["rebuilt"]["rebuilt"] == 33
    options = {each["option"]: each for each in found["options"]}
    default = options["Cone(rank='auto')"]["class"]
    assert default["rebuilt"]["rebuilt"] == 0
    assert default["membership"]["auc"] < small["membership"]["auc"]
    assert len(found["samples_behind_gradient_rows"]) == 3


def kinds(value):
    """Return a JSON value with the names of kinds in place of values."""
    if isinstance(value, dict):
        return {name: kinds(each) for name, each in value.items()}
    if isinstance(value, list):
        return [kinds(value[0])] if value else []
    return type(value).__name__


FINDING = {
    "label": "int",
    "level": "str",
    "verdict": "str",
    "samples": "int",
    "fewest_samples": "int",
    "directions": "int",
    "exact": "str",
    "auc_by_formula": "float",
    "membership": {
        "auc": "float",
        "error": "float",
        "samples": "int",
        "others": "int",
        "of_what_is_sent": "bool",
    },
    "rebuilt": {
        "samples": "int",
        "rebuilt": "int",
        "by_chance": "int",
        "nearest": "float",
        "known_anyway": "float",
    },
}


def test_the_schema_of_the_json_is_what_programs_rely_on(capsys):
    """Change it together with `JSON_VERSION` if a field changes its meaning."""
    words = ("full.safetensors", "--data", "data.npz", "--held-out", "held.npz")
    found = inspected(capsys, *words)[1]
    assert kinds(found) == {
        "version": "int",
        "file": "str",
        "kind": "str",
        "bytes": "int",
        "features": "int",
        "made_by": "str",
        "reproduced": "bool",
        "privacy": "NoneType",
        "given_away": ["int"],
        "withheld": [],
        "classes": [FINDING],
        "options": [
            {
                "option": "str",
                "bytes": "int",
                "class": FINDING,
                "accuracy": "float",
                "note": "str",
            }
        ],
        "samples_behind_gradient_rows": ["float"],
    }
    alone = inspected(capsys, "auto.safetensors")[1]
    assert (alone["made_by"], alone["options"]) == (None, [])
    assert alone["classes"][0]["membership"] is None


def test_a_ball_is_described_and_not_attacked(capsys):
    assert main(["inspect", "ball.safetensors"]) == 0
    assert "reveals the node's own model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.safetensors"], "none.safetensors"),
        (["gone.safetensors"], "gone.safetensors"),
        (["data.npz"], "data.npz"),
        (["auto.safetensors", "--data", "gone.npz"], "gone.npz"),
        (["auto.safetensors", "--data", "none.safetensors"], "cannot be read as safetensors"),
        (["auto.safetensors", "--data", "short.npz"], "class 2 of the data: expected 90 samples"),
        (["full.safetensors", "--data", "other.npz"], "class 0 of the data: expected samples with"),
        (["auto.safetensors", "--held-out", "held.npz"], "--held-out needs --data"),
        (["auto.safetensors", "--seed", "-1"], "at least 0"),
    ],
)
def test_wrong_input_ends_with_a_line_that_says_what_is_wrong(words, message, capsys):
    assert main(["inspect", *words]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert "Traceback" not in told.err
    assert told.out == ""


def test_held_out_data_of_another_kind_are_refused(capsys):
    np.savez("wide.npz", inputs=np.zeros((9, 4)), labels=np.zeros(9))
    words = ["inspect", "auto.safetensors", "--data", "data.npz", "--held-out", "wide.npz"]
    assert main(words) == 2
    assert "expected 120 features, as in the file, got 4" in capsys.readouterr().err
