"""Who is there, and by which name.

Node ids are random numbers, new in every run; names (a partition, or what the operator called
the node) are not. Order by name, then, and two runs with one seed agree.

A name is no proof. Flower has checked which node a reply comes from, so the id is the node, and
every node has a name of its own whatever it says of itself:

- the name under which it is registered, which the grid tells and no node can choose;
- else what it called itself in the first reply that it gave, if nobody goes by that name;
- else, and as long as nothing else is known, ``#`` and its id.

A name that somebody else has, or that is somebody else's id, gets the node's own id added
(``north#42``), and so does one that ends like that: no node can take what belongs to another.
Whoever is registered under a name takes it from a node that only calls itself so, between two
rounds. Every name that two want is a `NameDispute`, logged and part of the round's record.

Where a choice depends on names, all of them are known first: a node whose name the grid does not
know is asked for it, once, and has as long for the answer as for any other. So who is chosen does
not depend on who answers first, or late. A node that never says its name (its app has no handler
for that, it is lost and not back, its time is up) is logged as ``no_name`` and goes by its id.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from gems_flwr.errors import NotEnoughNodesError
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.server.addressing import answered_node, is_lost
from gems_flwr.server.log import log_event, log_warning
from gems_flwr.server.state import NameDispute
from gems_flwr.wire.keys import INTRODUCE
from gems_flwr.wire.model_replies import pack_instruction, unpack_name

# What this module calls nodes: a claim may not end so, a registered name not be so altogether.
_ID_AT_THE_END = re.compile(r"#\d+$")


class Nodes:
    """Names of the nodes of one run."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._holders: dict[str, int] = {}
        self._seen: set[int] = set()
        self._registered: set[int] = set()
        # Nodes that have yet to be given the name under which they are registered.
        self._deferred: set[int] = set()
        # Nodes that have told their name, or did not when they could.
        self._heard: set[int] = set()
        # Nodes that were asked for their name.
        self._asked: set[int] = set()
        self._disputes: list[NameDispute] = []

    # --- what a node is called ----------------------------------------------------------------

    def name(self, node_id: int) -> str:
        """Return the node's name, or ``#`` and its id."""
        return self._names.get(node_id, f"#{node_id}")

    def position(self, node_id: int) -> tuple[int, int, str]:
        """Return a sort key: numbers (partitions, ids) by value, then other names by alphabet."""
        name = self.name(node_id)
        if node_id not in self._names:
            return (0, node_id, name)
        return (0, int(name), name) if name.isdecimal() else (1, 0, name)

    def take_disputes(self) -> tuple[NameDispute, ...]:
        """Return who called itself by another's name since this was last asked."""
        taken, self._disputes = tuple(self._disputes), []
        return taken

    # --- what nodes say -----------------------------------------------------------------------

    def learn(self, node_id: int, claim: str | None) -> None:
        """Note what a node calls itself in a reply; only its first reply counts."""
        self.learn_all({node_id: claim})

    def learn_all(self, claims: Mapping[int, str | None]) -> None:
        """Note what several nodes call themselves; of two with one name neither comes first."""
        new = {node: claim for node, claim in claims.items() if node not in self._heard}
        self._heard.update(new)
        takers: defaultdict[str, list[int]] = defaultdict(list)
        for node, claim in new.items():
            # A node without a name calls itself by its id.
            if claim and claim != str(node) and node not in self._deferred:
                takers[claim].append(node)
        for claim, nodes in takers.items():
            owner = self._owner(claim)
            unnamed = [node for node in nodes if node not in self._registered]
            rivals = {n: _other((owner, *(unnamed if n in unnamed else ())), n) for n in nodes}
            for node in unnamed:
                free = rivals[node] is None and not _ID_AT_THE_END.search(claim)
                self._give(node, claim if free else f"{claim}#{node}")
            self._dispute(claim, rivals)

    def ask_names(self, grid: MeteredGrid, nodes: Iterable[int], timeout: float | None) -> None:
        """Ask the nodes that have no name yet, each in one run once.

        One that was lost on the way and is connected again is asked once more. One that does not
        tell goes by its id.

        Parameters
        ----------
        grid : MeteredGrid
            Where the nodes are.
        nodes : iterable of int
            Those whose names are needed.
        timeout : float, optional
            Seconds that they have for the answer; None waits for ever.
        """
        unnamed = [n for n in nodes if n not in self._names and n not in self._asked]
        if not unnamed:
            return
        self._asked.update(unnamed)
        claims, lost = _introductions(grid, unnamed, timeout)
        if back := lost.intersection(grid.get_node_ids()):
            claims |= _introductions(grid, sorted(back), timeout)[0]
        # All at once: which name is whose must not depend on the order of the answers.
        self.learn_all(dict(sorted(claims.items())))
        for node in sorted(set(unnamed) - self._names.keys()):
            log_warning("no_name", node=self.name(node), timeout=timeout)

    # --- what the grid knows ------------------------------------------------------------------

    def meet(self, grid: Grid, nodes: Iterable[int]) -> None:
        """Read the names of nodes that were not there before, which costs no message.

        Nobody else is renamed by that: a node whose registered name another one goes by is known
        by its id until names are settled.
        """
        if not self._seen.issuperset(nodes):
            self._read(grid, rename=False)
            self._seen.update(nodes)

    def settle(self, grid: Grid) -> dict[str, str]:
        """Give nodes the names under which they are registered, whoever goes by them now.

        To be called between rounds.

        Returns
        -------
        dict from str to str
            The new names of nodes that had others before, by the old ones.
        """
        if not self._deferred and self._seen.issuperset(grid.get_node_ids()):
            return {}
        before = {node: self.name(node) for node in self._seen | self._names.keys()}
        self._read(grid, rename=True)
        return {old: new for node, old in before.items() if (new := self.name(node)) != old}

    def _read(self, grid: Grid, *, rename: bool) -> None:
        takers: defaultdict[str, list[int]] = defaultdict(list)
        for info in grid.get_nodes():
            self._seen.add(info.node_id)
            if info.name and info.node_id not in self._registered:
                takers[info.name].append(info.node_id)
        for name, nodes in takers.items():
            holder = self._holders.get(name)
            if holder is None or holder in nodes or holder in self._registered:
                self._register(nodes, name, holder)
            elif rename:
                self._give(holder, f"{name}#{holder}")
                self._register(nodes, name, None)
                self._dispute(name, {holder: nodes[0]})
            else:
                self._deferred.update(nodes)

    def _register(self, nodes: list[int], name: str, holder: int | None) -> None:
        """Call nodes by the name under which they are registered, or tell them apart by it."""
        self._deferred.difference_update(nodes)
        self._registered.update(nodes)
        rivals = {node: _other((holder, *nodes), node) for node in nodes}
        for node, rival in rivals.items():
            free = rival is None and not _ID_AT_THE_END.match(name)
            self._give(node, name if free else f"{name}#{node}")
        self._dispute(name, rivals)

    # --- helpers ------------------------------------------------------------------------------

    def _owner(self, claim: str) -> int | None:
        """Return the node that has a name, or whose id it is."""
        digits = claim.removeprefix("#")
        if digits.isdecimal() and int(digits) in self._seen:
            return int(digits)
        return self._holders.get(claim)

    def _give(self, node: int, name: str) -> None:
        """Call a node by a name, with its id added for as long as another one has that name."""
        while self._holders.get(name, node) != node:
            name = f"{name}#{node}"
        if node in self._names:
            del self._holders[self._names[node]]
        self._names[node], self._holders[name] = name, node

    def _dispute(self, claim: str, rivals: Mapping[int, int | None]) -> None:
        """Note which nodes call themselves by a name that is a rival's, too."""
        for node, rival in rivals.items():
            if rival is not None:
                dispute = NameDispute(self.name(node), claim, self.name(rival))
                self._disputes.append(dispute)
                log_warning("name_disputed", **asdict(dispute))


def _other(nodes: Iterable[int | None], node: int) -> int | None:
    """Return the first of some nodes that is another one."""
    return next((each for each in nodes if each not in (None, node)), None)


def _introductions(
    grid: MeteredGrid, nodes: Iterable[int], timeout: float | None
) -> tuple[dict[int, str | None], set[int]]:
    """Ask nodes for their names; return what they say, and who was lost on the way."""
    questions = {
        node: Message(
            pack_instruction(None, ConfigRecord(), server_round=0, seed=0),
            dst_node_id=node,
            message_type=INTRODUCE,
        )
        for node in nodes
    }
    claims, lost = dict[int, str | None](), set[int]()
    for reply in grid.stream(questions.values(), timeout=timeout):
        node_id = answered_node(reply, questions)
        if node_id is None:
            continue
        if reply.has_content():
            claims[node_id] = unpack_name(reply.content)
        elif is_lost(reply):
            lost.add(node_id)
    return claims, lost


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
