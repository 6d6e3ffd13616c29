"""What a server can make a node do is bounded, and what it is called steers no terminal."""

import zipfile

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from helpers_gems import initial, linear_app, run
from torch import nn

from gems_flwr import Ball, Cone, Ellipsoid, Gems, InProcessGrid, Means, Neurons
from gems_flwr.__main__ import main
from gems_flwr.bounds import MAX_PARAMETERS
from gems_flwr.compression import decode_whole, encode_whole
from gems_flwr.core.records import to_record
from gems_flwr.errors import BadReplyError, ModelError, OptionError
from gems_flwr.node.limits import UNLIMITED
from gems_flwr.spaces.cone.summed import MomentSum
from gems_flwr.stages import Gradient, Losses
from gems_flwr.strategies.learner_questions import Learn

ONE = np.ones(4, "f4")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cone(clusters=10**6),
        lambda: Means(groups=10**6),
        lambda: Ball(directions=10**8),
        lambda: Ellipsoid(directions=10**8),
        lambda: Neurons(directions=10**8),
        lambda: MomentSum("sketch", random=10**8),
        lambda: MomentSum(
            "sketch", center=ONE, scale=ONE, codes=np.ones((10**5, 4), "i1"), units=np.ones(10**5)
        ),
        lambda: Gradient(ONE, np.ones((6, 5), "f4")),
        lambda: Learn(run="r", model="0", reference="0", steps=10**15),
        lambda: Losses(ONE, np.ones((2, 5)), np.zeros((101, 2))),
    ],
)
def test_a_question_for_endless_work_is_refused_when_it_is_read(make):
    with pytest.raises((OptionError, ModelError)):
        make()


def test_a_model_far_beyond_the_nodes_own_is_refused_before_it_is_built():
    """A claim of 200,000 neurons for a network of eight."""
    app = linear_app(model=lambda: nn.Linear(6, 4), limits=UNLIMITED)
    grid = InProcessGrid(app, 1)
    wide = to_record({"weight": np.zeros((4, MAX_PARAMETERS // 4), "f4"), "bias": np.zeros(4)})
    content = RecordDict({"arrays": wide, "config": ConfigRecord(), **Cone().to_records()})
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(content, node, "train")])
    assert "10,000,004 numbers, this node takes 10,000,000" in reply.error.reason


def test_a_packed_model_that_would_fill_the_memory_is_refused():
    small = {"a": np.zeros((1000, 10), "f4")}
    assert decode_whole(encode_whole(small))["a"].shape == (1000, 10)
    bomb = encode_whole({"a": np.zeros(MAX_PARAMETERS + 1, "f4")})
    assert len(bomb.exact) < MAX_PARAMETERS / 100
    with pytest.raises(BadReplyError, match="are no model"):
        decode_whole(bomb)


def test_names_with_terminal_codes_reach_no_line_of_the_log(caplog):
    app = linear_app()
    nodes = [{"partition-id": i, "name": f"\x1b[2Jnode {i}\r"} for i in range(2)]
    Gems(verify=True).start(InProcessGrid(app, nodes), initial())
    assert "Node scores: " in caplog.text
    assert not any({"\x1b", "\r"} & set(record.getMessage()) for record in caplog.records)


def test_an_archive_that_would_fill_the_memory_ends_inspect_in_one_line(tmp_path, capsys):
    run(Gems(checkpoint_dir=tmp_path))
    space, data = tmp_path / "spaces" / "0.space.safetensors", tmp_path / "data.npz"
    with (
        zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("inputs.npy", "w", force_zip64=True) as entry,
    ):
        for _ in range(1100):
            entry.write(bytes(2**20))
    assert main(["inspect", str(space), "--data", str(data)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
