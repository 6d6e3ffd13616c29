"""A Grid that counts what crosses it.

Wrap any Flower Grid, use it as before, with any strategy, Flower's own included::

    grid = MeteredGrid(grid)
    FedAvg().start(grid=grid, ...)
    print(grid.total.bytes_up)

"Up" is from the nodes to the server, "down" the other way. Bytes are payload bytes as
Flower counts them (arrays with their header, numbers as 8 bytes), without the transport's own
overhead; an error reply counts the length of its reason.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from gems_flwr import wire

_LONGEST_POLL_SECONDS = 3.0
_SHORTEST_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Traffic:
    """Payload bytes and messages in both directions; adds up."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0
    messages_down: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_up + other.bytes_up,
            self.bytes_down + other.bytes_down,
            self.messages_up + other.messages_up,
            self.messages_down + other.messages_down,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_up - other.bytes_up,
            self.bytes_down - other.bytes_down,
            self.messages_up - other.messages_up,
            self.messages_down - other.messages_down,
        )


class MeteredGrid(Grid):
    """Count payload bytes and messages, per round and per node.

    Parameters
    ----------
    grid : Grid
        The grid that does the work.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._total = Traffic()
        self._cells: defaultdict[tuple[int, int], Traffic] = defaultdict(Traffic)
        self._round_of_message: dict[str, int] = {}
        self._round_of_node: dict[int, int] = {}

    @classmethod
    def around(cls, grid: Grid) -> MeteredGrid:
        """Return `grid` itself if it is metered already, else a metered one around it."""
        return grid if isinstance(grid, cls) else cls(grid)

    # --- what was counted ---------------------------------------------------------------------

    @property
    def total(self) -> Traffic:
        """All traffic so far."""
        return self._total

    @property
    def by_round(self) -> dict[int, Traffic]:
        """Traffic of each round; round 0 is what came before the first."""
        return self._summed(0)

    @property
    def by_node(self) -> dict[int, Traffic]:
        """Traffic of each node, by node id."""
        return self._summed(1)

    @property
    def by_round_and_node(self) -> dict[tuple[int, int], Traffic]:
        """Traffic of each (round, node id)."""
        return dict(self._cells)

    def _summed(self, axis: int) -> dict[int, Traffic]:
        sums: defaultdict[int, Traffic] = defaultdict(Traffic)
        for key, traffic in sorted(self._cells.items()):
            sums[key[axis]] += traffic
        return dict(sums)

    # --- the Grid interface -------------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        """Pass on to the wrapped grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The wrapped grid's run."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Pass on to the wrapped grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Pass on to the wrapped grid."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Pass on to the wrapped grid."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push and count."""
        messages = list(messages)
        message_ids = list(self._grid.push_messages(messages))
        self._count_down(messages)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull and count."""
        replies = list(self._grid.pull_messages(message_ids))
        self._count_up(replies)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send, receive and count."""
        messages = list(messages)
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self._count_down(messages)
        self._count_up(replies)
        return replies

    def stream(self, messages: Iterable[Message], *, timeout: float | None) -> Iterator[Message]:
        """Send, and yield each reply as soon as it is there.

        `send_and_receive` holds all replies back until the slowest node has answered; whoever
        wants to put them on disk, or to show progress, needs them one by one.

        Parameters
        ----------
        messages : iterable of Message
            One message per node.
        timeout : float, optional
            Seconds to wait for the replies; None waits for ever.
        """
        waiting = {message_id for message_id in self.push_messages(messages) if message_id}
        if hasattr(self._grid, "collect"):
            for reply in self._grid.collect(waiting, timeout=timeout):
                self._count_up([reply])
                yield reply
            return

        started = time.monotonic()
        while waiting:
            replies = list(self.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            yield from replies
            waited = time.monotonic() - started
            if timeout is not None and waited >= timeout:
                return
            if waiting and not replies:
                # Short waits for short rounds; long rounds do not need a poll each instant.
                pause = max(_SHORTEST_POLL_SECONDS, min(_LONGEST_POLL_SECONDS, waited / 10))
                time.sleep(pause if timeout is None else min(pause, timeout - waited))

    # --- counting -----------------------------------------------------------------------------

    def _count_down(self, messages: list[Message]) -> None:
        for message in messages:
            server_round = wire.instruction_round(message.content) or 0
            node = message.metadata.dst_node_id
            self._round_of_message[message.metadata.message_id] = server_round
            self._round_of_node[node] = server_round
            size = wire.payload_bytes(message.content)
            self._add(server_round, node, Traffic(bytes_down=size, messages_down=1))

    def _count_up(self, replies: list[Message]) -> None:
        for reply in replies:
            node = reply.metadata.src_node_id
            server_round = self._round_of_message.pop(
                reply.metadata.reply_to_message_id, self._round_of_node.get(node, 0)
            )
            size = (
                len(reply.error.reason or "")
                if reply.has_error()
                else wire.payload_bytes(reply.content)
            )
            self._add(server_round, node, Traffic(bytes_up=size, messages_up=1))

    def _add(self, server_round: int, node: int, traffic: Traffic) -> None:
        self._cells[server_round, node] += traffic
        self._total += traffic
