"""What a node gets is what Flower's own serialisation would have given it, and it is its own."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gems_flwr import InProcessGrid
from gems_flwr.carriers.in_process import copy_content, copy_message


def outcome(function, content):
    """Return what comes of a content, types included, or the type of the error."""
    try:
        copied = function(content)
    except Exception as error:
        return type(error)
    return [
        (key, type(key), type(record), [(k, type(k), _typed(v)) for k, v in record.items()])
        for key, record in copied.items()
    ]


def _typed(value):
    if isinstance(value, list):
        return [_typed(each) for each in value]
    # As text: NaN is not equal to itself, and -0.0 is equal to 0.0.
    return type(value), repr(value)


def test_a_subclass_arrives_as_flowers_own_class():
    class Config(ConfigRecord):
        pass

    copied = copy_content(RecordDict({"config": Config({"a": 1})}))
    assert type(copied["config"]) is ConfigRecord
    assert dict(copied["config"]) == {"a": 1}


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


def handled_by(handler, nodes):
    app = ClientApp()
    app.train()(handler)
    return InProcessGrid(app, nodes)


def test_what_a_node_does_to_a_message_no_other_sees():
    """One content for all nodes: each finds it as it was, and so does the sender afterwards."""
    sent, seen = full_content(), []

    def meddle(message, context):
        seen.append(outcome(copy_content, message.content))
        message.metadata.group_id = "mine"
        spoil(message.content)
        return Message(RecordDict(), reply_to=message)

    grid = handled_by(meddle, 3)
    messages = [Message(sent, node, "train", group_id="1") for node in grid.get_node_ids()]
    grid.send_and_receive(messages)
    assert seen == [outcome(copy_content, full_content())] * 3
    assert outcome(copy_content, sent) == seen[0]
    assert {message.metadata.group_id for message in messages} == {"1"}


def test_replies_and_states_are_copies_once_the_handler_has_returned():
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

    grid, replies = handled_by(keep, 2), []
    for _ in range(2):
        for node in sorted(grid.get_node_ids()):
            replies += grid.send_and_receive([Message(RecordDict(), node, "train")])
    whole = outcome(copy_content, full_content())
    assert [outcome(copy_content, reply.content) for reply in replies] == [whole] * 4
    assert states == [[]] * 2 + [whole] * 2
