"""Leaving by files: the model of the others, a receipt, and nothing left behind."""

import hashlib
import json
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from gems_flwr.__main__ import main
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.receipts import load_receipts, model_digest, space_digest
from gems_flwr.spaces.space_files import load_space, save_space

CENTERS = np.array([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]])
FULL = {"rank": "full", "min_count": 2}


def cone(seed, count=80, **options):
    rng = np.random.default_rng(seed)
    y = np.repeat([0, 1, 2], count)
    x = CENTERS[y] + rng.normal(size=(len(y), 3)) * (1 + seed / 4)
    return build_cone(torch.from_numpy(x).float(), torch.from_numpy(y), 3, **options)


def node_files(folder, names=("north", "south", "west"), **options):
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{name}.safetensors" for name in names}
    for seed, path in enumerate(paths.values()):
        save_space(path, cone(seed, 40 + 20 * seed, **(options or FULL)))
    return paths


def aggregate(*arguments):
    return main(["aggregate", *map(str, arguments)])


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("options", [FULL, {"rank": 2, "min_count": 2}, {"rank": "auto"}])
def test_the_model_without_a_node_is_that_of_the_others_to_the_last_bit(tmp_path, options):
    files = node_files(tmp_path / "in", **options)
    output, scratch = tmp_path / "m.safetensors", tmp_path / "scratch.safetensors"
    assert aggregate(*files.values(), "-o", output) == 0
    with_north = output.read_bytes()
    assert aggregate("--remove", "north", "-o", output) == 0
    # In another order than that of the names.
    assert aggregate(files["west"], files["south"], "-o", scratch) == 0
    assert output.read_bytes() == scratch.read_bytes() != with_north


def test_a_receipt_says_what_was_removed_from_what_and_when(tmp_path, capsys):
    files = node_files(tmp_path / "in")
    output = tmp_path / "m.safetensors"
    aggregate(*files.values(), "-o", output)
    before, began = sha256(output), datetime.now(UTC).replace(microsecond=0)
    assert aggregate("--remove", "north", "-o", output) == 0
    [receipt] = load_receipts(tmp_path / "m.receipts.json")
    assert receipt.removed == {"north": space_digest(load_space(files["north"]))}
    # As many samples as the nodes were given: 3 classes of 60 and of 80.
    assert receipt.remaining == {"south": 180, "west": 240}
    assert (receipt.model_before, receipt.model_after) == (before, sha256(output))
    assert began <= datetime.fromisoformat(receipt.at) <= datetime.now(UTC)
    assert receipt.forgotten
    said = capsys.readouterr().out
    assert receipt.model_after in said
    assert f"removed north at {receipt.at}: sha256 {receipt.removed['north']}" in said
    main(["show", str(files["north"])])
    assert receipt.removed["north"] in capsys.readouterr().out
    assert aggregate("--remove", "west", "-o", output) == 0
    later = load_receipts(tmp_path / "m.receipts.json")
    assert [list(each.removed) for each in later] == [["north"], ["west"]]
    assert later[1].model_before == receipt.model_after
    assert (tmp_path / "m.receipts.json").stat().st_mode & 0o077 == 0
    assert json.loads((tmp_path / "m.receipts.json").read_text())["receipts"][0]["digests"]


def test_nothing_that_the_node_sent_is_left_beside_the_model(tmp_path):
    files = node_files(tmp_path / "in")
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "m.safetensors"
    aggregate(*files.values(), "-o", output)
    means = cone(0, 40, **FULL).means
    needles = [row.astype(dtype).tobytes() for row in means for dtype in ("<f4", "<f2")]

    def found():
        kept = [path.read_bytes() for path in output.parent.rglob("*") if path.is_file()]
        return any(needle in data for needle in needles for data in kept)

    assert found()
    aggregate("--remove", "north", "-o", output)
    assert not found()
    assert not list(output.parent.rglob("*north*"))


def test_nodes_leave_and_join_in_one_command(tmp_path):
    files = node_files(tmp_path / "in", ("north", "south", "west", "east"))
    late = files.pop("east")
    output, scratch = tmp_path / "m.safetensors", tmp_path / "scratch.safetensors"
    aggregate(*files.values(), "-o", output)
    assert aggregate("--remove", "north", "--remove", "west", late, "-o", output) == 0
    aggregate(late, files["south"], "-o", scratch)
    assert output.read_bytes() == scratch.read_bytes()
    [receipt] = load_receipts(tmp_path / "m.receipts.json")
    assert (set(receipt.removed), set(receipt.remaining)) == ({"north", "west"}, {"east", "south"})


def test_who_is_not_there_cannot_leave_and_nobody_leaves_last(tmp_path, capsys):
    files = node_files(tmp_path / "in")
    output = tmp_path / "m.safetensors"
    aggregate(*files.values(), "-o", output)
    before = output.read_bytes()
    assert aggregate("--remove", "nobody", "-o", output) == 2
    assert "no space of ['nobody'] is kept; there are ['north'" in capsys.readouterr().err
    everybody = [word for name in files for word in ("--remove", name)]
    assert aggregate(*everybody, "-o", output) == 2
    assert "nobody would be left" in capsys.readouterr().err
    assert aggregate("-o", output) == 2
    assert "name at least one space file" in capsys.readouterr().err
    assert output.read_bytes() == before
    assert len(list((tmp_path / "m.spaces").glob("*.space.safetensors"))) == 3
    assert not (tmp_path / "m.receipts.json").exists()


def test_the_digest_of_a_model_is_that_of_its_file(tmp_path):
    files = node_files(tmp_path / "in")
    output = tmp_path / "m.safetensors"
    aggregate(*files.values(), "-o", output)
    arrays = load_file(output)
    assert model_digest(dict(reversed(arrays.items()))) == sha256(output)


def test_the_digest_of_a_space_notices_every_change(tmp_path):
    one, same, other = (cone(seed, **FULL) for seed in (0, 0, 1))
    save_space(tmp_path / "a.safetensors", one)
    digests = [space_digest(each) for each in (one, same, load_space(tmp_path / "a.safetensors"))]
    assert len(set(digests)) == 1
    assert space_digest(other) != digests[0]
