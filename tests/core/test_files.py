"""Files of a run and of spaces: whole or not there, read as strictly as replies, never unpickled.

Two tests go over every kind of file: a flipped bit in any byte is refused, and so is any mutation
unless the file still holds what was written (a space in its header, say).
"""

import dataclasses
import json
import os

import numpy as np
import pytest
from flwr.app import RecordDict
from helpers_fuzz import FILE_CASES, finite, guarded, mutated
from helpers_sizes import sizes
from helpers_spaces import BALL, CURVED, ELLIPSOID, FULL, LOW, MIXED
from safetensors.numpy import save_file

from conftest import initial_arrays, small_model
from gems_flwr.__main__ import main
from gems_flwr.averaging import Coordinator
from gems_flwr.core import RoundRecord, ServerState
from gems_flwr.core.disk import write_atomically
from gems_flwr.core.folder import CheckpointFolder, RoundLog, load_arrays, save_arrays
from gems_flwr.core.records import pack_reply, records_to_bytes
from gems_flwr.errors import CheckpointError, SpaceError
from gems_flwr.spaces import aggregate_spaces, load_space, save_space
from gems_flwr.spaces.ball import EllipsoidSpace, Radius
from gems_flwr.spaces.cone import ClassMomentCone, FullCovariance
from gems_flwr.strategies.local_learners import LearnerState, Tally

# --- every kind of file: its path, and a function that reads it --------------------------------


def space_file(space):
    def make(folder):
        path = folder / "x.safetensors"
        save_space(path, space)
        return path, lambda: load_space(path).to_arrays()

    return make


def run_file(name):
    """Return a file of a run after round 1, with all that a strategy keeps in its checkpoint."""

    def make(folder):
        model = small_model()
        round_log = RoundLog(folder, strategy="S", seed=0, model=model)
        memory = LearnerState("run", Coordinator(model), known={"a": (1, 0)}).to_memory()
        details = Tally(cumulative_loss=1.0, synchronisations=((1, 2),)).to_details()
        history = (RoundRecord(0), RoundRecord(1, nodes_asked=("a",), server_metrics={"a": 0.75}))
        round_log.begin(ServerState(model, history[:1]))
        round_log.save(ServerState(model, history, memory, details))

        def read():
            loaded = round_log.load()
            LearnerState.from_memory(loaded.memory)
            finite(*loaded.arrays.values())
            tally = Tally.from_details(loaded.details)
            return {**loaded.arrays, **loaded.memory}, (loaded.history, tally)

        return folder / name, read

    return make


def kept_reply(folder):
    reply = pack_reply({"loss": 1}, num_examples=3, name="n", arrays=initial_arrays())
    CheckpointFolder(folder).keep_reply("1-train", "a", reply)
    (path,) = (folder / "inbox").iterdir()

    def read():
        kept = CheckpointFolder(folder).kept_reply("1-train", "a")
        if kept is None:
            raise CheckpointError("counts as none, so that the node is asked again")
        return {}, records_to_bytes(kept)

    return path, read


FILES = {
    "ball": space_file(BALL),
    "ellipsoid": space_file(ELLIPSOID),
    "full cone": space_file(FULL),
    "low cone": space_file(LOW),
    "mixed cone": space_file(MIXED),
    "checkpoint": run_file("checkpoint.safetensors"),
    "history": run_file("rounds.jsonl"),
    "reply": kept_reply,
}


@sizes(1, 8)
@pytest.mark.parametrize("kind", ["ball", "low cone", "checkpoint", "history", "reply"])
def test_a_flipped_bit_of_any_byte_is_noticed(kind, tmp_path, cases):
    path, read = FILES[kind](tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in range(at, at + cases):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit % 8]) + whole[at + 1 :])
            with pytest.raises((CheckpointError, SpaceError)):
                read()


@sizes(*FILE_CASES)
@pytest.mark.parametrize("kind", FILES)
def test_a_mutated_file_is_refused_unless_it_holds_the_same(kind, tmp_path, cases):
    path, read = FILES[kind](tmp_path)
    whole, (arrays, rest) = path.read_bytes(), read()
    rng = np.random.default_rng([8, len(kind)])
    for _ in range(cases):
        data = mutated(whole, rng)
        path.write_bytes(data)
        with guarded(data):
            try:
                found, others = read()
            except (CheckpointError, SpaceError):
                continue
            assert found.keys() == arrays.keys()
            assert all(np.array_equal(found[key], arrays[key]) for key in arrays)
            assert others == rest


@sizes(*FILE_CASES)
def test_a_mutated_file_never_crashes_the_command_line(tmp_path, capsys, cases):
    """A space, and the model that was written before."""
    good, bad, out = (tmp_path / f"{name}.safetensors" for name in ("good", "bad", "out"))
    save_space(good, FULL)
    save_space(bad, LOW)
    assert main(["aggregate", str(good), "-o", str(out)]) == 0
    for path, words in ((bad, [str(good), str(bad)]), (out, ["--add", str(good)])):
        whole, rng = path.read_bytes(), np.random.default_rng(9)
        for _ in range(cases):
            data = mutated(whole, rng)
            path.write_bytes(data)
            with guarded(data):
                assert main(["aggregate", *words, "-o", str(out)]) in (0, 2, 3)
                assert main(["inspect", str(bad)]) in (0, 2, 4)
    capsys.readouterr()


# --- arrays ------------------------------------------------------------------------------------


