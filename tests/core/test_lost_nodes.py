"""Nodes that are lost on the way, as Flower's own SuperLink reports them."""

import re

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from helpers_superlink import SuperLinkGrid

from conftest import initial_arrays, record_equal, toy_app
from gems_flwr import FedAvg, InProcessGrid, Tolerance
from gems_flwr.carriers import metered as metered_grid
from gems_flwr.core.records import answered_node

LOST = r"lost \d+ s after it was asked: Error: Node Unavailable"


def make_grid(kind=SuperLinkGrid, **lives):
    grid = kind(toy_app(), [{"partition-id": i, "registered": str(i)} for i in range(3)])
    grid.dies = {grid.id_of(name): times for name, times in lives.items()}
    return grid


def start(strategy, grid, **options):
    return strategy.start(grid, initial_arrays(), num_rounds=1, **options)


class Returning(SuperLinkGrid):
    """Whoever is killed is started again at the next look but one at who is connected."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gone, self.looks = None, 0

    def killed(self, node):
        super().killed(node)
        self.gone, self.looks = node, 0

    def get_node_ids(self):
        self.looks += self.gone is not None
        if self.looks == 3:
            self.start(self.gone)
            self.gone, self.looks = None, 0
        return super().get_node_ids()


def test_a_node_that_was_lost_and_is_back_is_asked_once_more(caplog):
    whole = start(FedAvg(), InProcessGrid(toy_app(), 3))
    back = start(FedAvg(tolerance=Tolerance(return_seconds=600)), make_grid(Returning, **{"1": 1}))
    assert back.history[1].nodes_answered == ("0", "1", "2")
    assert back.history[1].failures == ()
    assert record_equal(back.arrays, whole.arrays)
    assert "event=lost round=1 node=1" in caplog.text
    assert "event=ask_again round=1 nodes=1" in caplog.text


def test_who_does_not_come_back_is_blamed_and_nobody_else(caplog):
    """The SuperLink's own id is 1, and so is the name of an innocent node."""
    result = start(
        FedAvg(tolerance=Tolerance(return_seconds=0.01)), make_grid(**{"2": 1}), timeout=1e6
    )
    assert result.history[1].nodes_answered == ("0", "1")
    (failure,) = result.history[1].failures
    assert failure.node == "2"
    assert re.match(LOST + r".*; not back within 0.01 s$", failure.reason)
    assert "uncalled_for_reply" not in caplog.text
    assert "no reply within" not in caplog.text


class Supervised(SuperLinkGrid):
    """Whoever is killed is running again before anybody has looked."""

    def killed(self, node):
        super().killed(node)
        self.start(node)


def test_a_node_that_was_restarted_unnoticed_is_asked_again(monkeypatch, caplog):
    """The process that had the message is gone, the SuperLink knows of no fault: no reply, ever."""
    monkeypatch.setattr(metered_grid, "_LONGEST_POLL_SECONDS", metered_grid._SHORTEST_POLL_SECONDS)
    result = start(FedAvg(), make_grid(Supervised, **{"1": 1}), timeout=None)
    assert result.history[1].nodes_answered == ("0", "1", "2")
    assert "event=lost round=1 node=1" in caplog.text


class Leaving(SuperLinkGrid):
    """Node 1 is removed from the federation just before the messages go out."""

    def push_messages(self, messages):
        if (node := self.id_of("1")) in self.get_node_ids():
            self.remove(node)
        return super().push_messages(messages)


def test_a_message_that_the_superlink_does_not_take_is_a_failure_at_once():
    result = start(FedAvg(), make_grid(Leaving), timeout=None)
    assert result.history[1].nodes_answered == ("0", "2")
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert "the SuperLink did not take the message" in failure.reason


def question(node):
    message = Message(RecordDict(), dst_node_id=node, message_type="train")
    message.metadata.__dict__["_message_id"] = f"to {node}"
    return message


def answer(to, source, error=None):
    reply = Message(Error(5, error) if error else RecordDict(), reply_to=question(to))
    reply.metadata.__dict__["_src_node_id"] = source
    return reply


GONE = "gone, believe me"


def test_a_reply_counts_for_the_node_that_was_asked_and_for_no_other():
    waiting = {7: question(7), 8: question(8)}
    for to, source, error, node in (
        (7, 7, None, 7),
        (7, 7, "I failed", 7),
        (7, SUPERLINK_NODE_ID, GONE, 7),
        # Content never comes from the SuperLink, and no node answers for another.
        (7, SUPERLINK_NODE_ID, None, None),
        (7, 8, None, None),
        (7, 8, GONE, None),
        (7, 9, GONE, None),
        (6, 7, None, None),
        (6, SUPERLINK_NODE_ID, GONE, None),
    ):
        assert answered_node(answer(to, source, error), waiting) == node, (to, source, error)


class Garbling(SuperLinkGrid):
    """Flower reads replies one after the other, and raises at one that is no message."""

    garbled = frozenset()

    def pull_messages(self, message_ids):
        for reply in super().pull_messages(message_ids):
            if reply.metadata.src_node_id in self.garbled:
                raise ValueError("not an object of Flower's")
            yield reply


def test_a_reply_that_flower_cannot_read_costs_its_own_node_and_no_other():
    grid = make_grid(Garbling)
    grid.garbled = {grid.id_of("1")}
    result = start(FedAvg(fraction_evaluate=0.0), grid)
    (failure,) = result.history[1].failures
    assert failure.node == "1"
    assert "its reply cannot be read: ValueError: not an object of Flower's" in failure.reason
    assert result.history[1].nodes_answered == ("0", "2")
