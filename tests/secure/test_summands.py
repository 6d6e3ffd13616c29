"""Summands on the wire: packed elements of rings, and a layout that says how."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from gems_flwr.core import sums
from gems_flwr.core.sums import (
    layout_record,
    summand_record,
    summand_words,
    take_layout,
    unpack_summand,
)
from gems_flwr.errors import BadReplyError, OptionError
from gems_flwr.secure import Layout, Section

LAYOUT = Layout(
    [Section("a", (2, 3), bound=4.0, bits=11), Section("b", (1,), 1.5, 64, of_total=True)], nodes=5
)
VALUES = {"a": np.linspace(-4, 4, 6).reshape(2, 3), "b": np.array([1.5])}


def packed():
    return summand_record(LAYOUT.pack(LAYOUT.encode(VALUES)))


def test_a_layout_arrives_as_it_was_sent_and_is_taken_out():
    content = RecordDict({sums.LAYOUT: layout_record(LAYOUT)})
    assert take_layout(content) == LAYOUT
    assert take_layout(content) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"nodes": 5, "sections": [["a"]]}', '{"nodes": 0, "sections": []}']
)
def test_a_layout_that_is_none_is_refused(text):
    with pytest.raises(OptionError):
        take_layout(RecordDict({sums.LAYOUT: ConfigRecord({"text": text})}))


def test_a_reply_has_as_many_bytes_as_the_rings_and_gives_the_numbers_back():
    """6 numbers of 11 bits in 9 bytes, one of 8 bytes."""
    assert len(summand_words(packed())) == 9 + 8 == LAYOUT.size_bytes
    found = LAYOUT.decode(unpack_summand(packed(), LAYOUT))
    for section in LAYOUT.sections:
        step = section.step(LAYOUT.nodes)
        np.testing.assert_allclose(found[section.name], VALUES[section.name], atol=step / 2)


@pytest.mark.parametrize("words", [None, "text", bytes(16), bytes(18)])
def test_replies_without_a_summand_of_the_layouts_length_are_refused(words):
    content = RecordDict({} if words is None else {"summand": ConfigRecord({"words": words})})
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
        unpack_summand(summand_record(LAYOUT.pack(words)), LAYOUT)
