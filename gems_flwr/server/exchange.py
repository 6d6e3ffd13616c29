"""Messages out, usable replies back: the part of a round that every protocol shares.

An `Exchange` belongs to one round. It sends one message to each chosen node, keeps every reply
on disk as it comes in, tells errors and silence from answers, validates the answers one by one
and puts them into an order that does not depend on arrival. Whoever is left out is named. A node
that was lost on the way and is back is asked once more.

Nothing in a reply is trusted: which message it answers, how large it is, what it says. What a node
writes about itself (a group, a name, a reason) never becomes part of a path, and texts are cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from flwr.app import Message, RecordDict

from gems_flwr.errors import BadReplyError, Failure, RoundFailedError, describe_fault
from gems_flwr.runtime.checkpoint import CheckpointFolder
from gems_flwr.runtime.flower_internals import SUPERLINK_NODE_ID
from gems_flwr.runtime.metered_grid import MeteredGrid, Traffic
from gems_flwr.server.addressing import add_reason, answered_node, as_the_nodes, is_lost
from gems_flwr.server.log import is_heard, log_event, log_warning, readable
from gems_flwr.server.nodes import Nodes
from gems_flwr.server.settings import Callback
from gems_flwr.wire.fault_reasons import fault_in
from gems_flwr.wire.keys import SECAGG_CONFIGS
from gems_flwr.wire.model_replies import MetricsReply, is_masked, unpack_name
from gems_flwr.wire.purposes import purpose_of
from gems_flwr.wire.records import payload_bytes
from gems_flwr.wire.withdrawals import pack_withdrawal, withdraws

_RETURN_POLL_SECONDS = 0.5

T = TypeVar("T")

HAS_LEFT = "it has withdrawn from the run"
_NO_SECAGG = (
    "the node runs Flower's secaggplus_mod, whose protocol only Flower's legacy SecAggPlusWorkflow "
    "speaks; remove the mod, or use that workflow with a legacy strategy"
)


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A validated reply and the node that it came from.

    Examples
    --------
    >>> from gems_flwr import Answer, ModelReply
    >>> Answer("north", ModelReply({}, num_examples=120, metrics={})).value.num_examples
    120
    """

    node: str
    value: T


