"""Whatever lies on disk: what a checksum covers is refused if it differs, the rest may be valid.

Files are mutated as bytes. A checksum refuses nearly every mutation at once; a file that is read in
spite of one (a space in its header, say) holds what was written. What lies behind the checks of the
checksum is reached by files without one, which are read because earlier versions wrote them: these
are refused or hold something valid.
"""

import numpy as np
import pytest
from flwr.common.serde import recorddict_to_proto
from helpers_fuzz import FILE_CASES, REPLIES, finite, guarded, may_refuse, mutated
from helpers_sizes import sizes
from helpers_spaces import (
    BALL,
    ELLIPSOID,
    FULL,
    LOW,
    MIXED,
    without_checksum,
)

from conftest import small_model
from gems_flwr.__main__ import main
from gems_flwr.averaging.synchronisation import Coordinator
from gems_flwr.errors import BadReplyError, CheckpointError, SpaceError
from gems_flwr.runtime.checkpoint import CheckpointFolder, load_arrays, save_arrays
from gems_flwr.server.learner_state import LearnerState, Tally
from gems_flwr.server.round_log import RoundLog
from gems_flwr.server.state import RoundRecord, ServerState
from gems_flwr.spaces.ball import BallSet
from gems_flwr.spaces.space_files import load_space, save_space


def same(left, right):
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[key], right[key]) for key in left)


def fuzz_file(path, use, rng, cases):
    """Mutate a file again and again; `use` must answer each time."""
    original = path.read_bytes()
    for _ in range(cases):
        data = mutated(original, rng)
        path.write_bytes(data)
        with guarded(data):
            use()
    path.write_bytes(original)


SPACES = {"ball": BALL, "ellipsoid": ELLIPSOID, "full": FULL, "low": LOW, "mixed": MIXED}
SPACES["set"] = BallSet((BALL, BALL))


@sizes(*FILE_CASES)
@pytest.mark.parametrize("kind", SPACES)
def test_a_space_file_with_a_checksum_is_refused_unless_it_holds_the_same(kind, tmp_path, cases):
    path = tmp_path / "x.safetensors"
    save_space(path, SPACES[kind])
    arrays, meta = SPACES[kind].to_arrays()

    def use():
        with may_refuse(SpaceError, "x.safetensors"):
            read, said = load_space(path).to_arrays()
            same(read, arrays)
            assert said == meta

    fuzz_file(path, use, np.random.default_rng([8, len(kind)]), cases)


@sizes(*FILE_CASES)
@pytest.mark.parametrize("kind", SPACES)
def test_a_mutated_space_file_without_a_checksum_is_refused_or_holds_a_space(kind, tmp_path, cases):
    path = tmp_path / "x.safetensors"
    save_space(path, SPACES[kind])
    without_checksum(path)

    def use():
        with may_refuse(SpaceError, "x.safetensors"):
            finite(*load_space(path).to_arrays()[0].values())

    fuzz_file(path, use, np.random.default_rng([8, len(kind)]), cases)


@sizes(*FILE_CASES)
def test_a_mutated_file_never_crashes_the_command_line(tmp_path, capsys, cases):
    good, bad, out = (tmp_path / f"{name}.safetensors" for name in ("good", "bad", "out"))
    save_space(good, FULL)
    save_space(bad, LOW)
    without_checksum(bad)

    def use():
        assert main(["aggregate", str(good), str(bad), "-o", str(out)]) in (0, 2, 3)
        assert main(["show", str(bad)]) in (0, 2)

    fuzz_file(bad, use, np.random.default_rng(9), cases)

    # The model that was written, and a space that is kept beside it, may be damaged, too.
    def add():
        assert main(["aggregate", "--add", str(good), "-o", str(out)]) in (0, 2, 3)

    assert main(["aggregate", str(good), "-o", str(out)]) == 0
    fuzz_file(out, add, np.random.default_rng(10), cases)
    capsys.readouterr()


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint after round 1, and what it holds."""
    model = small_model()
    round_log = RoundLog(tmp_path, strategy="S", seed=0, model=model)
    learners = LearnerState("run", Coordinator(model), known={"a": (1, 0)})
    state = ServerState(
        model,
        (RoundRecord(0), RoundRecord(1, nodes_asked=("a", "b"))),
        memory=learners.to_memory(),
        details=Tally(cumulative_loss=1.0, synchronisations=((1, 2),)).to_details(),
    )
    round_log.begin(ServerState(model, state.history[:1]))
    round_log.save(state)
    assert round_log.load().round == 1
    return round_log, state, tmp_path / "checkpoint.safetensors"


def loaded_state(round_log):
    """Read a checkpoint, and all that a strategy keeps in it."""
    loaded = round_log.load()
    LearnerState.from_memory(loaded.memory)
    Tally.from_details(loaded.details)
    finite(*loaded.arrays.values())
    return loaded


@sizes(*FILE_CASES)
@pytest.mark.parametrize("name", ["checkpoint.safetensors", "rounds.jsonl"])
def test_a_checkpoint_with_a_checksum_is_refused_unless_it_holds_the_same(checkpoint, name, cases):
    round_log, state, path = checkpoint

    def use():
        with may_refuse(CheckpointError):
            loaded = loaded_state(round_log)
            same(loaded.arrays, state.arrays)
            same(loaded.memory, state.memory)
            assert loaded.history == state.history
            assert Tally.from_details(loaded.details) == Tally.from_details(state.details)

    fuzz_file(path.with_name(name), use, np.random.default_rng([11, len(name)]), cases)


@sizes(*FILE_CASES)
@pytest.mark.parametrize("name", ["checkpoint.safetensors", "rounds.jsonl"])
def test_a_mutated_checkpoint_without_a_checksum_is_refused_or_whole(checkpoint, name, cases):
    round_log, _, path = checkpoint
    groups, meta = load_arrays(path)
    del meta["rounds.jsonl"]
    save_arrays(path, groups, meta)
    without_checksum(path)

    def use():
        with may_refuse(CheckpointError):
            # One of the rounds that there were; which, only a checksum could tell.
            assert loaded_state(round_log).round in (0, 1)
        with may_refuse(CheckpointError, "checkpoint.safetensors"):
            load_arrays(path)

    fuzz_file(path.with_name(name), use, np.random.default_rng([11, len(name)]), cases)


@pytest.fixture
def kept(tmp_path):
    """A folder with a kept reply, the reply's file, and its bytes without the checksum."""
    folder = CheckpointFolder(tmp_path)
    folder.keep_reply("1-train", "a", REPLIES["model"][0])
    (path,) = (tmp_path / "inbox").iterdir()
    bare = recorddict_to_proto(REPLIES["model"][0]).SerializeToString()
    assert path.read_bytes().endswith(bare)
    return folder, path, bare


@sizes(*FILE_CASES)
def test_a_kept_reply_with_a_checksum_counts_as_none_unless_it_is_the_same(kept, cases):
    folder, path, bare = kept

    def use():
        reply = folder.kept_reply("1-train", "a")
        assert reply is None or recorddict_to_proto(reply).SerializeToString() == bare

    fuzz_file(path, use, np.random.default_rng(13), cases)


@sizes(*FILE_CASES)
def test_a_mutated_kept_reply_without_a_checksum_counts_as_none_or_passes_the_wires_checks(
    kept, cases
):
    folder, path, bare = kept
    path.write_bytes(bare)

    def use():
        reply = folder.kept_reply("1-train", "a")
        if reply is not None:
            with may_refuse(BadReplyError):
                REPLIES["model"][1](reply)

    fuzz_file(path, use, np.random.default_rng(13), cases)
