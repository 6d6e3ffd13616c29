"""What a node keeps of models that travel packed, message by message."""

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gems_flwr.client.compression_mod import compression_mod
from gems_flwr.compression.difference_coding import decode, encode, encode_whole
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.wire.compression_messages import (
    CompressionRequest,
    needs_base,
    put_compression,
    take_bases,
)
from gems_flwr.wire.packed_records import pack_bytes, packed_models
from gems_flwr.wire.records import to_numpy, to_record

BASE = {"w": np.zeros((20, 30), np.float32), "b": np.zeros(3, np.float32)}
STEP = np.random.default_rng(1).normal(size=(20, 30)).astype(np.float32)


def make_app(**extra):
    """Return an app that adds a step; `extra` are further records of its reply."""
    app = ClientApp(mods=[compression_mod()])

    @app.train()
    def train(message, context):
        content = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
        for key, record in message.content.array_records.items():
            arrays = to_numpy(record)
            content[key] = to_record({**arrays, "w": arrays["w"] + STEP})
        content.update({key: to_record(arrays) for key, arrays in extra.items()})
        return Message(content, reply_to=message)

    return app


class Node:
    """One node, and the messages of a server to it."""

    def __init__(self, app=None):
        self.grid = InProcessGrid(app or make_app(), 1)
        (self.id,) = self.grid.get_node_ids()

    def ask(self, number, records, packed=None, run="r"):
        content = RecordDict({key: pack_bytes(each) for key, each in (packed or {}).items()})
        put_compression(content, CompressionRequest(run, "int4", number, records))
        message = Message(content, dst_node_id=self.id, message_type="train")
        (reply,) = self.grid.send_and_receive([message])
        return reply.content

    @property
    def state(self):
        return {key: str(record) for key, record in self.grid._states[self.id].items()}


def given():
    node = Node()
    first = node.ask(1, {"arrays": (0, 5, 0)}, {"arrays": encode_whole(BASE)})
    return node, packed_models(first)["arrays"]


MODEL = {**BASE, "w": BASE["w"] + STEP}
FIRST = encode(MODEL, BASE, "int4")


def test_a_model_comes_back_as_a_difference_to_what_the_node_was_given():
    _, sent = given()
    assert sent == FIRST.packed
    assert np.abs(decode(sent, BASE, "int4")["w"] - STEP).max() < np.abs(STEP).max() / 13


@pytest.mark.parametrize(
    ("number", "counted", "left_over"),
    [(1, 0, None), (2, 0, None), (2, 1, FIRST.left_over)],
    ids=["asked again", "lost or refused", "counted"],
)
def test_what_is_left_over_is_added_once_the_model_before_has_counted(number, counted, left_over):
    node, _ = given()
    reply = node.ask(number, {"arrays": (5, 5, counted)})
    expected = encode(MODEL, BASE, "int4", left_over).packed
    assert packed_models(reply)["arrays"] == expected
    # Whatever it is told now, it answers the same in this round.
    again = node.ask(number, {"arrays": (5, 5, counted)})
    assert packed_models(again)["arrays"] == expected


def test_a_node_that_lacks_one_of_two_models_says_so_and_stays_as_it_was():
    """Also of the one that it could read: else it would have one model under another's number."""
    node, _ = given()
    before = node.state
    packed = {"arrays": FIRST.packed, "model/b": FIRST.packed}
    reply = node.ask(2, {"arrays": (5, 6, 1), "model/b": (8, 9, 0)}, packed)
    assert needs_base(reply)
    assert not packed_models(reply)
    assert node.state == before


def test_what_was_kept_of_another_run_does_not_count():
    node, _ = given()
    assert needs_base(node.ask(2, {"arrays": (5, 5, 1)}, run="another"))


def test_a_model_under_another_name_is_packed_and_one_beside_it_is_not():
    """A gradient looks like a model; under the model's name there is just one."""
    node = Node(make_app(gradient={**BASE, "w": STEP}))
    reply = node.ask(1, {"arrays": (0, 5, 0)}, {"arrays": encode_whole(BASE)})
    assert set(packed_models(reply)) == {"arrays"}
    assert np.array_equal(reply["gradient"]["w"].numpy(), STEP)
    assert take_bases(reply) == {"arrays": 5}
    # What it has left over is the model's, not the gradient's.
    reply = node.ask(2, {"arrays": (5, 5, 1)})
    assert packed_models(reply)["arrays"] == encode(MODEL, BASE, "int4", FIRST.left_over).packed
