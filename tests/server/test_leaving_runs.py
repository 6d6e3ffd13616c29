"""A node leaves a run that has ended: out of every file of its folder."""

import json
import threading

import pytest
from helpers_blobs import blobs
from helpers_gems import initial, linear_app
from safetensors.numpy import load_file

from conftest import record_equal
from gems_flwr.__main__ import main
from gems_flwr.client.limits import UNLIMITED
from gems_flwr.disk.lock import hold_folder
from gems_flwr.errors import FolderInUseError
from gems_flwr.receipts import load_receipts, model_digest, space_digest
from gems_flwr.runtime.checkpoint import CheckpointFolder
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.server.leaving_runs import leave_run
from gems_flwr.spaces.space_files import SpaceFolder
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.strategies.gems import Gems
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.space_requests import Cone

FULL = Cone(rank="full", min_count=2)
# More than ten, whose order as numbers is not that of the names of files.
NODES, LEAVER = 11, 1


def node_data(context):
    node = int(context.node_config["partition-id"])
    return blobs([0, 1, 2, 3], per_class=30 + 5 * node, seed=10 * node)


def played(nodes=range(NODES), strategy=None, **options):
    strategy = strategy or Gems(space=FULL, **options)
    app = linear_app(node_data, limits=UNLIMITED)
    return strategy.start(InProcessGrid(app, [{"partition-id": n} for n in nodes]), initial())


OTHERS = [node for node in range(NODES) if node != LEAVER]


def leave(folder, output, *more):
    return main(["aggregate", "--run", str(folder), "--remove", "1", "-o", str(output), *more])


def test_the_model_is_that_of_a_run_of_the_others(tmp_path, capsys):
    folder, output = tmp_path / "run", tmp_path / "m.safetensors"
    result = played(checkpoint_dir=folder, verify=True, publish_every=4)
    left = SpaceFolder(folder / "spaces").load()["1"]
    assert leave(folder, output) == 0
    alone = played(OTHERS)
    assert record_equal(to_record(load_file(output)), alone.arrays)
    groups, meta = CheckpointFolder(folder).load()
    assert record_equal(to_record(groups["arrays"]), alone.arrays)
    assert record_equal(to_record(load_file(folder / "published.safetensors")), alone.arrays)
    assert meta["details"]["margins"] == alone.details["margins"]
    # Scores were the old model's.
    assert meta["details"]["node_scores"] == {}
    [receipt] = load_receipts(folder / "receipts.json")
    assert [receipt] == load_receipts(tmp_path / "m.receipts.json")
    assert receipt.removed == {"1": space_digest(left)}
    assert receipt.model_before == model_digest(to_numpy(result.arrays))
    assert receipt.model_after == model_digest(to_numpy(alone.arrays))
    assert meta["details"]["withdrawals"] == [receipt.to_json()]
    assert "removed 1 at" in capsys.readouterr().out


@pytest.mark.parametrize("refine", [0, 2])
def test_nothing_of_the_node_is_left_in_the_folder(tmp_path, refine):
    folder = tmp_path / "run"
    played(checkpoint_dir=folder, refine=refine, verify=True)
    arrays, _ = SpaceFolder(folder / "spaces").load()["1"].to_arrays()
    rows = [array.reshape(-1)[:4] for array in arrays.values() if array.dtype.kind == "f"]
    needles = [row.astype(kind).tobytes() for row in rows for kind in ("<f2", "<f4", "<f8")]

    def places():
        files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return {p.name for p, data in files.items() if any(each in data for each in needles)}

    expected = {"1.space.safetensors"} | ({"checkpoint.safetensors"} if refine else set())
    assert places() == expected
    assert leave(folder, tmp_path / "m.safetensors") == 0
    assert places() == set()
    _, meta = CheckpointFolder(folder).load()
    meta["details"].pop("withdrawals")
    assert '"1":' not in json.dumps(meta["details"])


def test_a_resumed_run_is_refined_again_without_the_node(tmp_path):
    folder, output = tmp_path / "run", tmp_path / "m.safetensors"
    played(checkpoint_dir=folder, refine=2)
    assert leave(folder, output) == 0
    assert record_equal(to_record(load_file(output)), played(OTHERS).arrays)
    resumed = played(checkpoint_dir=folder, refine=2, resume=True)
    assert record_equal(resumed.arrays, played(OTHERS, refine=2).arrays)
    assert all("1" not in record.nodes_asked for record in resumed.history[-2:])


def test_replies_that_wait_in_the_inbox_go_and_the_others_stay(tmp_path):
    folder = tmp_path / "run"
    played(checkpoint_dir=folder)
    files = CheckpointFolder(folder)
    for node in ("1", "2", "11"):
        files.keep_reply("2-train", node, pack_name(node))
    assert leave(folder, tmp_path / "m.safetensors") == 0
    kept = [files.kept_reply("2-train", node) is not None for node in ("1", "2", "11")]
    assert kept == [False, True, True]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"robust": True}, "robust"),
        ({"head": "lda"}, "head='lda'"),
        ({"class_weight": "balanced"}, "class_weight"),
        ({"max_examples": 50.0, "refine": 1}, "max_examples"),
    ],
)
def test_runs_whose_model_took_more_than_spaces_are_refused(tmp_path, capsys, options, said):
    folder = tmp_path / "run"
    played(checkpoint_dir=folder, **options)
    before = (folder / "checkpoint.safetensors").read_bytes()
    assert leave(folder, tmp_path / "m.safetensors") == 2
    message = capsys.readouterr().err
    assert said in message
    assert "let the node withdraw" in message
    assert (folder / "checkpoint.safetensors").read_bytes() == before
    assert "1" in SpaceFolder(folder / "spaces").load()


def test_what_is_no_run_of_spaces_is_refused(tmp_path, capsys):
    output = tmp_path / "m.safetensors"
    assert leave(tmp_path / "none", output) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert leave(tmp_path / "empty", output) == 2
    assert "no round of the run" in capsys.readouterr().err
    folder = tmp_path / "averages"
    played(range(2), FedAvg(checkpoint_dir=folder, fraction_evaluate=0.0))
    assert leave(folder, output) == 2
    assert "a run of FedAvg keeps nothing by node" in capsys.readouterr().err
    run = tmp_path / "run"
    played(range(2), checkpoint_dir=run)
    assert main(["aggregate", "--run", str(run), "-o", str(output)]) == 2
    assert "name who leaves" in capsys.readouterr().err
    assert leave(run, output, "--add") == 2
    assert not output.exists()


def test_a_run_that_is_under_way_is_left_alone(tmp_path):
    folder, caught = tmp_path / "run", []
    played(range(3), checkpoint_dir=folder)

    def other():
        try:
            leave_run(folder, ["1"], tmp_path / "m.safetensors")
        except FolderInUseError as error:
            caught.append(error)

    with hold_folder(folder):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert caught
