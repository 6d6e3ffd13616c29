"""The meter counts what crosses, for any strategy."""

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from helpers_patience import HANG_SECONDS

from conftest import initial_arrays, toy_app
from gems_flwr import InProcessGrid, MeteredGrid
from gems_flwr.core import Traffic
from gems_flwr.core.records import pack_instruction


def messages(grid, server_round=1):
    return [
        Message(
            pack_instruction(initial_arrays(), ConfigRecord(), server_round=server_round, seed=0),
            dst_node_id=node,
            message_type="train",
        )
        for node in grid.get_node_ids()
    ]


def size_of(content):
    return sum(record.count_bytes() for record in content.values())


@pytest.mark.parametrize("way", ["send_and_receive", "push_and_pull", "stream"])
def test_every_way_of_sending_is_counted_alike(grid, way):
    metered = MeteredGrid(grid)
    outgoing = messages(grid)
    if way == "send_and_receive":
        replies = list(metered.send_and_receive(outgoing, timeout=10))
    elif way == "stream":
        replies = list(metered.stream(outgoing, timeout=10))
    else:
        replies = list(metered.pull_messages(metered.push_messages(outgoing)))
    assert metered.total == Traffic(
        bytes_up=sum(size_of(reply.content) for reply in replies),
        bytes_down=sum(size_of(message.content) for message in outgoing),
        messages_up=5,
        messages_down=5,
    )


def test_flowers_own_strategy_is_counted(grid):
    metered = MeteredGrid(grid)
    FlowersFedAvg(fraction_evaluate=0.0).start(metered, initial_arrays(), num_rounds=3)
    model = initial_arrays().count_bytes()
    assert metered.total.messages_down == 15
    assert metered.total.bytes_down == 15 * (model + len("server-round") + 8)


def test_an_error_reply_counts_its_reason():
    def boom(message, context):
        raise ValueError("boom")

    metered = MeteredGrid(InProcessGrid(toy_app({0: boom}), 1))
    (reply,) = metered.send_and_receive(messages(metered), timeout=10)
    assert metered.total.bytes_up == len(reply.error.reason)


class PollingGrid:
    """A grid without streaming: replies trickle in, one per poll."""

    def __init__(self, inner):
        self.inner, self.polls, self.ready = inner, 0, []

    def get_nodes(self):
        return self.inner.get_nodes()

    def push_messages(self, messages):
        ids = list(self.inner.push_messages(messages))
        self.ready = list(self.inner.pull_messages(ids))
        return ids

    def pull_messages(self, message_ids):
        self.polls += 1
        if self.polls % 2:
            return []
        return [self.ready.pop()] if self.ready else []


def test_a_grid_that_must_be_polled_is_polled_until_all_have_answered(grid):
    metered = MeteredGrid(PollingGrid(grid))
    assert len(list(metered.stream(messages(grid), timeout=HANG_SECONDS))) == 5


def test_polling_ends_at_the_timeout(grid):
    silent = PollingGrid(grid)
    silent.pull_messages = lambda message_ids: []
    assert list(MeteredGrid(silent).stream(messages(grid), timeout=0.1)) == []


def test_the_rest_is_passed_on(grid):
    metered = MeteredGrid(grid)
    assert MeteredGrid.around(metered) is metered
    assert set(metered.get_node_ids()) == set(grid.get_node_ids())
    assert sorted(n.name for n in metered.get_nodes()) == ["0", "1", "2", "3", "4"]
    metered.set_run(grid.run)
    assert metered.run is grid.run
    node = next(iter(grid.get_node_ids()))
    assert metered.create_message(RecordDict(), "train", node, "1").metadata.dst_node_id == node
