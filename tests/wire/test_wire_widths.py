"""The question whether a network runs at other widths, and its answer."""

import pytest
from flwr.app import ConfigRecord, RecordDict

from gems_flwr.errors import BadReplyError
from gems_flwr.wire.asking import ask_to_try_widths, wants_widths_tried
from gems_flwr.wire.fault_reasons import fault_in, fault_reason
from gems_flwr.wire.model_replies import pack_name, unpack_name
from gems_flwr.wire.width_replies import pack_widths_reply, unpack_widths_reply


def test_the_question_is_one_word_in_the_config():
    content = RecordDict({"config": ConfigRecord({"lr": 0.1})})
    assert not wants_widths_tried(content)
    ask_to_try_widths(content)
    assert wants_widths_tried(content)
    assert set(content["config"]) == {"lr", "try-widths"}
    assert not wants_widths_tried(RecordDict())


def test_the_answer_names_the_node():
    content = pack_widths_reply("north")
    assert unpack_widths_reply(content) is True
    assert unpack_name(content) == "north"


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        pack_name("north"),
        RecordDict({"try-widths": ConfigRecord()}),
        RecordDict({"try-widths": ConfigRecord({"try-widths": "yes"})}),
    ],
)
def test_any_other_answer_is_refused(content):
    with pytest.raises(BadReplyError, match="does the node's ClientApp have good_enough_mod"):
        unpack_widths_reply(content)


@pytest.mark.parametrize("node", ["0", "north", "a node: with a colon"])
def test_what_went_wrong_comes_out_of_a_reason_without_the_nodes_name(node):
    fault = "write this: that is wrong, says node 7: truly"
    found = fault_in(fault_reason("train", node, fault))
    assert found.endswith(fault)
    assert fault_in(fault) == fault
    if ": " not in node:
        assert found == fault
