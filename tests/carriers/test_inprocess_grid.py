"""The embedded backend is as strict as real Flower."""

import gc
import threading

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from helpers_grids import Impatient

from conftest import initial_arrays, toy_app, train_reply
from gems_flwr import InProcessGrid


def ask(grid, timeout=None, content=None):
    outgoing = [
        Message(content or RecordDict({"arrays": initial_arrays()}), node, "train")
        for node in grid.get_node_ids()
    ]
    return list(grid.send_and_receive(outgoing, timeout=timeout))


def app_of(handler):
    app = ClientApp()
    app.train()(handler)
    return app


def test_a_nodes_state_lasts_from_message_to_message_and_is_its_own():
    def count(message, context):
        seen = context.state["seen"]["n"] if "seen" in context.state else 0
        context.state["seen"] = ConfigRecord({"n": seen + 1})
        reply = ConfigRecord({"n": seen + 1, "node": context.node_config["partition-id"]})
        return Message(RecordDict({"r": reply}), reply_to=message)

    grid = InProcessGrid(app_of(count), 3)
    for expected in (1, 2, 3):
        replies = ask(grid)
        assert [r.content["r"]["n"] for r in replies] == [expected] * 3
        assert sorted(r.content["r"]["node"] for r in replies) == [0, 1, 2]


def test_a_handler_that_raises_gives_an_error_reply_and_its_state_is_what_it_was():
    calls = []

    def fail_second(message, context):
        calls.append(1)
        before = len(context.state)
        context.state[f"call {len(calls)}"] = ConfigRecord({"n": 1})
        if len(calls) == 2:
            raise KeyError("nothing there")
        return Message(RecordDict({"r": ConfigRecord({"n": before})}), reply_to=message)

    grid = InProcessGrid(app_of(fail_second), 1)
    [first], [error], [third] = (ask(grid) for _ in range(3))
    assert error.error.code == 2
    where = "KeyError: 'nothing there' (in fail_second, test_inprocess_grid.py"
    assert where in error.error.reason
    assert (first.content["r"]["n"], third.content["r"]["n"]) == (0, 1)


def test_an_app_that_exits_ends_only_its_own_reply():
    def leave(message, context):
        raise SystemExit(3)

    (reply,) = ask(InProcessGrid(app_of(leave), 1))
    assert "the app exited: SystemExit(3)" in reply.error.reason


def test_no_reply_is_no_reply_and_something_else_an_error():
    assert ask(InProcessGrid(app_of(lambda message, context: None), 2)) == []
    (reply,) = ask(InProcessGrid(app_of(lambda message, context: "fine"), 1))
    assert reply.has_error()


def test_a_sleeper_is_left_behind_and_the_others_are_not_late():
    """It sleeps until the end, so no node can have waited for it."""
    awake = threading.Event()

    def sleeper(message, context):
        awake.wait()
        return train_reply(message, context)

    replies = ask(Impatient(toy_app({1: sleeper}), 4, hurried=[1]), timeout=0.2)
    assert len(replies) == 3
    awake.set()


def test_a_message_is_delivered_once(grid):
    node = next(iter(grid.get_node_ids()))
    ids = list(
        grid.push_messages([Message(RecordDict({"arrays": initial_arrays()}), node, "train")])
    )
    assert len(list(grid.pull_messages(ids))) == 1
    assert list(grid.pull_messages(ids)) == []


def test_a_message_to_an_unknown_node_is_refused(grid):
    with pytest.raises(ValueError, match="there is no node 17"):
        grid.push_messages([Message(RecordDict(), 17, "train")])


def test_node_ids_tell_nothing_about_the_order_of_the_data():
    grid = InProcessGrid(toy_app(), 10)
    by_id = [int(node.name) for node in sorted(grid.get_nodes(), key=lambda n: n.node_id)]
    assert sorted(by_id) == list(range(10))
    assert by_id != list(range(10))


def test_nodes_can_have_configs_of_their_own():
    def tell(message, context):
        config = ConfigRecord({"site": context.node_config["site"], **context.run_config})
        return Message(RecordDict({"r": config}), reply_to=message)

    grid = InProcessGrid(app_of(tell), [{"site": "north"}, {"site": "south"}], {"lr": 0.5})
    assert sorted(r.content["r"]["site"] for r in ask(grid)) == ["north", "south"]
    assert all(r.content["r"]["lr"] == 0.5 for r in ask(grid))


def test_a_grid_that_is_gone_leaves_no_thread_behind():
    """Hundreds of runs in one process would pile them up."""

    def nodes() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "in-process-node"}

    before = nodes()
    grid = InProcessGrid(toy_app(), 2)
    started = nodes() - before
    assert len(started) == 1

    del grid
    gc.collect()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()