@dataclass
class Exchange:
    """The messages of one round.

    Parameters
    ----------
    server_round : int
        The round, from 1.
    nodes : Nodes
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
    max_reply_bytes : int, optional
        Largest payload of a reply; a larger one is neither unpacked nor kept.
    max_examples : float, optional
        Most examples that a node may count for, whatever it claims.
    barred : mapping from int to str
        Nodes, by id, that are out of this round, and why; see `replay`.
    began : Traffic
        What the grid had counted when the round began; the first begins when nodes are asked for
        their names.
    """

    server_round: int
    nodes: Nodes
    grid: MeteredGrid | None = None
    timeout: float | None = None
    inbox: CheckpointFolder | None = None
    callbacks: Sequence[Callback] = ()
    return_seconds: float = 0.0
    max_reply_bytes: int | None = None
    max_examples: float | None = None
    barred: Mapping[int, str] = field(default_factory=dict)
    began: Traffic = field(default_factory=Traffic)
    # Hears of every reply with content as it comes in, and of how many are still to come.
    hears: Callable[[Message, int], None] | None = field(default=None, init=False)
    # If the round is played again without nodes that have left: how often it was, and what a
    # strategy has of the others that it need not ask for again.
    replays: int = field(default=0, init=False)
    held: Any = field(default=None, init=False)
    # How many examples nodes said that they trained on, by id; for the model card.
    examples: dict[int, int] = field(default_factory=dict, init=False)
    # By id until the round is over: a node may tell its name in its reply only.
    _asked: list[int] = field(default_factory=list, init=False)
    _answered: list[int] = field(default_factory=list, init=False)
    _failed: list[tuple[int, str]] = field(default_factory=list, init=False)
    # Who left the run in this round, and had given usable replies in it before.
    _left_after: list[int] = field(default_factory=list, init=False)
    # Under which key a node's reply is kept: that of the question, never what the reply says.
    _keys: dict[int, str] = field(default_factory=dict, init=False)
    # What the messages so far were for, one word for each time that some were sent.
    _purposes: list[str] = field(default_factory=list, init=False)

    @property
    def purposes(self) -> tuple[str, ...]:
        """What nodes were asked for, in order; see `wire.purposes`."""
        return tuple(self._purposes)

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the nodes that a message was sent to, in order."""
        return self._names(self._asked)

    @property
    def answered(self) -> tuple[str, ...]:
        """Names of the nodes that gave a usable reply, in order."""
        return self._names(self._answered)

    @property
    def answered_ids(self) -> tuple[int, ...]:
        """Ids of the nodes that gave a usable reply, in the order of their names."""
        return tuple(sorted(set(self._answered), key=self.nodes.position))

    @property
    def left_after_answering(self) -> tuple[str, ...]:
        """Names of the nodes that left in this round, after usable replies in it."""
        return self._names(self._left_after)

    @property
    def refused(self) -> dict[int, str]:
        """Ids of the nodes that did not contribute, and why at last."""
        return dict(self._failed)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Who did not contribute, and why."""
        return tuple(Failure(self.nodes.name(node), reason) for node, reason in self._failed)

    def _names(self, nodes: Iterable[int]) -> tuple[str, ...]:
        ordered = sorted(set(nodes), key=self.nodes.position)
        return tuple(self.nodes.name(node) for node in ordered)

    def collect(self, messages: Iterable[Message]) -> list[Message]:
        """Send messages and return the replies, errors included.

        A reply that an interrupted run had already received is taken from the inbox; its node
        is not asked again. A node that stays silent is noted as failed.
        """
        assert self.grid is not None
        messages, outgoing, replies = list(messages), [], []
        if messages:
            self._purposes.append(purpose_of(messages[0]))
            log_event("ask", **self._place(), nodes=len(messages))
        for message in messages:
            name = self.nodes.name(message.metadata.dst_node_id)
            self._asked.append(message.metadata.dst_node_id)
            self._keys[message.metadata.dst_node_id] = self._key(message)
            kept = self.inbox and self.inbox.kept_reply(self._key(message), name)
            if kept and not self._too_large(kept):
                log_event("reply_kept", round=self.server_round, node=name, what=self._what)
                self._note_leaving(message.metadata.dst_node_id, kept)
                replies.append(Message(kept, reply_to=message))
                self._pass_on(replies[-1], 0)
            else:
                outgoing.append(message)
        answers = self._ask(outgoing)
        lost = [message for message in outgoing if is_lost(answers.get(_receiver(message)))]
        again = self._returned(lost)
        if self.return_seconds:
            for node_id in {*map(_receiver, lost)} - {*map(_receiver, again)}:
                add_reason(answers[node_id], f"not back within {self.return_seconds:g} s")
        if again:
            log_event("ask_again", round=self.server_round, nodes=len(again))
            for message in again:
                answers.pop(_receiver(message))
            answers |= self._ask([_repeated(message) for message in again])
        return [*replies, *answers.values()]

    def _ask(self, messages: list[Message]) -> dict[int, Message]:
        """Send messages; return replies and errors by node, each kept on disk as it comes in.

        A node that stays silent, or whose reply is too large, is noted as failed.
        """
        assert self.grid is not None
        for callback in self.callbacks:
            callback.on_exchange(self.server_round, len(messages))
        started, answers = time.monotonic(), dict[int, Message]()
        waiting = {_receiver(message): message for message in messages}
        for reply in self.grid.stream(messages, timeout=self.timeout):
            node_id = answered_node(reply, waiting)
            if node_id is None:
                said = {"reason": readable(reply.error.reason or "")} if reply.has_error() else {}
                self._warn("uncalled_for_reply", node=self._source(reply), **said)
                continue
            seconds = time.monotonic() - started
            reply = as_the_nodes(reply, waiting.pop(node_id), seconds)
            if is_lost(reply):
                self._warn("lost", node=self.nodes.name(node_id), seconds=seconds)
            size = self._too_large(reply.content) if reply.has_content() else 0
            has_content = reply.has_content() and not size
            if has_content:
                self._learn(reply)
                self._note_leaving(node_id, reply.content)
                if self.inbox:
                    name = self.nodes.name(node_id)
                    left = self.nodes.has_left(node_id)
                    content = pack_withdrawal(name) if left else reply.content
                    self.inbox.keep_reply(self._keys[node_id], name, content)
            self._log_reply(reply, seconds)
            if size:
                self._fail(node_id, self._size_reason(size))
            else:
                answers[node_id] = reply
            for callback in self.callbacks:
                callback.on_reply(self.server_round, self.nodes.name(node_id), has_content)
            if has_content:
                self._pass_on(reply, len(waiting))
        for node_id in sorted(waiting, key=self.nodes.position):
            self._fail(node_id, f"no reply within {self.timeout} s")
        return answers

    def _pass_on(self, reply: Message, waiting: int) -> None:
        if self.hears is not None and not self.nodes.has_left(reply.metadata.src_node_id):
            self.hears(reply, waiting)

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

    def unbarred(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages but those to nodes that are out of this round, who have failed."""
        outgoing = []
        for message in messages:
            node_id = message.metadata.dst_node_id
            if self.nodes.has_left(node_id):
                continue  # nobody asks it again
            if node_id not in self.barred:
                outgoing.append(message)
            elif node_id not in self.refused:
                # Said aloud only if it helps to leave the node out.
                self._asked.append(node_id)
                self._failed.append((node_id, readable(self.barred[node_id])))
        return outgoing

    def accept(
        self, replies: Iterable[Message], unpack: Callable[[RecordDict], T], *, at_least: int = 0
    ) -> list[Answer[T]]:
        """Validate replies and return the usable ones, ordered by node name.

        Parameters
        ----------
        replies : iterable of Message
            In any order, errors included.
        unpack : callable
            Turns a reply's content into a value or raises `BadReplyError`. Whatever else it
            raises leaves the node out just the same.
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
        for reply in sorted(replies, key=lambda r: self.nodes.position(r.metadata.src_node_id)):
            node_id = reply.metadata.src_node_id
            if reply.has_error():
                self._fail(node_id, _explained(reply.error.reason or f"error {reply.error.code}"))
                continue
            if self.nodes.has_left(node_id):
                self._fail(node_id, HAS_LEFT)
                continue
            try:
                if is_masked(reply.content):
                    raise BadReplyError(_NO_SECAGG)
                value = self._capped(unpack(reply.content))
            except BadReplyError as error:
                self.refuse(node_id, str(error))
            except Exception as error:
                # No reply ends a run, whatever it does to our own code.
                self.refuse(node_id, f"the reply cannot be used: {describe_fault(error)}")
            else:
                answers.append(Answer(self.nodes.name(node_id), value))
                self._answered.append(node_id)
                self._note_examples(node_id, value)
        log_event("usable", **self._place(), nodes=len(answers), of=len(replies))
        return self._enough(answers, at_least)

    def _note_examples(self, node_id: int, value: object) -> None:
        """Note how many examples a node trained on, if its reply says so."""
        told = getattr(value, "num_examples", 0)
        if told and not isinstance(value, MetricsReply):
            self.examples[node_id] = int(told)

    def without(
        self, answers: Iterable[Answer[T]], reasons: Mapping[str, str], *, at_least: int = 0
    ) -> list[Answer[T]]:
        """Return the answers but those that cannot stand beside the others.

        Parameters
        ----------
        answers : iterable of Answer
            What `accept` returned.
        reasons : mapping from str to str
            By node, why its answer is left out.
        at_least : int
            How many must be left.

        Raises
        ------
        RoundFailedError
            If fewer are left.
        """
        for node_id in dict.fromkeys(self._answered):
            if self.nodes.name(node_id) in reasons:
                self._answered = [each for each in self._answered if each != node_id]
                self.refuse(node_id, reasons[self.nodes.name(node_id)])
        answers = list(answers)
        kept = [answer for answer in answers if answer.node not in reasons]
        if len(kept) < len(answers):
            log_event("usable", **self._place(), nodes=len(kept), of=len(answers))
        return self._enough(kept, at_least)

    def _enough(self, answers: list[Answer[T]], at_least: int) -> list[Answer[T]]:
        if len(answers) < at_least:
            raise RoundFailedError(self._too_few(len(answers), at_least), answers, self.failures)
        return answers

    def refuse(self, node_id: int, reason: str) -> None:
        """Leave a node out, and forget its reply, so that a resumed run asks it again."""
        self._fail(node_id, reason)
        if self.inbox and node_id in self._keys:
            self.inbox.drop_reply(self._keys[node_id], self.nodes.name(node_id))

    def _note_leaving(self, node_id: int, content: RecordDict) -> None:
        """Note that a node leaves by this reply; what it has said before in this round is void."""
        if withdraws(content):
            self._warn("withdraw", node=self.nodes.name(node_id), what=self._what)
            self.nodes.withdraw(node_id)
            self._left_after += [node_id] if node_id in self._answered else []
            self._answered = [each for each in self._answered if each != node_id]

    def forget(self, node_id: int) -> None:
        """Forget what a node that has left had sent in this round, on disk as well."""
        if self.inbox:
            name, key = self.nodes.name(node_id), self._keys.get(node_id)
            # That it left stays: a resumed run has to know.
            self.inbox.drop_replies_of(name, but=key)

    def _learn(self, reply: Message) -> None:
        self.nodes.learn(reply.metadata.src_node_id, unpack_name(reply.content))

    def _too_large(self, content: RecordDict) -> int:
        """Return the size of a reply that is too large, else 0."""
        if self.max_reply_bytes is None:
            return 0
        size = payload_bytes(content)
        return size if size > self.max_reply_bytes else 0

    def _size_reason(self, size: int) -> str:
        return (
            f"the reply has {size:,} bytes, max_reply_bytes is {self.max_reply_bytes:,}; it was "
            "not unpacked (raise max_reply_bytes if honest replies are that large)"
        )

    def _capped(self, value: T) -> T:
        """Let a node count for no more examples than the operator allows."""
        reply: Any = value
        most = self.max_examples
        if most is None or getattr(reply, "num_examples", 0) <= most:
            return value
        capped: T = replace(reply, num_examples=most)
        return capped

    def _fail(self, node_id: int, reason: str) -> None:
        reason = readable(reason)
        self._failed.append((node_id, reason))
        self._warn("left_out", node=self.nodes.name(node_id), reason=reason, what=self._what)

    def _source(self, reply: Message) -> str:
        node_id = reply.metadata.src_node_id
        return "SuperLink" if node_id == SUPERLINK_NODE_ID else self.nodes.name(node_id)

    def _warn(self, event: str, **fields: object) -> None:
        log_warning(event, round=self.server_round, **fields)

    def _log_reply(self, reply: Message, seconds: float) -> None:
        """Log what came; whether it is of use is known only when it has been looked at."""
        if not is_heard():
            return
        came: dict[str, object] = {"bytes": 0}
        if reply.has_content():
            came["bytes"] = payload_bytes(reply.content)
        else:
            came["error"] = reply.error.code
        name = self.nodes.name(reply.metadata.src_node_id)
        log_event(
            "reply", round=self.server_round, node=name, what=self._what, **came, seconds=seconds
        )

    @property
    def _what(self) -> str:
        return self._purposes[-1] if self._purposes else "replies"

    def _place(self) -> dict[str, object]:
        return {"round": self.server_round, "what": self._what}

    @staticmethod
    def _key(message: Message) -> str:
        return f"{message.metadata.group_id}-{message.metadata.message_type}"

    def _too_few(self, usable: int, needed: int) -> str:
        text = (
            f"round {self.server_round} failed: {usable} of {len(self.asked) or usable} nodes "
            f"gave a usable reply, min_nodes is {needed}"
        )
        faults = {fault_in(reason) for _, reason in self._failed}
        if len(faults) == 1 and {node for node, _ in self._failed} == set(self._asked):
            # What is wrong everywhere is most likely wrong in the app: said once, and first.
            text = f"{faults.pop()}\n({text}: all of them for this reason)"
        else:
            text += "".join(f"\n  {failure}" for failure in self.failures)
        if self.inbox:
            text += (
                f"\nThe usable replies are kept in {self.inbox.folder}; start again with "
                "resume=True to ask only the other nodes"
            )
        return text


def _receiver(message: Message) -> int:
    return message.metadata.dst_node_id


def _repeated(message: Message) -> Message:
    # Flower numbers every message; the same one cannot be sent twice.
    return Message(
        message.content,
        dst_node_id=_receiver(message),
        message_type=message.metadata.message_type,
        group_id=message.metadata.group_id,
    )


def _explained(reason: str) -> str:
    """Say what an error of Flower's own means, where its words do not."""
    return f"{reason}: {_NO_SECAGG}" if SECAGG_CONFIGS in reason else reason
