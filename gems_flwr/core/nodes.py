"""Who is there, and by which name.

Node ids are random numbers, new in every run; names (a partition, or what the operator called the
node) are not. Sums are taken in the order of names (`Nodes.position`), so that two runs with one
seed agree; who is chosen by a seed depends on what the grid reports alone (`Nodes.place`).

A name is no proof. Flower has checked which node a reply comes from, so the id is the node, which
goes by the name under which it is registered; else by what it called itself in its first reply, if
no other node goes by that; else by ``#`` and its id. A name that another node has, or that is
another node's id, gets the node's own id added (``north#42``), and so does one that ends like that:
no node can take what belongs to another. What a node is called it keeps for the run. A name that
two want is logged as ``name_disputed``.

Nodes are asked for their names only where an account is kept by name, once, by a train message,
which every app has a handler for. One that never sends its name goes by its id.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from gems_flwr.core.log import log_event, log_warning, short
from gems_flwr.core.question import NOTHING, Disclosure, Question
from gems_flwr.core.records import (
    NODE,
    TRAIN,
    answered_node,
    is_lost,
    pack_instruction,
    unpack_name,
)

if TYPE_CHECKING:
    from gems_flwr.carriers import MeteredGrid
    from gems_flwr.node import Node

# What this module calls nodes: a claim may not end so, a registered name not be so altogether.
_ID_AT_THE_END = re.compile(r"#\d+$")


class Nodes:
    """Names of the nodes of one run."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._holders: dict[str, int] = {}
        self._seen: set[int] = set()
        # Nodes whose first reply has come; those that were asked for their name; exchanges for it.
        self._heard: set[int] = set()
        self._asked: set[int] = set()
        self._questions = 0
        # What the grid reports of nodes: the name that they are registered under, and since when.
        self._entries: dict[int, tuple[str, str]] = {}

    # --- what a node is called ----------------------------------------------------------------

    def name(self, node_id: int) -> str:
        """Return the node's name, or ``#`` and its id."""
        return self._names.get(node_id, f"#{node_id}")

    def id_of(self, name: str) -> int:
        """Return the id of a node by its name, or by ``#`` and its id."""
        if name in self._holders:
            return self._holders[name]
        if _ID_AT_THE_END.fullmatch(name):
            return int(name.removeprefix("#"))
        raise KeyError(f"no node is called {name!r}")

    def position(self, node_id: int) -> tuple[int, int, str, int]:
        """Return the key by which nodes are sorted.

        Numbers (partitions) come first, by value; then nodes without a name, by when they were
        registered and by id; then other names, by alphabet.
        """
        return self._key(node_id, self._names.get(node_id, ""))

    def place(self, node_id: int) -> tuple[int, int, str, int]:
        """Return the key of a node by what the grid reports of it alone."""
        return self._key(node_id, self._entries.get(node_id, ("", ""))[0])

    def _key(self, node_id: int, name: str) -> tuple[int, int, str, int]:
        if not name:
            # Flower writes times as ISO 8601 in UTC, whose order is that of the texts.
            return (1, 0, self._entries.get(node_id, ("", ""))[1], node_id)
        return (0, int(name), name, node_id) if name.isdecimal() else (2, 0, name, node_id)

    def take_questions(self) -> int:
        """Return how often nodes were asked for their names since this was last asked."""
        taken, self._questions = self._questions, 0
        return taken

    # --- what nodes say -----------------------------------------------------------------------

    def learn(self, claims: Mapping[int, str | None]) -> None:
        """Note what nodes call themselves in their replies, of which only the first counts.

        Of two with one name neither comes first.
        """
        new = {node: claim for node, claim in claims.items() if node not in self._heard}
        self._heard.update(new)
        takers: defaultdict[str, list[int]] = defaultdict(list)
        for node, claim in new.items():
            # A node without a name calls itself by its id.
            if claim and claim != str(node):
                takers[claim].append(node)
        for claim, nodes in takers.items():
            owner = self._owner(claim)
            unnamed = [node for node in nodes if node not in self._names]
            rivals = {n: _other((owner, *(unnamed if n in unnamed else ())), n) for n in nodes}
            for node in unnamed:
                free = rivals[node] is None and not _ID_AT_THE_END.search(claim)
                self._give(node, claim if free else f"{claim}#{node}")
            self._dispute(claim, rivals)

    def ask_names(
        self, grid: MeteredGrid, nodes: Iterable[int], timeout: float | None
    ) -> dict[int, str]:
        """Ask the nodes that have no name yet; return those without a mod, and what they sent.

        Each is asked once in a run; one that was lost on the way and is back, once more.
        """
        unnamed = {n for n in nodes if n not in self._names and n not in self._asked}
        self._asked.update(unnamed)
        claims: dict[int, str | None] = {}
        unable: dict[int, str] = {}
        asked = unnamed
        for _ in range(2):
            if asked:
                lost = self._ask(grid, sorted(asked, key=self.place), timeout, claims, unable)
                asked = lost.intersection(grid.get_node_ids())
        # All at once: which name is whose must not depend on the order of the answers.
        self.learn({node: claims.get(node) for node in sorted(unnamed)})
        for node in sorted(unnamed - self._names.keys(), key=self.place):
            why = {"reason": unable[node]} if node in unable else {"timeout": timeout}
            log_warning("no_name", node=self.name(node), **why)
        return unable

    def _ask(
        self,
        grid: MeteredGrid,
        nodes: list[int],
        timeout: float | None,
        claims: dict[int, str | None],
        unable: dict[int, str],
    ) -> set[int]:
        """Ask nodes for their names in one exchange; note claims, return those that were lost."""
        self._questions += 1
        log_event("ask", what="name", nodes=len(nodes))
        questions = {}
        for each in nodes:
            content = pack_instruction(None, ConfigRecord(), server_round=0, seed=0)
            content.update(Name().to_records())
            questions[each] = Message(content, dst_node_id=each, message_type=TRAIN)
        lost = set()
        for reply in grid.stream(questions.values(), timeout=timeout):
            node = answered_node(reply, questions)
            if node is None:
                continue
            if is_lost(reply):
                lost.add(node)
            elif reply.has_error():
                unable[node] = short(reply.error.reason or f"error {reply.error.code}")
            elif NODE not in reply.content:
                unable[node] = "its handler answered, and says no name"
            else:
                claims[node] = unpack_name(reply.content)
        return lost

    # --- what the grid knows ------------------------------------------------------------------

    def meet(self, grid: Grid, nodes: Iterable[int]) -> None:
        """Give new nodes the names under which they are registered."""
        if self._seen.issuperset(nodes):
            return
        new = [info for info in grid.get_nodes() if info.node_id not in self._seen]
        self._seen.update(nodes, (info.node_id for info in new))
        takers: defaultdict[str, list[int]] = defaultdict(list)
        for info in new:
            self._entries[info.node_id] = (info.name, info.registered_at)
            if info.name and info.node_id not in self._names:
                takers[info.name].append(info.node_id)
        for name, nodes in takers.items():
            rivals = {node: _other((self._holders.get(name), *nodes), node) for node in nodes}
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
        self._names[node], self._holders[name] = name, node

    def _dispute(self, claim: str, rivals: Mapping[int, int | None]) -> None:
        for node, rival in rivals.items():
            if rival is not None:
                names = {"node": self.name(node), "holder": self.name(rival)}
                log_warning("name_disputed", **names, claimed=claim)


def _other(nodes: Iterable[int | None], node: int) -> int | None:
    """Return the first of some nodes that is another one."""
    return next((each for each in nodes if each not in (None, node)), None)


@dataclass(frozen=True)
class Name(Question[str | None]):
    """What is the node called? The mod answers whatever the limits."""

    kind: ClassVar[str] = "name"
    carries_model: ClassVar[bool] = False

    def discloses(self, node: Node) -> Disclosure:
        """A name is in every reply anyway."""
        return NOTHING

    def answer(self, node: Node) -> RecordDict:
        """The mod adds the name to every answer."""
        return RecordDict()

    def read(self, content: RecordDict) -> str | None:
        """Return the name, or None where it is none that can be used."""
        return unpack_name(content)
