"""A disk that is full, read-only, gone or in the way: one clear line, and nothing lost.

Tests may run as root, whom no mode keeps out, so errors stand in for the system's.
"""

import errno
import os
import shutil

import pytest
from helpers_spaces import FULL
from safetensors import SafetensorError

from conftest import initial_arrays, record_equal, refuse_writing, toy_app
from gems_flwr import Callback, FedAvg, InProcessGrid
from gems_flwr.__main__ import main
from gems_flwr.core.disk import disk_faults
from gems_flwr.core.folder import CheckpointFolder
from gems_flwr.errors import CheckpointError, DiskError
from gems_flwr.spaces import save_space


def start(folder, rounds=3, resume=False, **options):
    strategy = FedAvg(fraction_evaluate=0.0, checkpoint_dir=folder, **options)
    return strategy.start(InProcessGrid(toy_app(), 3), initial_arrays(), rounds, resume=resume)


UNBROKEN = FedAvg(fraction_evaluate=0.0).start(InProcessGrid(toy_app(), 3), initial_arrays(), 3)


class InRound(Callback):
    """Do something when a round has so many replies."""

    def __init__(self, number, task, replies=1):
        self.number, self.task, self.left = number, task, replies

    def on_reply(self, server_round, node, usable):
        if server_round == self.number:
            self.left -= 1
            if self.left == 0:
                self.task()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_and_the_replies(
    tmp_path, monkeypatch, code
):
    folder = tmp_path / "run"
    fault = InRound(2, lambda: refuse_writing(monkeypatch, code, "run/.checkpoint"))
    with pytest.raises(CheckpointError, match=r"saved stays in .*run, a resumed run") as caught:
        start(folder, callbacks=[fault])
    assert "\n" not in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    monkeypatch.undo()
    assert CheckpointFolder(folder).load()[1]["round"] == 1
    assert CheckpointFolder(folder).has_replies()
    resumed = start(folder, resume=True)
    assert record_equal(resumed.arrays, UNBROKEN.arrays)
    assert [record.round for record in resumed.history] == [0, 1, 2, 3]


def test_the_faults_of_safetensors_own_writer_are_explained_too():
    with pytest.raises(DiskError, match="cannot write x: No space left"), disk_faults("write x"):
        raise SafetensorError("I/O error: something (os error 28)")


def test_replies_that_cannot_be_kept_are_used_all_the_same(tmp_path, monkeypatch, caplog):
    refuse_writing(monkeypatch, errno.ENOSPC, "inbox")
    assert record_equal(start(tmp_path).arrays, UNBROKEN.arrays)
    assert caplog.text.count("event=reply_not_kept") == 9
    assert "exchange=1-train node=0" in caplog.text


def test_a_folder_that_is_removed_in_the_middle_is_noticed(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(CheckpointError, match="removed or replaced") as caught:
        start(folder, callbacks=[InRound(2, lambda: shutil.rmtree(folder))])
    assert "\n" not in str(caught.value)
    # It is not made again: another disk may have been there.
    assert not folder.exists()


def test_a_folder_that_takes_no_file_is_refused_before_any_node_is_asked(tmp_path, monkeypatch):
    refuse_writing(monkeypatch, errno.EACCES, "run/.gems-flwr.lock")
    with pytest.raises(DiskError, match=r"cannot write in the folder .*run: Permission denied"):
        start(tmp_path / "run", callbacks=[InRound(1, lambda: pytest.fail("a node was asked"))])


def test_a_file_in_the_way_of_the_folder_is_named(tmp_path):
    (tmp_path / "run").write_text("mine")
    for folder in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises(DiskError, match=f"folder {folder}.*a file is in the way"):
            start(folder)
    assert (tmp_path / "run").read_text() == "mine"


def test_a_folder_in_the_way_of_the_checkpoint_is_named(tmp_path):
    (tmp_path / "checkpoint.safetensors" / "mine").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors"):
        start(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors cannot be read"):
        start(tmp_path, resume=True)


def fails(capsys, *words):
    """Run the command, which must fail; return the one line that it says."""
    assert main(list(map(str, words))) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1, said.err
    return said.err


def test_the_command_says_in_one_line_what_is_wrong_with_the_disk(tmp_path, monkeypatch, capsys):
    space, model = tmp_path / "a.safetensors", tmp_path / "m.safetensors"
    save_space(space, FULL)
    words = ("aggregate", space, "-o", model)
    assert main(list(map(str, words))) == 0
    capsys.readouterr()
    before = model.read_bytes()
    with monkeypatch.context() as broken:
        refuse_writing(broken, errno.ENOSPC, "m.spaces/.a.space")
        assert f"cannot write {tmp_path / 'm.spaces'}" in fails(capsys, *words)
    with monkeypatch.context() as broken:
        refuse_writing(broken, errno.EROFS, ".m.safetensors")
        assert f"cannot write {model}: Read-only" in fails(capsys, *words)
    assert model.read_bytes() == before
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3
    assert "a folder is in the way: move it, or choose another folder" in fails(
        capsys, "aggregate", space, "-o", tmp_path / "m.spaces"
    )
    assert str(tmp_path / "none") in fails(capsys, "inspect", tmp_path / "none")


def test_spaces_that_are_kept_survive_a_disk_that_fails(tmp_path, monkeypatch, capsys):
    """Aggregating other files forgets the earlier ones, but only once the new ones are safe."""
    old, new, model = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "m"))
    save_space(old, FULL)
    save_space(new, FULL)
    main(["aggregate", str(old), "-o", str(model)])
    capsys.readouterr()
    (kept,) = (tmp_path / "m.spaces").iterdir()
    with monkeypatch.context() as broken:
        refuse_writing(broken, errno.ENOSPC, ".m.safetensors")
        fails(capsys, "aggregate", new, "-o", model)
    assert kept.exists()
    assert main(["aggregate", str(new), "-o", str(model)]) == 0
    assert [p.name for p in (tmp_path / "m.spaces").iterdir()] == ["new.space.safetensors"]
