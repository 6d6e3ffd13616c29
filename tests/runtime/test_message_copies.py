"""What a node gets is what Flower's own serialisation would have given it, and it is its own."""

import enum

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.runtime.flower_internals import (
    ProtoMessage,
    message_from_proto,
    message_to_proto,
    number_message,
    records_from_bytes,
    records_to_bytes,
)
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.message_copies import copy_content, copy_message
from gems_flwr.wire.quick_records import ARRAYS_ARE_KNOWN, RECORDS_ARE_KNOWN


class Text(str):
    __slots__ = ()


class Level(enum.IntEnum):
    HIGH = 3


def outcome(function, content):
    """Return what comes of a content, types included, or what it is refused with."""
    try:
        copied = function(content)
    except Exception as error:
        return type(error), str(error)
    return [
        (key, type(key), type(record), [(k, type(k), _typed(v)) for k, v in record.items()])
        for key, record in copied.items()
    ]


def _typed(value):
    if isinstance(value, list):
        return [_typed(each) for each in value]
    # As text: NaN is not equal to itself, and -0.0 is equal to 0.0.
    return type(value), repr(value)


def through_flower(content):
    return records_from_bytes(records_to_bytes(content))


ODD = [
    *(0, -1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 2**80),
    *(True, False, 0.1, -0.0, float("nan"), float("inf"), np.float64(0.1), Level.HIGH),
    *("", "plain", "ä€🌷", "half \ud800", "\x00", Text("sub"), np.str_("of numpy")),
    *(b"", b"\x00\xff"),
    *([], [1, 2], [0.5], [True, False], ["a", "ä"], [b"a"], [2**63, 1], [2**63, -1], [2**64]),
    *(["\ud800"], [np.float64(1), np.float64(2)], [Level.HIGH], [1, True], [1, 0.5], [1, "a"]),
    *([[1]], None, {}, (1, 2), np.int64(3), bytearray(b"a"), object),
]


@pytest.mark.parametrize("kind", [ConfigRecord, MetricRecord])
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_every_value_comes_out_or_is_refused_as_by_flower(kind, value):
    """Put in by the back door: a record's own check may be right, and need not be relied on."""
    record = kind()
    record.__dict__["_data"]["key"] = value
    content = RecordDict({"record": record})
    expected = outcome(through_flower, content)
    assert isinstance(expected, list | tuple)
    assert outcome(copy_content, content) == expected


texts = st.text(st.characters(exclude_categories=()), max_size=4)
scalars = st.one_of(
    st.booleans(), st.integers(-(2**65), 2**65), st.floats(), texts, st.binary(max_size=4)
)
records = st.builds(
    lambda values: _config(values),
    st.dictionaries(texts, st.one_of(scalars, st.lists(scalars, max_size=3)), max_size=3),
)


def _config(values):
    record = ConfigRecord()
    record.__dict__["_data"].update(values)
    return record


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(texts, records, max_size=3))
def test_any_content_comes_out_or_is_refused_as_by_flower(contents):
    content = RecordDict()
    for key, record in contents.items():
        content.__dict__["_data"][key] = record
    expected = outcome(through_flower, content)
    if isinstance(expected, tuple):
        # Of several faults either may be found first.
        with pytest.raises((ValueError, TypeError, UnicodeError)):
            copy_content(content)
    else:
        assert outcome(copy_content, content) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("dtype", Text("float32")), ("dtype", 3), ("dtype", "\ud800"), ("stype", None)),
        *(("shape", [1]), ("shape", (2**31,)), ("shape", (-1,)), ("shape", (1.5,)), ("shape", ())),
    ],
)
def test_an_odd_array_comes_out_or_is_refused_as_by_flower(field, value):
    array = Array(np.ones(1, np.float32))
    setattr(array, field, value)
    record = ArrayRecord()
    record.__dict__["_data"]["w"] = array
    content = RecordDict({"arrays": record})
    assert outcome(copy_content, content) == outcome(through_flower, content)


@pytest.mark.parametrize("name", ["\ud800", Text("w"), 7])
def test_the_name_of_an_array_is_looked_at_too(name):
    record = ArrayRecord()
    record.__dict__["_data"][name] = Array(np.ones(1))
    content = RecordDict({"arrays": record})
    assert outcome(copy_content, content) == outcome(through_flower, content)


@pytest.mark.parametrize("data", [bytearray(b"abc"), memoryview(b"abc"), 3.5, None])
def test_only_bytes_are_the_data_of_an_array(data):
    """Anything else could be changed by its sender after it was sent."""
    array = Array(np.ones(1))
    array.data = data
    record = ArrayRecord()
    record["w"] = array
    with pytest.raises(TypeError, match="the data of an array must be bytes"):
        copy_content(RecordDict({"arrays": record}))


