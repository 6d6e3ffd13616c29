"""A flipped bit anywhere in a file is noticed; files of the time before checksums are read."""

import json
import stat

import numpy as np
import pytest
from flwr.app import RecordDict
from helpers_sizes import sizes
from helpers_spaces import BALL, LOW, without_checksum

from conftest import initial_arrays, record_equal, small_model, toy_app
from gems_flwr.errors import CheckpointError, SpaceError
from gems_flwr.runtime.checkpoint import CheckpointFolder, load_arrays, save_arrays
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.server.round_log import RoundLog
from gems_flwr.server.state import RoundRecord, ServerState
from gems_flwr.spaces.space_files import SpaceFolder, load_space, save_space
from gems_flwr.strategies.fedavg import FedAvg

MODEL = {"weight": np.ones((2, 2), np.float32), "steps": np.array(3)}


# How many bits of a byte are tried.
BITS = sizes(1, 8)


def flips(data, bits):
    """Yield the data with so many bits of each of its bytes flipped in turn."""
    for at in range(len(data)):
        for bit in range(at, at + bits):
            yield data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1 :]


def start(folder, rounds, **options):
    strategy = FedAvg(fraction_evaluate=0.0, checkpoint_dir=folder, **options)
    return strategy.start(InProcessGrid(toy_app(), 3), initial_arrays(), rounds)


@BITS
def test_a_flipped_bit_of_a_checkpoint_is_noticed(tmp_path, cases):
    path = tmp_path / "x"
    save_arrays(path, {"arrays": MODEL}, {"round": 3})
    for damaged in flips(path.read_bytes(), cases):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_arrays(path)


@BITS
@pytest.mark.parametrize("space", [BALL, LOW], ids=["ball", "cone"])
def test_a_flipped_bit_of_a_space_file_is_noticed(space, tmp_path, cases):
    path = tmp_path / "x.safetensors"
    save_space(path, space)
    for damaged in flips(path.read_bytes(), cases):
        path.write_bytes(damaged)
        with pytest.raises(SpaceError, match=r"x\.safetensors"):
            load_space(path)


@BITS
def test_a_flipped_bit_of_a_kept_reply_has_the_node_asked_again(tmp_path, cases):
    folder = CheckpointFolder(tmp_path)
    folder.keep_reply("1-train", "a", RecordDict({"arrays": initial_arrays()}))
    (path,) = (tmp_path / "inbox").iterdir()
    for damaged in flips(path.read_bytes(), cases):
        path.write_bytes(damaged)
        assert folder.kept_reply("1-train", "a") is None
        assert not path.exists()


@BITS
def test_a_flipped_bit_of_the_history_is_noticed(tmp_path, cases):
    round_log = RoundLog(tmp_path, strategy="S", seed=0, model=MODEL)
    records = (RoundRecord(0), RoundRecord(1, server_metrics={"accuracy": 0.75}))
    round_log.begin(ServerState(MODEL, records[:1]))
    round_log.save(ServerState(MODEL, records))
    path = tmp_path / "rounds.jsonl"
    whole = path.read_bytes()
    # All but the last sign, a line break that a torn file may lack.
    for damaged in flips(whole[:-1], cases):
        path.write_bytes(damaged + whole[-1:])
        with pytest.raises(CheckpointError, match=r"rounds\.jsonl"):
            round_log.load()
    path.write_bytes(whole)
    assert round_log.load().history == records


def test_a_damaged_number_is_said_to_be_damage(tmp_path):
    """Before there were checksums, 1 that became 1.5 was as good a number as any."""
    path = tmp_path / "checkpoint.safetensors"
    save_arrays(path, {"arrays": MODEL}, {})
    one, other = (np.float32(value).tobytes() for value in (1, 1.5))
    path.write_bytes(path.read_bytes().replace(one, other, 1))
    with pytest.raises(CheckpointError, match="checksum does not fit its contents"):
        load_arrays(path)


