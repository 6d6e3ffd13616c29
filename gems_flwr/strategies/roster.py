"""Who is there, and by which name.

Node ids are random numbers, new in every run; names (a partition, or what the operator called
the node) are not. Order by name, then, and two runs with one seed agree.
"""

from __future__ import annotations

import time

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from gems_flwr import wire
from gems_flwr.errors import NotEnoughNodesError
from gems_flwr.strategies.events import log_event, log_warning


class Roster:
    """Names of the nodes of one run."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def learn(self, node_id: int, name: str | None) -> None:
        """Note a node's name; the first one counts, and a name taken twice gets the id added."""
        if not name or node_id in self._names:
            return
        taken = name in self._names.values()
        self._names[node_id] = f"{name}#{node_id}" if taken else name

    def name(self, node_id: int) -> str:
        """Return the node's name, or its id as text."""
        return self._names.get(node_id, str(node_id))

    def position(self, node_id: int) -> tuple[int, int, str]:
        """Return a sort key: numbers by value, then other names by alphabet."""
        name = self.name(node_id)
        return (0, int(name), "") if name.isdecimal() else (1, 0, name)

    def read_names(self, grid: Grid) -> None:
        """Learn the names that the grid itself knows, which costs no message."""
        for node in grid.get_nodes():
            self.learn(node.node_id, node.name)

    def ask_names(self, grid: Grid, nodes: list[int], timeout: float) -> None:
        """Ask the nodes that have no name yet; one that cannot tell goes by its id."""
        questions = [
            Message(
                wire.pack_instruction(None, ConfigRecord(), server_round=0, seed=0),
                dst_node_id=node,
                message_type=wire.INTRODUCE,
            )
            for node in nodes
            if node not in self._names
        ]
        if not questions:
            return
        for reply in grid.send_and_receive(questions, timeout=timeout):
            if reply.has_content():
                self.learn(reply.metadata.src_node_id, wire.unpack_name(reply.content))


def wait_for_nodes(grid: Grid, *, wanted: int, at_least: int, seconds: float) -> list[int]:
    """Return the ids of the connected nodes, waiting until enough are there.

    Parameters
    ----------
    grid : Grid
        Where the nodes connect.
    wanted : int
        How many to wait for.
    at_least : int
        How many to go on with when waiting ends.
    seconds : float
        How long to wait.

    Raises
    ------
    NotEnoughNodesError
        If fewer than `at_least` are connected when waiting ends.
    """
    deadline = time.monotonic() + seconds
    while len(nodes := list(grid.get_node_ids())) < wanted and time.monotonic() < deadline:
        log_event("waiting_for_nodes", connected=len(nodes), wanted=wanted)
        time.sleep(min(1.0, max(0.01, seconds / 20)))
    if len(nodes) < at_least:
        raise NotEnoughNodesError(
            f"{len(nodes)} nodes are connected after {seconds:g} s, min_nodes is {at_least}; "
            "start more nodes, lower min_nodes or raise wait_seconds"
        )
    if len(nodes) < wanted:
        log_warning("too_few_nodes", connected=len(nodes), wanted=wanted)
    return nodes
