"""Inputs of a layer in files: read in several forms, written from a network."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from gems_flwr import save_features
from gems_flwr.errors import OfflineError
from gems_flwr.leaks.feature_files import read_features

INPUTS, LABELS = np.arange(12.0).reshape(4, 3), np.array([0, 1, 1, 2])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows():
    return np.concatenate([INPUTS, LABELS[:, None]], axis=1)


WRITERS = {
    "a.npz": lambda path: np.savez(path, inputs=INPUTS, labels=LABELS),
    "b.npz": lambda path: np.savez(path, x=INPUTS.reshape(4, 1, 3), y=LABELS.astype("f4")),
    "c.safetensors": lambda path: save_file({"features": INPUTS, "targets": LABELS}, path),
    "d.npy": lambda path: np.save(path, rows()),
    "e.csv": lambda path: np.savetxt(path, rows(), delimiter=","),
    "f.csv": lambda path: np.savetxt(path, rows(), delimiter=",", header="a,b,c,y", comments=""),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_form_gives_the_same_samples(name):
    WRITERS[name](name)
    found = read_features(name)
    assert np.array_equal(found.inputs, INPUTS)
    assert np.array_equal(found.labels, LABELS)


WRONG = {
    "x.pt": (lambda path: torch.save(1, path), "save_features"),
    "x.npz": (lambda path: np.savez(path, inputs=INPUTS), r"labels \(n\), got \['inputs'\]"),
    "y.npz": (lambda path: Path(path).write_text("no"), "cannot be read as npz"),
    "z.npz": (lambda path: np.savez(path, inputs=INPUTS, labels=LABELS[:2]), "got \\(4, 3\\)"),
    "o.npz": (lambda path: np.savez(path, inputs=np.array([None] * 4), labels=LABELS), "Object"),
    "n.npz": (lambda path: np.savez(path, inputs=INPUTS * np.nan, labels=LABELS), "finite"),
    "f.npz": (lambda path: np.savez(path, inputs=INPUTS, labels=LABELS + 0.5), "class numbers"),
    "w.npz": (lambda path: np.savez(path, inputs=INPUTS, labels=list("abcd")), "be numbers"),
    "1.npy": (lambda path: np.save(path, LABELS), "the class; got shape"),
    "a.csv": (lambda path: Path(path).write_text("a,b\n1,2\n3,x\n"), "cannot be read as csv"),
    "s.safetensors": (lambda path: Path(path).write_text("no"), "cannot be read as safetensors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_named_with_what_was_expected(name):
    write, message = WRONG[name]
    write(name)
    with pytest.raises(OfflineError, match=message) as told:
        read_features(name)
    assert name in str(told.value)


def test_features_are_what_the_output_layer_sees():
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


def test_features_are_for_their_owner_alone(tmp_path):
    save_features("f.npz", (torch.zeros(4, 3), torch.zeros(4)), nn.Linear(3, 2))
    assert (tmp_path / "f.npz").stat().st_mode & 0o077 == 0
    with pytest.raises(OfflineError, match=r"written as \.npz"):
        save_features("f.csv", (torch.zeros(4, 3), torch.zeros(4)), nn.Linear(3, 2))
