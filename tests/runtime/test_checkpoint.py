"""Checkpoints are whole or not there, strict, and never unpickle."""

import json
import os
import pickle

import numpy as np
import pytest
from flwr.app import RecordDict
from safetensors.numpy import save_file

from conftest import initial_arrays, small_model
from gems_flwr.disk.files import write_atomically
from gems_flwr.errors import CheckpointError, DiskError
from gems_flwr.runtime import checkpoint
from gems_flwr.runtime.checkpoint import CheckpointFolder, load_arrays, save_arrays


def test_arrays_and_meta_come_back_as_they_were_in_their_order(tmp_path):
    groups = {"arrays": dict(reversed(small_model().items())), "memory": {"a/b": np.ones((2, 0))}}
    save_arrays(tmp_path / "x.safetensors", groups, {"round": 3, "text": "ünï"})
    loaded, meta = load_arrays(tmp_path / "x.safetensors")
    assert meta == {"round": 3, "text": "ünï"}
    assert list(loaded["arrays"]) == list(groups["arrays"])
    for group, arrays in groups.items():
        for name, array in arrays.items():
            assert loaded[group][name].dtype == array.dtype
            assert loaded[group][name].shape == array.shape
            assert np.array_equal(loaded[group][name], array)


def test_views_and_transposed_arrays_are_saved_right(tmp_path):
    array = np.arange(12.0).reshape(3, 4)
    save_arrays(tmp_path / "x", {"g": {"t": array.T, "v": array[:, 1]}}, {})
    loaded, _ = load_arrays(tmp_path / "x")
    assert np.array_equal(loaded["g"]["t"], array.T)
    assert np.array_equal(loaded["g"]["v"], array[:, 1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: pickle.dumps({"arrays": 1}),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "x.safetensors"
    save_arrays(path, {"arrays": small_model()}, {})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be read"):
        load_arrays(path)


def test_somebody_elses_safetensors_file_is_refused(tmp_path):
    save_file({"a": np.ones(1)}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="is not a gems-flwr-1 file"):
        load_arrays(tmp_path / "x")


def test_a_failed_write_leaves_the_old_state_and_no_litter(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    folder.save({"arrays": {"a": np.ones(1)}}, {"round": 1})

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(DiskError, match="disk full"):
        folder.save({"arrays": {"a": np.zeros(1)}}, {"round": 2})
    assert folder.load()[1] == {"round": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.safetensors"]


def test_an_interrupted_write_never_shows(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_folder_has_no_state(tmp_path):
    assert CheckpointFolder(tmp_path / "none").load() is None
    assert not CheckpointFolder(tmp_path / "none").has_replies()


@pytest.mark.parametrize("name", ["0", "../../etc/passwd", "a/b", "x" * 100, "é" * 100, "."])
def test_replies_are_kept_under_any_name_inside_the_folder(tmp_path, name):
    folder = CheckpointFolder(tmp_path / "run")
    folder.keep_reply("3-train", name, RecordDict({"arrays": initial_arrays()}))
    kept = folder.kept_reply("3-train", name)
    assert np.array_equal(kept["arrays"]["weight"].numpy(), small_model()["weight"])
    assert folder.kept_reply("4-train", name) is None
    assert folder.kept_reply("3-train", name + "x") is None
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_saving_a_round_empties_the_inbox(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.keep_reply("1-train", "0", RecordDict())
    assert folder.has_replies()
    folder.save({"arrays": {}}, {})
    assert not folder.has_replies()


@pytest.mark.parametrize("damage", [b"\x00garbage", b"", b"\0\0gems-reply\n", b"\0\0ge"])
def test_a_damaged_reply_counts_as_none_and_is_removed(tmp_path, damage):
    folder = CheckpointFolder(tmp_path)
    folder.keep_reply("1-train", "0", RecordDict({"arrays": initial_arrays()}))
    (path,) = (tmp_path / "inbox").iterdir()
    path.write_bytes(damage)
    assert folder.kept_reply("1-train", "0") is None
    assert not path.exists()


def test_the_header_is_plain_json(tmp_path):
    save_arrays(tmp_path / "x", {"g": {"a": np.ones(1)}}, {"round": 3})
    data = (tmp_path / "x").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert json.loads(header["__metadata__"]["meta"]) == {"round": 3}
