"""Who is who: a name is no proof, and no node gets at what another one has contributed."""

import numpy as np
import pytest
from flwr.proto.node_pb2 import NodeInfo
from hypothesis import given
from hypothesis import strategies as st

from conftest import initial_arrays, small_model, toy_app, train_reply
from gems_flwr import FedAvg, InProcessGrid
from gems_flwr.core.nodes import Nodes
from gems_flwr.core.records import pack_name


class Directory:
    """What a grid knows of its nodes: names by id, empty where none is registered."""

    def __init__(self, names):
        self.names = dict(names)

    def get_node_ids(self):
        return set(self.names)

    def get_nodes(self):
        return [NodeInfo(node_id=node, name=name) for node, name in self.names.items()]


@pytest.fixture
def disputes(caplog):
    """What the log says of disputes since it was last asked: node, name, the node that has it."""

    def logged():
        lines = [r.getMessage() for r in caplog.records if "name_disputed" in r.getMessage()]
        caplog.clear()
        found = [dict(pair.split("=", 1) for pair in line.split()) for line in lines]
        return [(each["node"], each["claimed"], each["holder"]) for each in found]

    return logged


def named_nodes(names, claims=()):
    nodes, directory = Nodes(), Directory(names)
    nodes.meet(directory, directory.names)
    for node, claim in dict(claims).items():
        nodes.learn({node: claim})
    return nodes, directory


# --- what a node is called --------------------------------------------------------------------


def test_a_node_goes_by_its_registered_name_else_by_what_it_says_else_by_its_id(disputes):
    nodes, _ = named_nodes({11: "north", 12: "", 13: ""}, {11: "west", 12: "south"})
    assert [nodes.name(node) for node in (11, 12, 13)] == ["north", "south", "#13"]
    assert disputes() == []


def test_nobody_gets_the_name_of_an_unnamed_node_by_guessing_its_id(disputes):
    """An honest node without a name calls itself by its own id, and that changes nothing."""
    nodes, _ = named_nodes({11: "", 12: "", 13: ""}, {12: "11", 13: "#11", 11: "11"})
    assert [nodes.name(node) for node in (11, 12, 13)] == ["#11", "11#12", "#11#13"]
    assert disputes() == [
        ("11#12", "11", "#11"),
        ("#11#13", "#11", "#11"),
    ]


def test_what_a_node_is_called_it_keeps_whoever_joins_later(disputes):
    nodes, directory = named_nodes({12: ""}, {12: "north"})
    directory.names[11] = "north"
    nodes.meet(directory, [11, 12])
    nodes.learn({11: "south"})
    assert [nodes.name(node) for node in (11, 12)] == ["north#11", "north"]
    assert disputes() == [("north#11", "north", "north")]


def test_a_registered_name_is_never_beaten_by_a_claim(disputes):
    nodes, _ = named_nodes({11: "north", 12: "", 13: "south"}, {12: "north", 13: "north"})
    assert [nodes.name(node) for node in (11, 12, 13)] == ["north", "north#12", "south"]
    assert disputes() == [
        ("north#12", "north", "north"),
        ("south", "north", "north"),
    ]


def test_of_two_nodes_with_one_name_neither_comes_first(disputes):
    found = ("north#11", "north", "north#12"), ("north#12", "north", "north#11")
    claimed, _ = named_nodes({11: "", 12: ""})
    claimed.learn({11: "north", 12: "north"})
    assert disputes() == [*found]
    registered, _ = named_nodes({11: "north", 12: "north"})
    assert disputes() == [*found]
    for nodes in (claimed, registered):
        assert [nodes.name(node) for node in (11, 12)] == ["north#11", "north#12"]


def test_what_a_node_calls_itself_later_does_not_count():
    nodes, _ = named_nodes({11: "", 12: ""}, {11: "north", 12: None})
    nodes.learn({11: "south"})
    nodes.learn({12: "south"})
    assert [nodes.name(node) for node in (11, 12)] == ["north", "#12"]


def test_numbers_come_in_order_and_no_two_names_in_one_place():
    nodes, _ = named_nodes({11: "10", 12: "9", 13: "b", 14: "09", 15: "", 16: "a"})
    ordered = sorted(range(11, 17), key=nodes.position)
    assert [nodes.name(node) for node in ordered] == ["09", "9", "10", "#15", "a", "b"]
    assert len({nodes.position(node) for node in ordered}) == 6


NODES = st.integers(11, 15)
NAMES = st.sampled_from(["north", "11", "#11", "12", "north#11", "north#12", "11#12", "13#14#15"])
STEPS = st.one_of(
    st.tuples(st.just("claim"), NODES, NAMES),
    st.tuples(st.just("meet"), NODES, st.one_of(st.just(""), NAMES)),
)


@given(st.lists(STEPS, max_size=12))
def test_whatever_nodes_say_names_are_unique_and_kept(steps):
    nodes, directory, known = Nodes(), Directory({}), {}
    for step, node, name in steps:
        if step == "claim":
            nodes.learn({node: name})
        else:
            directory.names.setdefault(node, name)
            nodes.meet(directory, [node])
        names = {node: nodes.name(node) for node in range(11, 16)}
        assert len(set(names.values())) == 5
        assert len({nodes.position(node) for node in names}) == 5
        assert all(names[node] == name for node, name in known.items())
        known = {node: name for node, name in names.items() if name != f"#{node}"}


# --- what a run makes of it -------------------------------------------------------------------


class Town(InProcessGrid):
    """Nodes with ids of our choice, registered names (``registered``) and rounds to join in.

    A node with ``from`` 3 is there as soon as the messages of round 2 are out.
    """

    def __init__(self, app, nodes):
        configs = {node: dict(config) for node, config in nodes.items()}
        self.registered = {node: c.pop("registered", "") for node, c in configs.items()}
        self.joins = {node: c.pop("from", 1) for node, c in configs.items()}
        super().__init__(app, list(configs.values()))
        self._configs = configs
        self.round = 0

    def get_node_ids(self):
        return {node for node, first in self.joins.items() if first <= self.round + 1}

    def get_nodes(self):
        return [NodeInfo(node_id=n, name=self.registered[n]) for n in self.get_node_ids()]

    def push_messages(self, messages):
        messages = list(messages)
        self.round = max(message.content["config"]["server-round"] for message in messages)
        return super().push_messages(messages)


def test_a_node_that_calls_itself_by_anothers_id_changes_nobodys_part(tmp_path, disputes):
    """Node 700's partition is its config; its name is the id of node 500, which has none."""
    nodes = {500: {"partition-id": 500}, 600: {"partition-id": 0}, 700: {"partition-id": 1}}
    app = toy_app({1: lambda m, c: _called(m, c, "500")})
    result = FedAvg(checkpoint_dir=tmp_path).start(Town(app, nodes), initial_arrays(), num_rounds=1)
    assert result.history[1].nodes_answered == ("0", "#500", "500#700")
    assert disputes() == [("500#700", "500", "#500")]
    # Weights 1, 2 and 501 with that many examples.
    expected = (1 + 4 + 501**2) / 504
    moved = result.arrays["weight"].numpy() - small_model()["weight"]
    assert moved == pytest.approx(np.full((2, 3), expected), rel=1e-5)


def _called(message, context, name):
    reply = train_reply(message, context)
    reply.content["node"] = pack_name(name)["node"]
    return reply
