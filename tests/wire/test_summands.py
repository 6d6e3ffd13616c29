"""Summands on the wire: packed elements of rings, and a layout that says how."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from gems_flwr.errors import BadReplyError, OptionError, SpaceError
from gems_flwr.secure.fixed_point import Layout, Section
from gems_flwr.wire.keys import CONFIG
from gems_flwr.wire.summands import (
    layout_from_json,
    layout_to_json,
    pack_summand,
    put_layout,
    requested_layout,
    summand_reply,
    unpack_summand,
)

LAYOUT = Layout(
    [Section("a", (2, 3), bound=4.0, bits=11), Section("b", (1,), 1.5, 64, of_total=True)], nodes=5
)
VALUES = {"a": np.linspace(-4, 4, 6).reshape(2, 3), "b": np.array([1.5])}


def test_a_layout_arrives_as_it_was_sent():
    content = RecordDict({CONFIG: ConfigRecord({})})
    assert requested_layout(content) is None
    put_layout(content, LAYOUT)
    assert requested_layout(content) == LAYOUT
    assert layout_from_json(layout_to_json(LAYOUT)) == LAYOUT


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"nodes": 5, "sections": [["a"]]}', '{"nodes": 0, "sections": []}']
)
def test_a_layout_that_is_none_is_refused(text):
    with pytest.raises(OptionError):
        layout_from_json(text)


def test_a_reply_has_as_many_bytes_as_the_rings_and_gives_the_numbers_back():
    """6 numbers of 11 bits in 9 bytes, one of 8 bytes."""
    content = pack_summand(VALUES, LAYOUT, name="north")
    assert len(content["summand"]["words"]) == 9 + 8 == LAYOUT.size_bytes
    found = LAYOUT.decode(unpack_summand(content, LAYOUT))
    for section in LAYOUT.sections:
        step = section.step(LAYOUT.nodes)
        np.testing.assert_allclose(found[section.name], VALUES[section.name], atol=step / 2)


@pytest.mark.parametrize("change", [lambda w: w[1:], lambda w: w + b"\0", lambda w: b""])
def test_other_lengths_are_refused(change):
    words = pack_summand(VALUES, LAYOUT, name="north")["summand"]["words"]
    with pytest.raises(BadReplyError, match="17 bytes"):
        unpack_summand(summand_reply(change(words), name="north"), LAYOUT)


@pytest.mark.parametrize("record", [None, ConfigRecord({}), ConfigRecord({"words": "text"})])
def test_replies_without_a_summand_are_refused(record):
    content = RecordDict({} if record is None else {"summand": record})
    with pytest.raises(BadReplyError, match="17 bytes"):
        unpack_summand(content, LAYOUT)


@pytest.mark.parametrize("value", [204, -204, -1024])
def test_a_number_beyond_its_bound_is_refused(value):
    """The ring of 11 bits has room for 5 nodes of 203 steps; -1024 has no absolute value in it."""
    section = LAYOUT.sections[0]
    assert round(section.bound / section.step(5)) == 203
    words = LAYOUT.encode(VALUES)
    words[2] = np.uint64(value % 2**11)
    with pytest.raises(BadReplyError, match="'a' has numbers above its bound 4"):
        unpack_summand(summand_reply(LAYOUT.pack(words), name="north"), LAYOUT)


def test_a_node_refuses_to_add_what_the_ring_does_not_hold():
    with pytest.raises(SpaceError, match="absolute values up to 4"):
        pack_summand({**VALUES, "a": np.full((2, 3), 4.1)}, LAYOUT, name="north")