def test_a_subclass_arrives_as_flowers_own_class():
    class Config(ConfigRecord):
        pass

    copied = copy_content(RecordDict({"config": Config({"a": 1})}))
    assert type(copied["config"]) is ConfigRecord
    assert dict(copied["config"]) == {"a": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("_ttl", 7), ("_ttl", 7.5), ("_ttl", 2**60), ("_group_id", Text("g")), ("_run_id", True)),
        *(("_dst_node_id", -1), ("_src_node_id", 2**64), ("_group_id", None), ("_ttl", "soon")),
        *(("_src_task_id", None), ("_dst_task_id", 5), ("_dst_task_id", -5), ("_run_id", 1.5)),
        *(("_message_type", "nonsense"), ("_message_id", "\ud800"), ("_created_at", 3)),
    ],
)
def test_the_metadata_come_out_or_are_refused_as_by_flower(grid, field, value):
    message = Message(RecordDict(), 3, "train", group_id="1")
    number_message(message)
    message.metadata.__dict__[field] = value

    def head(copied):
        try:
            metadata = copied().metadata
        except Exception as error:
            return type(error), str(error)
        return {key: _typed(each) for key, each in vars(metadata).items()}

    def sent():
        return message_from_proto(
            ProtoMessage.FromString(message_to_proto(message).SerializeToString())
        )

    assert head(lambda: copy_message(message)) == head(sent)


def test_an_error_is_copied_with_its_reason(grid):
    question = Message(RecordDict(), 3, "train")
    error = Message(Error(code=2, reason="ä fault"), reply_to=question)
    copied = copy_message(error)
    assert (copied.error.code, copied.error.reason) == (2, "ä fault")
    assert copied.error is not error.error


def full_content():
    return RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(np.arange(3, dtype=np.float32))}),
            "config": ConfigRecord({"list": [1, 2], "n": 1}),
            "metrics": MetricRecord({"losses": [0.5], "n": 1}),
        }
    )


def spoil(content):
    """Change everything in records that can be changed."""
    array = content["arrays"]["w"]
    array.data, array.shape, array.dtype, array.stype = b"", (7,), "int8", "none"
    content["arrays"]["more"] = Array(np.zeros(1))
    for name, key in (("config", "list"), ("metrics", "losses")):
        content[name][key].append(content[name][key][0])
        content[name]["n"] = 99
    content["new"] = ConfigRecord()


def test_what_a_node_does_to_a_message_nobody_else_sees():
    """One content for all nodes: each finds it as it was, and so does the sender afterwards."""
    sent, seen, kept = full_content(), [], []

    def meddle(message, context):
        seen.append(outcome(copy_content, message.content))
        kept.append(message.content)
        message.metadata.group_id = "mine"
        spoil(message.content)
        return Message(RecordDict(), reply_to=message)

    app = ClientApp()
    app.train()(meddle)
    grid = InProcessGrid(app, 3)
    messages = [Message(sent, node, "train", group_id="1") for node in grid.get_node_ids()]
    grid.send_and_receive(messages)
    assert seen == [outcome(copy_content, full_content())] * 3
    assert outcome(copy_content, sent) == seen[0]
    assert {message.metadata.group_id for message in messages} == {"1"}
    assert len({id(content) for content in kept}) == 3


def test_what_the_sender_does_later_a_node_does_not_see():
    seen = []

    def look(message, context):
        seen.append(outcome(copy_content, message.content))
        return Message(RecordDict(), reply_to=message)

    app = ClientApp()
    app.train()(look)
    grid = InProcessGrid(app, 1)
    content = full_content()
    ids = grid.push_messages([Message(content, next(iter(grid.get_node_ids())), "train")])
    spoil(content)
    grid.pull_messages(ids)
    assert seen == [outcome(copy_content, full_content())]


def test_replies_and_states_are_nobody_elses_after_the_handler_has_returned():
    """A handler that keeps what it has given away changes its own copy alone."""
    kept, states = [], []

    def keep(message, context):
        states.append(outcome(copy_content, context.state))
        for content in kept:
            spoil(content)
        kept.clear()
        context.state = full_content()
        reply = Message(full_content(), reply_to=message)
        kept.extend((reply.content, context.state))
        return reply

    app = ClientApp()
    app.train()(keep)
    grid = InProcessGrid(app, 2)
    replies = []
    for _ in range(3):
        for node in sorted(grid.get_node_ids()):
            replies += grid.send_and_receive([Message(RecordDict(), node, "train")])
    whole = outcome(copy_content, full_content())
    assert [outcome(copy_content, reply.content) for reply in replies] == [whole] * 6
    assert states == [[]] * 2 + [whole] * 4


def test_a_state_that_is_emptied_stays_empty():
    sizes = []

    def toggle(message, context):
        sizes.append(len(context.state))
        if context.state:
            context.state = RecordDict()
        else:
            context.state["a"] = ConfigRecord({"n": 1})
        return Message(RecordDict(), reply_to=message)

    app = ClientApp()
    app.train()(toggle)
    grid = InProcessGrid(app, 1)
    for _ in range(4):
        grid.send_and_receive([Message(RecordDict(), *grid.get_node_ids(), "train")])
    assert sizes == [0, 1, 0, 1]


def test_what_cannot_be_sent_is_refused_with_flowers_own_error(grid):
    content = RecordDict({"config": ConfigRecord({"list": [1, 2]})})
    content["config"]["list"].append("three")
    with pytest.raises(TypeError, match="not allowed in 'ConfigRecordValue'"):
        grid.push_messages([Message(content, next(iter(grid.get_node_ids())), "train")])


def test_the_quick_way_is_the_one_taken():
    """With a Flower that keeps its entries elsewhere all works, slower: then look at this file."""
    assert RECORDS_ARE_KNOWN
    assert ARRAYS_ARE_KNOWN
