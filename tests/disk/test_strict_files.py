"""Files are read as strictly as replies: what a fuzzer rarely hits, said one by one."""

import json

import numpy as np
import pytest
from helpers_spaces import CURVED, FULL
from safetensors.numpy import save_file

from conftest import small_model
from gems_flwr.__main__ import main
from gems_flwr.averaging.synchronisation import Coordinator
from gems_flwr.errors import CheckpointError, SpaceError
from gems_flwr.intersect.aggregate import aggregate_spaces
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.runtime.checkpoint import save_arrays
from gems_flwr.server.learner_state import LearnerState, Tally
from gems_flwr.server.round_log import RoundLog
from gems_flwr.server.state import RoundRecord, ServerState
from gems_flwr.spaces.checks import check_number
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import FullCovariance
from gems_flwr.spaces.curved_space import CurvedSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.radius import Radius
from gems_flwr.spaces.space_files import save_space


def journal_with(folder, arrays=None, meta=None):
    """Write the checkpoint of round 1 with something changed."""
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
        journal_with(tmp_path, arrays=broken).load()


@pytest.mark.parametrize(
    "meta", [{"round": -1}, {"round": "1"}, {"round": None}, {"round": True}, {"details": [1]}]
)
def test_a_checkpoint_without_a_round_or_details_is_refused(tmp_path, meta):
    with pytest.raises(CheckpointError, match="no round and details"):
        journal_with(tmp_path, meta=meta).load()


def test_meta_that_is_no_object_is_refused(tmp_path):
    header = {"format": "gems-flwr-1", "order": "[]", "meta": "[1]"}
    save_file({}, tmp_path / "checkpoint.safetensors", metadata=header)
    with pytest.raises(CheckpointError, match="expected an object"):
        RoundLog(tmp_path, strategy="S", seed=0, model={}).load()


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


def test_a_damaged_model_file_ends_the_command_with_its_name(tmp_path, capsys):
    space, out = tmp_path / "a.safetensors", tmp_path / "out.safetensors"
    save_space(space, FULL)
    assert main(["aggregate", str(space), "-o", str(out)]) == 0
    whole = out.read_bytes()
    for damage in (whole[:50], b"", b"x" * 100):
        out.write_bytes(damage)
        assert main(["aggregate", "--add", str(space), "-o", str(out)]) == 2
        assert "out.safetensors cannot be read" in capsys.readouterr().err
    save_file({"weight": np.zeros((3, 4)), "bias": np.full(3, np.nan)}, out)
    assert main(["aggregate", "--add", str(space), "-o", str(out)]) == 2
    assert "finite weights" in capsys.readouterr().err


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
    nothing = CurvedSpace(CURVED.space, np.zeros(2))
    found = aggregate_spaces([nothing, CURVED], auto_epsilon=True)
    assert np.isfinite(found.point).all()
    tiny = EllipsoidSpace(CURVED.space.center, CURVED.space.radii, Radius(1e-30, "worst", 0.1))
    for epsilon in (0.1, 1.0):
        assert np.isfinite(CurvedSpace(tiny, CURVED.curve).at(epsilon).radii).all()
    # Axes over a radius of 1e-320 are infinite, and times a radius of 0 no numbers at all.
    for value in (0.0, 1e-320):
        flat = EllipsoidSpace(CURVED.space.center, CURVED.space.radii, Radius(value, "worst", 0.1))
        with pytest.raises(SpaceError, match="at least 1e-30"):
            CurvedSpace(flat, CURVED.curve)


def test_a_number_too_large_for_a_float_is_out_of_range():
    with pytest.raises(SpaceError, match="radius"):
        check_number("radius", 10**400, 0, 1)


def test_sums_without_a_count_must_be_zero():
    sums = ClassSums(2, np.arange(2), np.array([0.0, 5.0]), np.ones((2, 1)), np.ones((2, 1, 1)))
    with pytest.raises(SpaceError, match="class 0"):
        sums.check_moments()
