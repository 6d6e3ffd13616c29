"""Messages out, usable replies back: the part of a round that every protocol shares.

An `Exchange` belongs to one round. It sends one message to each chosen node, keeps every reply
on disk as it comes in, tells errors and silence from answers, validates the answers one by one
and puts them into an order that does not depend on arrival. Whoever is left out is named. A node
that was lost on the way and is back is asked once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flwr.app import Message, RecordDict

from gems_flwr import wire
from gems_flwr.errors import BadReplyError, Failure, RoundFailedError
from gems_flwr.runtime.checkpoint import CheckpointFolder
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.strategies.callbacks import Callback
from gems_flwr.strategies.events import log_event, log_warning
from gems_flwr.strategies.roster import Roster

# Flower's codes, whose enum is not public, for what happens to messages between the apps: the message
# or its reply expired, the node went away, or the process of its ClientApp died.
_LOST = (3, 4, 5, 8)
_RETURN_POLL_SECONDS = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A validated reply and the node that it came from."""

    node: str
    value: T


@dataclass
class Exchange:
    """The messages of one round.

    Parameters
    ----------
    server_round : int
        The round, from 1.
    roster : Roster
        Names of the nodes, shared by all rounds of a run.
    grid : MeteredGrid, optional
        Where messages go. Without it replies can be accepted but none be collected.
    timeout : float, optional
        Seconds that nodes have for a reply; None waits for ever.
    inbox : CheckpointFolder, optional
        Where replies are kept until the round is done.
    callbacks : sequence of Callback
        Who wants to hear of replies.
    return_seconds : float, default 0
        How long to wait for a lost node to come back.
    """

    server_round: int
    roster: Roster
    grid: MeteredGrid | None = None
    timeout: float | None = None
    inbox: CheckpointFolder | None = None
    callbacks: Sequence[Callback] = ()
    return_seconds: float = 0.0
    # By id until the round is over: a node may tell its name in its reply only.
    _asked: list[int] = field(default_factory=list)
    _answered: list[int] = field(default_factory=list)
    _failed: list[tuple[int, str]] = field(default_factory=list)

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the nodes that a message was sent to, in order."""
        return self._names(self._asked)

    @property
    def answered(self) -> tuple[str, ...]:
        """Names of the nodes that gave a usable reply, in order."""
        return self._names(self._answered)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Who did not contribute, and why."""
        return tuple(Failure(self.roster.name(node), reason) for node, reason in self._failed)

    def _names(self, nodes: Iterable[int]) -> tuple[str, ...]:
        ordered = sorted(set(nodes), key=self.roster.position)
        return tuple(self.roster.name(node) for node in ordered)

    def collect(self, messages: Iterable[Message]) -> list[Message]:
        """Send messages and return the replies, errors included.

        A reply that an interrupted run had already received is taken from the inbox; its node
        is not asked again. A node that stays silent is noted as failed.
        """
        assert self.grid is not None
        outgoing, replies = [], []
        for message in messages:
            name = self.roster.name(message.metadata.dst_node_id)
            self._asked.append(message.metadata.dst_node_id)
            kept = self.inbox and self.inbox.kept_reply(self._key(message), name)
            if kept:
                log_event("reply_kept", round=self.server_round, node=name)
                replies.append(Message(kept, reply_to=message))
            else:
                outgoing.append(message)
        answers = self._ask(outgoing)
        lost = [message for message in outgoing if _is_lost(answers.get(_receiver(message)))]
        if again := self._returned(lost):
            log_event("ask_again", round=self.server_round, nodes=len(again))
            for message in again:
                answers.pop(_receiver(message))
            answers |= self._ask([_repeated(message) for message in again])
        silent = {_receiver(message) for message in outgoing} - answers.keys()
        for node_id in sorted(silent, key=self.roster.position):
            self._fail(node_id, f"no reply within {self.timeout} s")
        return [*replies, *answers.values()]

    def _ask(self, messages: list[Message]) -> dict[int, Message]:
        """Send messages and return the replies by node, each kept on disk as it came in."""
        assert self.grid is not None
        for callback in self.callbacks:
            callback.on_exchange(self.server_round, len(messages))
        started, answers = time.monotonic(), dict[int, Message]()
        waiting = {_receiver(message): message for message in messages}
        for reply in self.grid.stream(messages, timeout=self.timeout):
            node_id = reply.metadata.src_node_id
            if waiting.pop(node_id, None) is None:
                self._warn("uncalled_for_reply", node=self.roster.name(node_id))
                continue
            answers[node_id] = reply
            if reply.has_content():
                self._learn(reply)
                if self.inbox:
                    name = self.roster.name(node_id)
                    self.inbox.keep_reply(self._key(reply), name, reply.content)
            self._log_reply(reply, time.monotonic() - started)
            for callback in self.callbacks:
                callback.on_reply(
                    self.server_round, self.roster.name(node_id), not reply.has_error()
                )
        return answers

    def _returned(self, lost: list[Message]) -> list[Message]:
        """Return the messages whose nodes are connected again, waiting for them if told to."""
        assert self.grid is not None
        deadline = time.monotonic() + self.return_seconds
        while lost:
            connected = set(self.grid.get_node_ids())
            back = [message for message in lost if _receiver(message) in connected]
            if len(back) == len(lost) or time.monotonic() >= deadline:
                return back
            time.sleep(_RETURN_POLL_SECONDS)
        return []

    def accept(
        self, replies: Iterable[Message], unpack: Callable[[RecordDict], T], *, at_least: int = 0
    ) -> list[Answer[T]]:
        """Validate replies and return the usable ones, ordered by node name.

        Parameters
        ----------
        replies : iterable of Message
            In any order, errors included.
        unpack : callable
            Turns a reply's content into a value or raises `BadReplyError`.
        at_least : int
            How many usable replies are needed.

        Raises
        ------
        RoundFailedError
            If fewer are usable. It carries those that are.
        """
        replies = list(replies)
        for reply in replies:
            if reply.has_content():
                self._learn(reply)
        answers: list[Answer[T]] = []
        for reply in sorted(replies, key=lambda r: self.roster.position(r.metadata.src_node_id)):
            node_id = reply.metadata.src_node_id
            name = self.roster.name(node_id)
            if reply.has_error():
                self._fail(node_id, reply.error.reason or f"error {reply.error.code}")
                continue
            try:
                answers.append(Answer(name, unpack(reply.content)))
            except BadReplyError as error:
                self._fail(node_id, str(error))
                if self.inbox:
                    self.inbox.drop_reply(self._key(reply), name)
                continue
            self._answered.append(node_id)
        if len(answers) < at_least:
            raise RoundFailedError(self._too_few(len(answers), at_least), answers, self.failures)
        return answers

    def _learn(self, reply: Message) -> None:
        self.roster.learn(reply.metadata.src_node_id, wire.unpack_name(reply.content))

    def _fail(self, node_id: int, reason: str) -> None:
        self._failed.append((node_id, reason))
        self._warn("left_out", node=self.roster.name(node_id), reason=reason)

    def _warn(self, event: str, **fields: object) -> None:
        log_warning(event, round=self.server_round, **fields)

    def _log_reply(self, reply: Message, seconds: float) -> None:
        log_event(
            "reply",
            round=self.server_round,
            node=self.roster.name(reply.metadata.src_node_id),
            what=reply.metadata.message_type,
            bytes=wire.payload_bytes(reply.content) if reply.has_content() else 0,
            seconds=seconds,
            usable=reply.has_content(),
        )

    @staticmethod
    def _key(message: Message) -> str:
        return f"{message.metadata.group_id}-{message.metadata.message_type}"

    def _too_few(self, usable: int, needed: int) -> str:
        text = (
            f"round {self.server_round} failed: {usable} of {len(self.asked) or usable} nodes "
            f"gave a usable reply, min_nodes is {needed}"
        )
        for failure in self.failures:
            text += f"\n  {failure}"
        if self.inbox:
            text += (
                f"\nThe usable replies are kept in {self.inbox.folder}; start again with "
                "resume=True to ask only the other nodes"
            )
        return text



def _receiver(message: Message) -> int:
    return message.metadata.dst_node_id


def _is_lost(reply: Message | None) -> bool:
    return reply is not None and reply.has_error() and reply.error.code in _LOST


def _repeated(message: Message) -> Message:
    # Flower numbers every message; the same one cannot be sent twice.
    return Message(
        message.content,
        dst_node_id=_receiver(message),
        message_type=message.metadata.message_type,
        group_id=message.metadata.group_id,
    )