def test_arrays_and_meta_come_back_as_they_were_in_their_order(tmp_path):
    square = np.arange(12.0).reshape(3, 4)
    memory = {"a/b": np.ones((2, 0)), "t": square.T, "v": square[:, 1], "b": square.astype(">f4")}
    groups = {"arrays": dict(reversed(small_model().items())), "memory": memory}
    save_arrays(tmp_path / "x", groups, {"round": 3, "text": "ünï"})
    loaded, meta = load_arrays(tmp_path / "x")
    assert meta == {"round": 3, "text": "ünï"}
    for group, arrays in groups.items():
        assert list(loaded[group]) == list(arrays)
        for name, array in arrays.items():
            found = loaded[group][name]
            assert (found.dtype.name, found.shape) == (array.dtype.name, array.shape)
            assert np.array_equal(found, array)


def test_somebody_elses_safetensors_file_is_refused(tmp_path):
    save_file({"a": np.ones(1)}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="is not a gems-flwr-1 file"):
        load_arrays(tmp_path / "x")


# --- a run's folder ----------------------------------------------------------------------------


def test_an_interrupted_write_never_shows(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["0", "../../etc/passwd", "é" * 100, "."])
def test_replies_are_kept_under_any_name_inside_the_folder_until_the_round_is_saved(tmp_path, name):
    folder = CheckpointFolder(tmp_path / "run")
    assert folder.is_empty()
    folder.keep_reply("3-train", name, RecordDict({"arrays": initial_arrays()}))
    kept = folder.kept_reply("3-train", name)
    assert np.array_equal(kept["arrays"]["weight"].numpy(), small_model()["weight"])
    assert folder.kept_reply("4-train", name) is None
    assert folder.kept_reply("3-train", name + "x") is None
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    folder.save({"arrays": {}}, {})
    assert not folder.has_replies()


def changed_run(folder, arrays=None, meta=None):
    """Write the checkpoint of round 1 with something changed, and a checksum that fits."""
    round_log = RoundLog(folder, strategy="S", seed=0, model=small_model())
    round_log.begin(ServerState(small_model(), (RoundRecord(0),)))
    round_log.save(ServerState(small_model(), (RoundRecord(0), RoundRecord(1))))
    groups, saved = round_log.files.load()
    groups["arrays"].update(arrays or {})
    save_arrays(folder / "checkpoint.safetensors", groups, {**saved, **(meta or {})})
    return round_log


def test_a_checkpoint_with_nan_in_it_is_refused_by_array(tmp_path):
    broken = {"bias": np.array([0.0, np.nan])}
    with pytest.raises(CheckpointError, match="array 'bias' in arrays of the checkpoint"):
        changed_run(tmp_path, arrays=broken).load()


@pytest.mark.parametrize("meta", [{"round": -1}, {"round": True}, {"details": [1]}])
def test_a_checkpoint_without_a_round_or_details_is_refused(tmp_path, meta):
    with pytest.raises(CheckpointError, match="no round and details"):
        changed_run(tmp_path, meta=meta).load()


@pytest.mark.parametrize("change", [{"known": 3}, {"losses": None}, {"surplus": 1}])
def test_a_learner_state_that_cannot_be_read_is_a_checkpoint_error(change):
    memory = LearnerState("run", Coordinator(small_model())).to_memory()
    (key,) = [k for k, v in memory.items() if v.dtype == np.uint8]
    notes = {**json.loads(memory[key].tobytes()), **change}
    memory[key] = np.frombuffer(json.dumps(notes).encode(), np.uint8)
    with pytest.raises(CheckpointError, match="learners' state"):
        LearnerState.from_memory(memory)
    with pytest.raises(CheckpointError, match="details"):
        Tally.from_details({"synchronisations": 5})


# --- spaces from files -------------------------------------------------------------------------


def test_cones_of_as_many_weights_but_other_classes_do_not_go_together(tmp_path, capsys):
    """2 · (14 + 1) = 3 · (9 + 1) = 30."""
    for classes, features in ((2, 14), (3, 9)):
        cone = ClassMomentCone(
            num_classes=classes,
            labels=[0, 1],
            counts=[9, 9],
            means=np.eye(2, features),
            covariance=FullCovariance(np.stack([np.eye(features)] * 2)),
        )
        save_space(tmp_path / f"{classes}.safetensors", cone)
    files = [str(tmp_path / f"{n}.safetensors") for n in (2, 3)]
    assert main(["aggregate", *files, "-o", str(tmp_path / "out.safetensors")]) == 0
    assert "num_classes: expected 2, as the others, got 3" in capsys.readouterr().err


def test_a_curve_of_zeros_does_not_stop_the_server():
    """An ellipsoid whose radius is 0 for every epsilon: the others are intersected with a point."""
    nothing = dataclasses.replace(CURVED, curve=np.zeros(2))
    found = aggregate_spaces([nothing, CURVED], auto_epsilon=True)
    assert np.isfinite(found.point).all()
    # Those that are equal meet up to the end of their curves.
    assert aggregate_spaces([CURVED] * 2, auto_epsilon=True).epsilon == CURVED.largest_epsilon
    # Axes over a radius of 1e-320 are infinite, and times a radius of 0 no numbers at all.
    with pytest.raises(SpaceError, match="at least 1e-30"):
        EllipsoidSpace(CURVED.center, CURVED.radii, Radius(1e-320, "certified", 0.1), CURVED.curve)
