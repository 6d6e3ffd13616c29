"""``gems-flwr inspect``: a status for scripts, sentences for people."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_leaks import node
from torch import nn

from gems_flwr.__main__ import main
from gems_flwr.errors import OfflineError
from gems_flwr.spaces import save_space
from gems_flwr.spaces.ball import BallSpace, Radius
from gems_flwr.spaces.cone import build_cone
from gems_flwr.tools.leaks import read_features, save_features

INPUTS, LABELS = np.arange(12.0).reshape(4, 3), np.array([0, 1, 1, 2])


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Spaces of a node with 33 samples of class 1, and its data."""
    monkeypatch.chdir(tmp_path)
    data, held_out = node(), node(seed=1, small=40, large=40)
    for name, samples in (("data", data), ("held", held_out), ("other", node(seed=2))):
        np.savez(f"{name}.npz", inputs=samples.inputs, labels=samples.labels)
    np.savez("short.npz", inputs=data.inputs[:-1], labels=data.labels[:-1])
    np.savez("wide.npz", inputs=np.zeros((9, 4)), labels=np.zeros(9))
    table, labels = torch.from_numpy(data.inputs).float(), torch.from_numpy(data.labels)
    save_space("full.safetensors", build_cone(table, labels, 3, rank="full"))
    save_space("auto.safetensors", build_cone(table, labels, 3))
    save_space("ball.safetensors", BallSpace(np.zeros(8), Radius(1.0, "sampled", 0.5)))
    Path("none.safetensors").write_text("no space")


def test_a_class_of_33_samples_with_full_moments_is_caught_and_named(capsys):
    assert main(["inspect", "full.safetensors", "--data", "data.npz"]) == 4
    out = capsys.readouterr().out
    assert "class 1: 33 samples of 120 features, 33 of 33 were rebuilt within .1" in out
    assert "DO NOT SEND: class 0, 1, 2" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["inspect", "full.safetensors"]) == 4
    out = " ".join(capsys.readouterr().out.split())
    assert "class 1: 33 samples of 120 features, 32 directions of 33 samples are the" in out
    assert "Attacks need the data" in out


def test_the_default_on_the_same_data_passes(capsys):
    words = ["inspect", "auto.safetensors", "--data", "data.npz", "--held-out", "held.npz"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Nothing alarming." in out
    assert "rank auto of the data makes these very bytes" in out


def test_a_ball_is_described_and_not_attacked(capsys):
    assert main(["inspect", "ball.safetensors"]) == 0
    assert "reveals the node's own model" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.safetensors"], "none.safetensors"),
        (["gone.safetensors"], "gone.safetensors"),
        (["auto.safetensors", "--data", "gone.npz"], "gone.npz"),
        (["auto.safetensors", "--data", "none.safetensors"], "is no npz of inputs"),
        (["auto.safetensors", "--data", "short.npz"], "class 2 of the data: expected 90 samples"),
        (["full.safetensors", "--data", "other.npz"], "class 0 of the data: expected samples with"),
        (["auto.safetensors", "--held-out", "held.npz"], "--held-out needs --data"),
        (
            ["auto.safetensors", "--data", "data.npz", "--held-out", "wide.npz"],
            "expected 120 features, as in the file, got 4",
        ),
    ],
)
def test_wrong_input_ends_with_a_line_that_says_what_is_wrong(words, message, capsys):
    assert main(["inspect", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


# --- files of features ------------------------------------------------------------------------


def test_images_are_rows_and_classes_may_be_written_as_floats():
    np.savez("b.npz", inputs=INPUTS.reshape(4, 1, 3), labels=LABELS.astype("f4"))
    found = read_features("b.npz")
    assert np.array_equal(found.inputs, INPUTS)
    assert np.array_equal(found.labels, LABELS)


WRONG = {
    "x.pt": (lambda path: torch.save(1, path), "save_features"),
    "x.npz": (lambda path: np.savez(path, inputs=INPUTS), "labels is not"),
    "y.npz": (lambda path: Path(path).write_text("no"), "is no npz"),
    "z.npz": (lambda path: np.savez(path, inputs=INPUTS, labels=LABELS[:2]), "4 inputs"),
    "o.npz": (lambda path: np.savez(path, inputs=np.array([None] * 4), labels=LABELS), "Object"),
    "n.npz": (lambda path: np.savez(path, inputs=INPUTS * np.nan, labels=LABELS), "finite"),
    "f.npz": (lambda path: np.savez(path, inputs=INPUTS, labels=LABELS + 0.5), "class numbers"),
    "w.npz": (lambda path: np.savez(path, inputs=INPUTS, labels=list("abcd")), "could not convert"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_named_with_what_was_expected(name):
    write, message = WRONG[name]
    write(name)
    with pytest.raises(OfflineError, match=message) as raised:
        read_features(name)
    assert name in str(raised.value)


def test_features_are_what_the_output_layer_sees_and_for_their_owner_alone(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    data = (torch.from_numpy(INPUTS).float(), torch.from_numpy(LABELS) % 2)
    assert save_features("f.npz", data, net) == 4
    expected = net[1](net[0](data[0])).detach().numpy()
    assert read_features("f.npz").inputs == pytest.approx(expected)
    loader = iter([(data[0][:2], data[1][:2]), (data[0][2:], data[1][2:])])
    assert save_features("g.npz", loader, net) == 4
    assert np.array_equal(read_features("g.npz").inputs, read_features("f.npz").inputs)
    assert net.training
    assert (tmp_path / "f.npz").stat().st_mode & 0o077 == 0
