"""A Grid that counts what crosses it, around any other one and with any strategy.

"Up" is from the nodes to the server, "down" the other way. Bytes are payload bytes as
Flower counts them (arrays with their header, numbers as 8 bytes), without the transport's own
overhead; an error reply counts the length of its reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Error, Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from gems_flwr.core.flower import HANDLER_RAISED, NODE_LOST, NodeInfo, Run
from gems_flwr.core.records import payload_bytes
from gems_flwr.core.run import Traffic
from gems_flwr.errors import describe_fault

_LONGEST_POLL_SECONDS = 3.0
_SHORTEST_POLL_SECONDS = 0.02
# What Flower raises at bytes that are none of its objects; a broken connection is another matter.
_UNREADABLE: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(AssertionError, MemoryError, RecursionError, DecodeError),
)
_NOT_TAKEN = (
    "the SuperLink did not take the message: the node has left the federation, or the message is "
    "too large"
)
_RESTARTED = "the node was restarted before it had answered"


class MeteredGrid(Grid):
    """Count payload bytes and messages.

    Parameters
    ----------
    grid : Grid
        The grid that does the work.

    Examples
    --------
    With a strategy of Flower's own, whose nodes have no handler and answer with an error:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.clientapp import ClientApp
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from gems_flwr import InProcessGrid, MeteredGrid
    >>> grid = MeteredGrid(InProcessGrid(ClientApp(), nodes=2))
    >>> result = FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(2)]), num_rounds=1)
    >>> grid.total.messages_up
    2
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self.total = grid, Traffic()

    @classmethod
    def around(cls, grid: Grid) -> MeteredGrid:
        """Return `grid` itself if it is metered already, else a metered one around it."""
        return grid if isinstance(grid, cls) else cls(grid)

    def set_run(self, run: Run) -> None:
        """Pass on to the wrapped grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The wrapped grid's run."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Pass on to the wrapped grid."""
        return self._grid.create_message(*args, **kwargs)

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

        `send_and_receive` would hold all replies back until the slowest node has answered.

        A message that the grid does not take, and one whose node has been restarted since (the
        process that was asked is gone), are answered with an error at once, as Flower answers for
        a node that it has lost. `timeout` is in seconds; None waits for ever.
        """
        messages = list(messages)
        collect = getattr(self._grid, "collect", None)
        before = {} if collect else self._starts()
        waiting = {message_id for message_id in self.push_messages(messages) if message_id}
        for message in messages:
            if message.metadata.message_id and message.metadata.message_id not in waiting:
                yield _lost(message, _NOT_TAKEN)
        if collect:
            for reply in collect(waiting, timeout=timeout):
                self._count_up([reply])
                yield reply
            return

        started, busy = time.monotonic(), 0.0
        while waiting:
            replies = self._pull_each(messages, waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            given = time.monotonic()
            yield from replies
            # What is done with replies as they come takes the caller's time, not the nodes'.
            busy += time.monotonic() - given
            waited = time.monotonic() - started - busy
            if timeout is not None and waited >= timeout:
                return
            if replies or not waiting:
                continue
            # Short waits for short rounds; long rounds do not need a poll each instant.
            pause = max(_SHORTEST_POLL_SECONDS, min(_LONGEST_POLL_SECONDS, waited / 10))
            if pause == _LONGEST_POLL_SECONDS:
                for message in self._orphans(messages, waiting, before):
                    waiting.remove(message.metadata.message_id)
                    yield _lost(message, _RESTARTED)
            time.sleep(pause if timeout is None else min(pause, timeout - waited))

    def _pull_each(self, messages: list[Message], waiting: set[str]) -> list[Message]:
        """Return the replies that are there; for one that cannot be read, an error.

        Flower confirms the replies of a batch one after the other and raises at the first that it
        cannot read: all others would be lost with it. So they are asked for one by one.
        """
        asked = {message.metadata.message_id: message for message in messages}
        replies: list[Message] = []
        for message_id in sorted(waiting):
            try:
                replies += self.pull_messages([message_id])
            except _UNREADABLE as error:
                reason = f"its reply cannot be read: {describe_fault(error)}"
                fault = Error(code=HANDLER_RAISED, reason=reason)
                replies.append(Message(fault, reply_to=asked[message_id]))
        return replies

    def _orphans(
        self, messages: list[Message], waiting: set[str], before: Mapping[int, str]
    ) -> list[Message]:
        """Return the messages whose nodes have been restarted since `before`."""
        now = self._starts()
        return [
            message
            for message in messages
            if message.metadata.message_id in waiting
            and before.get(node := message.metadata.dst_node_id)
            and now.get(node, before[node]) != before[node]
        ]

    def _starts(self) -> dict[int, str]:
        """Return when each connected node was last started, where the grid knows it."""
        return {node.node_id: node.last_activated_at for node in self._grid.get_nodes()}

    def _count_down(self, messages: list[Message]) -> None:
        size = sum(payload_bytes(message.content) for message in messages)
        self.total += Traffic(bytes_down=size, messages_down=len(messages))

    def _count_up(self, replies: list[Message]) -> None:
        size = sum(
            len(each.error.reason or "") if each.has_error() else payload_bytes(each.content)
            for each in replies
        )
        self.total += Traffic(bytes_up=size, messages_up=len(replies))


def _lost(message: Message, reason: str) -> Message:
    return Message(Error(code=NODE_LOST, reason=reason), reply_to=message)