def test_the_checksum_is_that_of_the_values_not_of_their_place_in_memory(tmp_path):
    turned = np.arange(6, dtype=">f4").reshape(2, 3).T
    path = tmp_path / "x"
    save_arrays(path, {"g": {"turned": turned, "none": np.ones((2, 0))}}, {})
    assert np.array_equal(load_arrays(path)[0]["g"]["turned"], turned)


# --- what earlier versions wrote ------------------------------------------------------------


def test_a_run_of_the_time_before_checksums_goes_on(tmp_path):
    start(tmp_path, 2)
    path = tmp_path / "checkpoint.safetensors"
    groups, meta = load_arrays(path)
    del meta["rounds.jsonl"]
    save_arrays(path, groups, meta)
    without_checksum(path)
    resumed = start(tmp_path, 3, resume=True)
    unbroken = FedAvg().start(InProcessGrid(toy_app(), 3), initial_arrays(), 3)
    assert record_equal(resumed.arrays, unbroken.arrays)
    assert "rounds.jsonl" in load_arrays(path)[1]


def test_a_reply_of_the_time_before_checksums_is_used(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.keep_reply("1-train", "a", RecordDict({"arrays": initial_arrays()}))
    (path,) = (tmp_path / "inbox").iterdir()
    mark = b"\0\0gems-reply\n"
    assert path.read_bytes().startswith(mark)
    path.write_bytes(path.read_bytes()[len(mark) + 16 :])
    assert record_equal(folder.kept_reply("1-train", "a")["arrays"], initial_arrays())


def test_a_space_of_the_time_before_checksums_is_used(tmp_path):
    save_space(tmp_path / "x", LOW)
    without_checksum(tmp_path / "x")
    assert np.array_equal(load_space(tmp_path / "x").counts, LOW.counts)


def test_a_history_written_by_another_version_stays_as_it_is(tmp_path):
    """A resumed run that dies at once must not leave a history that its checkpoint does not fit."""
    start(tmp_path, 2)
    path = tmp_path / "rounds.jsonl"
    # Another version orders its keys differently.
    lines = [json.dumps(json.loads(line), sort_keys=True) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    round_log = RoundLog(tmp_path, strategy="FedAvg", seed=0, model=small_model())
    groups, meta = round_log.files.load()
    del meta["rounds.jsonl"]
    save_arrays(tmp_path / "checkpoint.safetensors", groups, meta)
    for _ in range(2):
        round_log.open(lambda: None, resume=True)
    assert path.read_text().splitlines() == lines


# --- who may read them ----------------------------------------------------------------------


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_nodes_sent_is_for_the_owner_alone(tmp_path):
    folder = CheckpointFolder(tmp_path / "run")
    folder.save({"arrays": MODEL}, {})
    folder.keep_reply("1-train", "a", RecordDict())
    (reply,) = (tmp_path / "run" / "inbox").iterdir()
    SpaceFolder(tmp_path / "run" / "spaces").save({"a": BALL})
    (space,) = (tmp_path / "run" / "spaces").iterdir()
    assert mode(reply) == mode(space) == mode(folder.folder / "checkpoint.safetensors") == 0o600
    assert mode(reply.parent) == mode(space.parent) == 0o700


def test_an_open_folder_of_an_earlier_version_is_closed(tmp_path):
    (tmp_path / "inbox").mkdir(mode=0o755)
    CheckpointFolder(tmp_path).keep_reply("1-train", "a", RecordDict())
    assert mode(tmp_path / "inbox") == 0o700


def test_a_model_is_as_readable_as_any_other_file(tmp_path):
    """Safetensors has made its files unreadable for others since 0.8; a result is to be read."""
    (tmp_path / "plain").write_text("")
    save_space(tmp_path / "x", BALL)
    assert mode(tmp_path / "x") == mode(tmp_path / "plain")
