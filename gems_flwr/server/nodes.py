"""Who is there, and by which name.

Node ids are random numbers, new in every run; names (a partition, or what the operator called
the node) are not. Order by name, then, and two runs with one seed agree. Where nodes have none,
they are ordered by when they were registered, then by id: Flower's simulation registers its nodes
in the order of their partitions.

A name is no proof. Flower has checked which node a reply comes from, so the id is the node, and
every node has a name of its own whatever it says of itself:

- the name under which it is registered, which the grid tells and no node can choose;
- else what it called itself in the first reply that it gave, if nobody goes by that name;
- else, and as long as nothing else is known, ``#`` and its id.

A name that somebody else has, or that is somebody else's id, gets the node's own id added
(``north#42``), and so does one that ends like that: no node can take what belongs to another.
Whoever is registered under a name takes it from a node that only calls itself so, between two
rounds. Every name that two want is a `NameDispute`, logged and part of the round's record.

Who is chosen by a seed depends on what the grid tells alone (`Nodes.place`), and not on what nodes
say, first, late or never; sums are taken in the order of all names that are known by then
(`Nodes.position`).

Nodes are asked for their names only where an account is kept by name. Then all names are known
before anything else is asked: a node whose name the grid does not know is asked for it, once, and
has as long for the answer as for any other. The question is a train message, which every app has a
handler for, and every mod of this library answers it. One that never says its name (its app has no
such mod, it is lost and not back, its time is up) is logged as ``no_name`` and goes by its id.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from gems_flwr.errors import NotEnoughNodesError
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.server.addressing import answered_node, is_lost
from gems_flwr.server.log import log_event, log_warning, short
from gems_flwr.server.state import NameDispute
from gems_flwr.wire.asking import ask_for_name
from gems_flwr.wire.keys import NODE, TRAIN
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
        # Nodes that were asked for their name, and how often somebody was asked.
        self._asked: set[int] = set()
        self._questions = 0
        # What the grid tells of nodes: the name that they are registered under, and since when.
        self._entries: dict[int, tuple[str, str]] = {}
        self._disputes: list[NameDispute] = []
        # Who has left the run: by id, and by the names that an earlier process knew them by.
        self._withdrawn: set[int] = set()
        self._withdrawn_names: frozenset[str] = frozenset()

    # --- what a node is called ----------------------------------------------------------------

    def name(self, node_id: int) -> str:
        """Return the node's name, or ``#`` and its id."""
        return self._names.get(node_id, f"#{node_id}")

    def position(self, node_id: int) -> tuple[int, int, str, int]:
        """Return the key by which nodes are sorted.

        Numbers (partitions) come first, by value; then nodes without a name, by when they were
        registered and by id; then other names, by alphabet.
        """
        return self._key(node_id, self._names.get(node_id, ""))

    def place(self, node_id: int) -> tuple[int, int, str, int]:
        """Return the key of a node by what the grid tells of it, whatever the node says itself."""
        return self._key(node_id, self._entries.get(node_id, ("", ""))[0])

    def _key(self, node_id: int, name: str) -> tuple[int, int, str, int]:
        if not name:
            # Flower writes times as ISO 8601 in UTC, whose order is that of the texts.
            return (1, 0, self._entries.get(node_id, ("", ""))[1], node_id)
        return (*name_order(name), node_id)

    def take_disputes(self) -> tuple[NameDispute, ...]:
        """Return who called itself by another's name since this was last asked."""
        taken, self._disputes = tuple(self._disputes), []
        return taken

    def take_questions(self) -> int:
        """Return how often nodes were asked for their names since this was last asked."""
        taken, self._questions = self._questions, 0
        return taken

    # --- who has left ---------------------------------------------------------------------------

    @property
    def withdrawn(self) -> tuple[int, ...]:
        """Ids of the nodes that have left since this process began, in the order of names."""
        return tuple(sorted(self._withdrawn, key=self.position))

    def withdraw(self, node_id: int) -> None:
        """Note that a node has left: by its own reply, which nobody else can give."""
        self._withdrawn.add(node_id)

    def recall_withdrawn(self, names: Iterable[str]) -> None:
        """Note who had left before the run was resumed."""
        self._withdrawn_names = frozenset(names)

    @property
    def names_of_leavers(self) -> frozenset[str]:
        """Names of all nodes that have left the run, now or before it was resumed."""
        return self._withdrawn_names | {self.name(node) for node in self._withdrawn}

    @property
    def awaits_leavers(self) -> bool:
        """Whether nodes that had left before the run was resumed must be known by name."""
        return bool(self._withdrawn_names)

    def has_left(self, node_id: int) -> bool:
        """Whether a node has left the run, now or before it was resumed."""
        return node_id in self._withdrawn or self.name(node_id) in self._withdrawn_names

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

    def ask_names(
        self, grid: MeteredGrid, nodes: Iterable[int], timeout: float | None
    ) -> dict[int, str]:
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

        Returns
        -------
        dict from int to str
            Nodes that have nothing to answer with, no mod of ours, and what they said instead.
        """
        unnamed = [n for n in nodes if n not in self._names and n not in self._asked]
        if not unnamed:
            return {}
        self._asked.update(unnamed)
        # All together, and not one first to see whether its app can answer: who needs names needs a
        # mod anyway, and one node that cannot, or will not, says nothing of the others' apps.
        told = self._ask(grid, sorted(unnamed, key=self.place), timeout)
        if back := told.lost.intersection(grid.get_node_ids()):
            told = told.joined(self._ask(grid, sorted(back, key=self.place), timeout))
        # All at once: which name is whose must not depend on the order of the answers.
        self.learn_all(dict(sorted(told.claims.items())))
        for node in sorted(set(unnamed) - self._names.keys(), key=self.place):
            why = {"reason": told.unable[node]} if node in told.unable else {"timeout": timeout}
            log_warning("no_name", node=self.name(node), **why)
        return told.unable

    def _ask(self, grid: MeteredGrid, nodes: list[int], timeout: float | None) -> _Told:
        """Ask nodes for their names in one exchange."""
        self._questions += 1
        log_event("ask", what="names", nodes=len(nodes))
        questions = {node: _question(node) for node in nodes}
        told = _Told()
        for reply in grid.stream(questions.values(), timeout=timeout):
            node = answered_node(reply, questions)
            if node is None:
                continue
            if is_lost(reply):
                told.lost.add(node)
            elif reply.has_error():
                told.unable[node] = short(reply.error.reason or f"error {reply.error.code}")
            elif NODE not in reply.content:
                told.unable[node] = "its handler answered, and says no name"
            else:
                told.claims[node] = unpack_name(reply.content)
        return told

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
            self._entries[info.node_id] = (info.name, info.registered_at)
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


def name_order(name: str) -> tuple[int, int, str]:
    """Return the key by which names are sorted: numbers by value, then others by alphabet."""
    if _ID_AT_THE_END.match(name):
        return (1, 0, name)  # no name of its own
    return (0, int(name), name) if name.isdecimal() else (2, 0, name)


def _other(nodes: Iterable[int | None], node: int) -> int | None:
    """Return the first of some nodes that is another one."""
    return next((each for each in nodes if each not in (None, node)), None)


@dataclass(frozen=True)
class _Told:
    """What came of asking nodes for their names."""

    claims: dict[int, str | None] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    unable: dict[int, str] = field(default_factory=dict)

    def joined(self, later: _Told) -> _Told:
        """Return this with what came of asking some of them again."""
        return _Told(self.claims | later.claims, self.lost | later.lost, self.unable | later.unable)


def _question(node: int) -> Message:
    content = pack_instruction(None, ConfigRecord(), server_round=0, seed=0)
    ask_for_name(content)
    return Message(content, dst_node_id=node, message_type=TRAIN)


def wait_for_nodes(
    grid: Grid,
    *,
    wanted: int,
    at_least: int,
    seconds: float,
    option: str = "min_nodes",
    counts: Callable[[int], bool] = lambda node: True,
) -> list[int]:
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
    option : str
        Which option asks for `at_least` nodes.
    counts : callable
        Gets a node's id, returns whether it takes part.

    Raises
    ------
    NotEnoughNodesError
        If fewer than `at_least` are connected when waiting ends.
    """
    deadline = time.monotonic() + seconds
    while (
        len(nodes := list(filter(counts, grid.get_node_ids()))) < wanted
        and time.monotonic() < deadline
    ):
        log_event("waiting_for_nodes", connected=len(nodes), wanted=wanted)
        time.sleep(min(1.0, max(0.01, seconds / 20)))
    if len(nodes) < at_least:
        raise NotEnoughNodesError(
            f"{len(nodes)} nodes are connected after {seconds:g} s, {option} is {at_least}; "
            f"start more nodes, lower {option} or raise wait_seconds"
        )
    if len(nodes) < wanted:
        log_warning("too_few_nodes", connected=len(nodes), wanted=wanted)
    return nodes
