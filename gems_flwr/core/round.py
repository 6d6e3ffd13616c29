"""One round, as a strategy sees it: `ask` gives an answer per node, `total` a sum and nothing else.

Behind both are the messages of the round. One goes to each chosen node; every reply is kept on disk
as it comes in, errors and silence are told from answers, and answers are checked one by one and put
into an order that does not depend on arrival. Whoever is left out is named. A node that was lost on
the way and is back is asked once more.

Nothing in a reply is trusted: which message it answers, how large it is, what it says. What a node
writes about itself (a group, a name, a reason) never becomes part of a path, and texts are cut.
How messages travel is up to `Carrier` values around the grid: packed, without layers that nodes
know. Neither strategies nor questions know of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from gems_flwr.core.flower import SUPERLINK_NODE_ID
from gems_flwr.core.folder import CheckpointFolder
from gems_flwr.core.log import is_heard, log_event, log_warning, readable
from gems_flwr.core.nodes import Nodes
from gems_flwr.core.question import Question, SumQuestion
from gems_flwr.core.records import (
    SECAGG_CONFIGS,
    TRAIN,
    USUAL_KEYS,
    MetricsReply,
    RecordKeys,
    add_reason,
    answered_node,
    as_the_nodes,
    fault_in,
    is_lost,
    once_more,
    pack_instruction,
    payload_bytes,
    records_of,
    to_record,
    unpack_metrics_reply,
    unpack_name,
)
from gems_flwr.core.run import Callback, Tolerance, generator
from gems_flwr.core.sums import PlainSums, Total
from gems_flwr.errors import (
    BadReplyError,
    Failure,
    NotEnoughNodesError,
    RoundFailedError,
    describe_fault,
)
from gems_flwr.typing import Arrays

if TYPE_CHECKING:
    from gems_flwr.carriers import MeteredGrid
    from gems_flwr.secure.fixed_point import Section
    from gems_flwr.spaces import OutputLayer

_RETURN_POLL_SECONDS = 0.5
_NO_SECAGG = (
    "the node runs Flower's secaggplus_mod, whose protocol only Flower's legacy SecAggPlusWorkflow "
    "speaks; remove the mod, or use that workflow with a legacy strategy"
)

T = TypeVar("T")
V = TypeVar("V")
Send = Callable[[list[Message]], list[Message]]
Records = Mapping[str, ConfigRecord | ArrayRecord]


class Carrier:
    """A way to carry messages, around another one; one value serves all rounds of a run."""

    # Part of what a checkpoint is checked against; empty where any other run may take over.
    name: str = ""
    # Whether an account is kept of single nodes, whose names must be known first.
    needs_names: ClassVar[bool] = False
    # Whether nodes must have `good_enough_mod`, whatever the strategy asks.
    needs_mod: ClassVar[bool] = False

    def carry(
        self, round: Round, messages: list[Message], question: Question[Any] | None, send: Send
    ) -> list[Message]:
        """Send messages, one to each node, by `send`, changed on the way out and in.

        `question` is what they ask; None for ordinary train and evaluate messages.
        """
        raise NotImplementedError

    def check_model(self, arrays: Arrays) -> None:
        """Refuse a model that cannot be carried, before a run begins."""

    def settle(self, round: Round) -> None:
        """Note which replies of a round have counted."""

    def recall(self, memory: Arrays) -> None:
        """Go on from what `to_memory` returned."""

    def to_memory(self) -> dict[str, Any]:
        """Return what has to be kept from round to round."""
        return {}


@dataclass(eq=False)
class Round:
    """The messages of one round, which a strategy gets from the loop."""

    number: int  # from 1
    nodes: Nodes  # their names, shared by all rounds of a run
    # Where messages go. Without it replies can be accepted but none be asked for.
    grid: MeteredGrid | None = None
    model: Arrays = field(default_factory=dict)  # what questions are about, unless they say so
    config: ConfigRecord = field(default_factory=ConfigRecord)  # the user's, sent with questions
    seed: int = 0
    min_nodes: int = 1  # fewest usable answers where a caller asks for that
    timeout: float | None = None  # seconds that nodes have for a reply; None waits for ever
    inbox: CheckpointFolder | None = None  # where replies are kept until the round is done
    callbacks: Sequence[Callback] = ()
    tolerance: Tolerance = field(default_factory=Tolerance)
    carriers: Sequence[Carrier] = ()  # around the grid, the outermost first
    sums: PlainSums = field(default_factory=PlainSums)
    keys: RecordKeys = USUAL_KEYS
    needs_names: bool = False  # whether nodes that have joined are asked for their names first
    barred: Mapping[int, str] = field(default_factory=dict)  # ids that are left out, and why
    # Set by strategies that are about an output layer: then nodes that know the layers below are
    # not sent them.
    layer: OutputLayer | None = field(default=None, init=False)
    # What the nodes' own train handlers reported beside their answers, by name.
    reports: dict[str, MetricsReply] = field(default_factory=dict, init=False)
    # By id until the round is over: a node may send its name in its reply only.
    _asked: list[int] = field(default_factory=list, init=False)
    _answered: list[int] = field(default_factory=list, init=False)
    _failed: list[tuple[int, str]] = field(default_factory=list, init=False)
    # Under which key a node's reply is kept: that of the question, never what the reply says.
    _keys: dict[int, str] = field(default_factory=dict, init=False)
    # Of the questions so far, one for each exchange.
    _kinds: list[str] = field(default_factory=list, init=False)
    _groups: dict[str, int] = field(default_factory=dict, init=False)

    # --- what strategies call -----------------------------------------------------------------

    def sample(
        self,
        fraction: float = 1.0,
        *,
        purpose: str = TRAIN,
        size: Callable[[int], int] | None = None,
        needed: tuple[int, str] | None = None,
    ) -> list[str]:
        """Choose connected nodes by the run's own generator; return their names in a fixed order.

        Parameters
        ----------
        fraction : float, default 1.0
            Share of the connected nodes, but no fewer than `min_nodes`.
        purpose : str
            What for: choices for different purposes are independent.
        size : callable, optional
            Gets how many are connected, returns how many to choose, in place of `fraction`.
        needed : pair of int and str, optional
            How many must be connected, and which option says so; `min_nodes` by default.
        """
        at_least, option = needed or (self.min_nodes, "min_nodes")
        connected = self.connected(at_least, option)
        self.nodes.meet(self._there, connected)
        if self.needs_names:
            self.nodes.ask_names(self._there, connected, self.timeout)
        # The tiny term keeps 0.29 * 100 from counting as 28.
        default = max(self.min_nodes, int(fraction * len(connected) + 1e-9))
        count = default if size is None else size(len(connected))
        if count == len(connected):
            chosen = sorted(connected, key=self.nodes.position)
        else:
            available = sorted(connected, key=self.nodes.place)
            rng = generator(self.seed, "choose", purpose, self.number)
            picks = rng.choice(len(available), size=count, replace=False)
            chosen = [available[i] for i in sorted(picks)]
        return [self.nodes.name(node) for node in chosen]

    def ask(
        self,
        question: Question[T] | Callable[[str], Question[T]],
        nodes: Sequence[str] | None = None,
        *,
        model: Arrays | None = None,
        at_least: int = 0,
    ) -> dict[str, T]:
        """Ask nodes a question; return the usable answers by name, in the order of names.

        Parameters
        ----------
        question : Question, or callable
            What to ask; a callable gets a node's name and returns its question.
        nodes : sequence of str, optional
            Whom; all connected nodes by default.
        model : mapping from str to ndarray, optional
            What it is about; the round's model by default.
        at_least : int, default 0
            How many usable answers are needed; with fewer, a `RoundFailedError` carries them.
        """
        names = self.sample() if nodes is None else nodes
        questions = {
            name: question if isinstance(question, Question) else question(name) for name in names
        }
        return self.exchange(
            questions, lambda q, content: q.read(content), model=model, at_least=at_least
        )

    def total(
        self,
        question: SumQuestion,
        sections: Sequence[Section],
        nodes: Sequence[str] | None = None,
        *,
        model: Arrays | None = None,
        at_least: int = 0,
    ) -> Total:
        """Return the sum of what nodes answer; single answers are not looked at.

        `sections` says what a summand is made of: shapes, bounds and bits. All else is as in `ask`.
        """
        names = self.sample() if nodes is None else nodes
        whole, self.model = self.model, self.model if model is None else model
        try:
            return self.sums.total(self, question, sections, names, at_least)
        finally:
            self.model = whole

    def leave_out(
        self, answers: Mapping[str, V], reasons: Mapping[str, str], *, at_least: int = 0
    ) -> dict[str, V]:
        """Return answers, at least some, without those of nodes that there are `reasons` against.

        These cannot stand beside the others, and are named among the failures.
        """
        for node_id in dict.fromkeys(self._answered):
            if (name := self.nodes.name(node_id)) in reasons:
                self._answered = [each for each in self._answered if each != node_id]
                self.refuse(node_id, reasons[name])
        kept = {name: answer for name, answer in answers.items() if name not in reasons}
        if len(kept) < len(answers):
            log_event(
                "usable", round=self.number, what=self._what, nodes=len(kept), of=len(answers)
            )
        self._check_enough(kept, at_least)
        return kept

    @property
    def is_secure(self) -> bool:
        """Whether sums are masked, so that single summands are seen by no one."""
        return self.sums.is_masked

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Who did not contribute so far, and why."""
        return tuple(Failure(self.nodes.name(node), reason) for node, reason in self._failed)

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the nodes that a message was sent to, in order."""
        return tuple(map(self.nodes.name, sorted(set(self._asked), key=self.nodes.position)))

    @property
    def answered(self) -> tuple[str, ...]:
        """Names of the nodes that gave a usable reply, in order."""
        return tuple(map(self.nodes.name, self.answered_ids))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of what nodes were asked, in order."""
        return tuple(self._kinds)

    # --- what the loop and carriers call ------------------------------------------------------

    def exchange(
        self,
        questions: Mapping[str, Question[T]],
        read: Callable[[Question[T], RecordDict], V],
        *,
        model: Arrays | None = None,
        beside: Records | Callable[[str], Records] | None = None,
        at_least: int = 0,
    ) -> dict[str, V]:
        """Ask each node its own question; see `ask`.

        `read` gets the node's question and the content of its reply; `beside` are further records
        of the messages, or gets a node's name and returns them.
        """
        if not questions:
            self._check_enough({}, at_least)
            return {}
        first = next(iter(questions.values()))
        by_id = {
            self.id_of(name): (name, asked.about(self.layer)) for name, asked in questions.items()
        }
        sent = self.model if model is None else model
        record = to_record(sent) if first.carries_model else None
        messages = self.messages(by_id, record, first.message_type, step=first.kind)
        for message in messages:
            name, asked = by_id[_receiver(message)]
            message.content.update(asked.to_records())
            message.content.update((beside(name) if callable(beside) else beside) or {})
        replies = self.send(messages, first)

        def checked(node_id: int, content: RecordDict) -> V:
            _, asked = by_id[node_id]
            value = read(asked, content)
            if asked.trains and records_of(content, MetricRecord):
                self.reports[self.nodes.name(node_id)] = unpack_metrics_reply(content)
            return value

        return self.accept(replies, checked, at_least=at_least)

    def messages(
        self,
        nodes: Iterable[int],
        arrays: ArrayRecord | None,
        message_type: str = TRAIN,
        config: ConfigRecord | None = None,
        step: str = "",
    ) -> list[Message]:
        """Return one message per node, each with records of its own."""
        count = self._groups[step] = self._groups.get(step, 0) + 1
        parts = [str(self.number), step, str(count) if count > 1 else ""]
        config = self.config if config is None else config
        return [
            Message(
                content=pack_instruction(
                    arrays, config, server_round=self.number, seed=self.seed, keys=self.keys
                ),
                dst_node_id=node,
                message_type=message_type,
                group_id="-".join(part for part in parts if part),
            )
            for node in nodes
        ]

    def send(
        self, messages: Iterable[Message], question: Question[Any] | None = None
    ) -> list[Message]:
        """Send messages by all carriers; return the replies, errors included."""
        outgoing = []
        for message in messages:
            node_id = _receiver(message)
            if node_id not in self.barred:
                outgoing.append(message)
            elif node_id not in self.refused:
                # Logged only if it helps to leave the node out.
                self._asked.append(node_id)
                self._failed.append((node_id, readable(self.barred[node_id])))
        return self._carried(outgoing, question, list(self.carriers))

    def _carried(
        self, messages: list[Message], question: Question[Any] | None, carriers: list[Carrier]
    ) -> list[Message]:
        if not messages:
            return []
        if not carriers:
            return self._collect(messages, question)
        first, *others = carriers
        return first.carry(self, messages, question, lambda m: self._carried(m, question, others))

    def accept(
        self,
        replies: Iterable[Message],
        read: Callable[[int, RecordDict], V],
        *,
        at_least: int = 0,
    ) -> dict[str, V]:
        """Check replies, errors included; return the usable ones by name, in the order of names.

        `read` gets a node's id and the reply's content, returns a value or raises `BadReplyError`.
        Whatever else it raises leaves the node out just the same. For `at_least` see `ask`.
        """
        replies = list(replies)
        for reply in replies:
            if reply.has_content():
                self._learn(reply)
        values: dict[str, V] = {}
        for reply in sorted(replies, key=lambda r: self.nodes.position(r.metadata.src_node_id)):
            node_id = reply.metadata.src_node_id
            if reply.has_error():
                reason = reply.error.reason or f"error {reply.error.code}"
                explained = f"{reason}: {_NO_SECAGG}" if SECAGG_CONFIGS in reason else reason
                self._fail(node_id, explained)
                continue
            try:
                if SECAGG_CONFIGS in reply.content:
                    raise BadReplyError(_NO_SECAGG)
                value = self._capped(read(node_id, reply.content))
            except BadReplyError as error:
                self.refuse(node_id, str(error))
            except Exception as error:
                # No reply ends a run, whatever it does to our own code.
                self.refuse(node_id, f"the reply cannot be used: {describe_fault(error)}")
            else:
                values[self.nodes.name(node_id)] = value
                self._answered.append(node_id)
        log_event("usable", round=self.number, what=self._what, nodes=len(values), of=len(replies))
        self._check_enough(values, at_least)
        return values

    def refuse(self, node_id: int, reason: str) -> None:
        """Leave a node out, and drop its kept reply, so that a resumed run asks it again."""
        self._fail(node_id, reason)
        if self.inbox and node_id in self._keys:
            self.inbox.drop_reply(self._keys[node_id], self.nodes.name(node_id))

    def connected(self, at_least: int, option: str, wanted: int | None = None) -> list[int]:
        """Return the ids of the connected nodes, waiting for `wanted` or `at_least` of them.

        `option` says how many are needed, which is what an error names.
        """
        seconds, wanted = self.tolerance.wait_seconds, max(wanted or 0, at_least)
        deadline = time.monotonic() + seconds
        while len(ids := list(self._there.get_node_ids())) < wanted and time.monotonic() < deadline:
            log_event("waiting_for_nodes", connected=len(ids), wanted=wanted)
            time.sleep(min(1.0, max(0.01, seconds / 20)))
        if len(ids) < at_least:
            raise NotEnoughNodesError(
                f"{len(ids)} nodes are connected after {seconds:g} s, {option} is {at_least}; "
                f"start more nodes, lower {option} or raise wait_seconds"
            )
        if len(ids) < wanted:
            log_warning("too_few_nodes", connected=len(ids), wanted=wanted)
        return ids

    def id_of(self, name: str) -> int:
        """Return the id of a node by its name, or by what it was called before it had one."""
        return self.nodes.id_of(name)

    @property
    def answered_ids(self) -> tuple[int, ...]:
        """Ids of the nodes that gave a usable reply, in the order of their names."""
        return tuple(sorted(set(self._answered), key=self.nodes.position))

    @property
    def refused(self) -> dict[int, str]:
        """Ids of the nodes that did not contribute, and why at last."""
        return dict(self._failed)

    # --- the exchange -------------------------------------------------------------------------

    @property
    def _there(self) -> MeteredGrid:
        assert self.grid is not None, "this round has no grid"
        return self.grid

    def _collect(self, messages: list[Message], question: Question[Any] | None) -> list[Message]:
        """Send messages and return the replies, errors included.

        A reply that an interrupted run had already received is taken from the inbox; its node
        is not asked again. A node that stays silent is noted as failed.
        """
        kind = messages[0].metadata.message_type if question is None else question.kind
        self._kinds.append(kind)
        log_event("ask", round=self.number, what=self._what, nodes=len(messages))
        outgoing, replies = [], []
        for message in messages:
            node_id = _receiver(message)
            name = self.nodes.name(node_id)
            self._asked.append(node_id)
            key = f"{message.metadata.group_id}-{message.metadata.message_type}"
            self._keys[node_id] = key
            kept = self.inbox and self.inbox.kept_reply(key, name)
            if kept and not self._too_large(kept):
                log_event("reply_kept", round=self.number, node=name, what=kind)
                replies.append(Message(kept, reply_to=message))
            else:
                outgoing.append(message)
        answers = self._stream(outgoing)
        lost = [message for message in outgoing if is_lost(answers.get(_receiver(message)))]
        again = self._returned(lost)
        if self.tolerance.return_seconds:
            for node_id in {*map(_receiver, lost)} - {*map(_receiver, again)}:
                add_reason(answers[node_id], f"not back within {self.tolerance.return_seconds:g} s")
        if again:
            log_event("ask_again", round=self.number, nodes=len(again))
            for message in again:
                answers.pop(_receiver(message))
            answers |= self._stream([*map(once_more, again)])
        return [*replies, *answers.values()]

    def _stream(self, messages: list[Message]) -> dict[int, Message]:
        """Send messages; return replies and errors by node, each kept on disk as it comes in."""
        for callback in self.callbacks:
            callback.on_exchange(self.number, len(messages))
        started, answers = time.monotonic(), dict[int, Message]()
        waiting = {_receiver(message): message for message in messages}
        for reply in self._there.stream(messages, timeout=self.timeout):
            node_id = answered_node(reply, waiting)
            if node_id is None:
                source = reply.metadata.src_node_id
                name = "SuperLink" if source == SUPERLINK_NODE_ID else self.nodes.name(source)
                error = {"reason": readable(reply.error.reason or "")} if reply.has_error() else {}
                log_warning("unexpected_reply", round=self.number, node=name, **error)
                continue
            seconds = time.monotonic() - started
            reply = as_the_nodes(reply, waiting.pop(node_id), seconds)
            if is_lost(reply):
                name = self.nodes.name(node_id)
                log_warning("lost", round=self.number, node=name, seconds=seconds)
            size = self._too_large(reply.content) if reply.has_content() else 0
            has_content = reply.has_content() and not size
            if has_content:
                self._learn(reply)
                if self.inbox:
                    name = self.nodes.name(node_id)
                    self.inbox.keep_reply(self._keys[node_id], name, reply.content)
            self._log_reply(reply, seconds)
            if size:
                self._fail(
                    node_id,
                    f"the reply has {size:,} bytes, max_reply_bytes is "
                    f"{self.tolerance.max_reply_bytes:,}; it was not unpacked (raise "
                    "Tolerance(max_reply_bytes=…) if honest replies are that large)",
                )
            else:
                answers[node_id] = reply
            for callback in self.callbacks:
                callback.on_reply(self.number, self.nodes.name(node_id), has_content)
        for node_id in sorted(waiting, key=self.nodes.position):
            self._fail(node_id, f"no reply within {self.timeout} s")
        return answers

    def _returned(self, lost: list[Message]) -> list[Message]:
        """Return the messages whose nodes are connected again, waiting for them if asked to."""
        deadline = time.monotonic() + self.tolerance.return_seconds
        while lost:
            connected = set(self._there.get_node_ids())
            back = [message for message in lost if _receiver(message) in connected]
            if len(back) == len(lost) or time.monotonic() >= deadline:
                return back
            time.sleep(_RETURN_POLL_SECONDS)
        return []

    def _learn(self, reply: Message) -> None:
        self.nodes.learn({reply.metadata.src_node_id: unpack_name(reply.content)})

    def _too_large(self, content: RecordDict) -> int:
        """Return the size of a reply that is too large, else 0."""
        most = self.tolerance.max_reply_bytes
        size = 0 if most is None else payload_bytes(content)
        return size if most is not None and size > most else 0

    def _capped(self, value: V) -> V:
        """Let a node count for no more examples than the operator allows."""
        reply: Any = value
        most = self.tolerance.max_examples
        if most is None or getattr(reply, "num_examples", 0) <= most:
            return value
        capped: V = replace(reply, num_examples=most)
        return capped

    def _fail(self, node_id: int, reason: str) -> None:
        reason = readable(reason)
        self._failed.append((node_id, reason))
        name = self.nodes.name(node_id)
        log_warning("left_out", round=self.number, node=name, reason=reason, what=self._what)

    def _log_reply(self, reply: Message, seconds: float) -> None:
        """Log what came; whether it is of use is known only when it has been looked at."""
        if is_heard():
            has_content = reply.has_content()
            came: dict[str, object] = {"bytes": payload_bytes(reply.content) if has_content else 0}
            if not has_content:
                came["error"] = reply.error.code
            name = self.nodes.name(reply.metadata.src_node_id)
            place = {"round": self.number, "node": name, "what": self._what}
            log_event("reply", **place, **came, seconds=seconds)

    @property
    def _what(self) -> str:
        """What was asked last, for the log."""
        return self._kinds[-1] if self._kinds else "replies"

    def _check_enough(self, values: Mapping[str, object], at_least: int) -> None:
        if len(values) >= at_least:
            return
        text = (
            f"round {self.number} failed: {len(values)} of {len(self.asked) or len(values)} nodes "
            f"gave a usable reply, min_nodes is {at_least}"
        )
        faults = {fault_in(reason) for _, reason in self._failed}
        if len(faults) == 1 and {node for node, _ in self._failed} == set(self._asked):
            # What is wrong everywhere is most likely wrong in the app: shown once, and first.
            text = f"{faults.pop()}\n({text}: all of them for this reason)"
        else:
            # Lines that a node wrote look like no line of ours.
            each = (str(failure).replace("\n", "\n    | ") for failure in self.failures)
            text += "".join(f"\n  {failure}" for failure in each)
        if self.inbox:
            text += (
                f"\nThe usable replies are kept in {self.inbox.folder}; start again with "
                "resume=True to ask only the other nodes"
            )
        raise RoundFailedError(text, list(values.items()), self.failures)


def _receiver(message: Message) -> int:
    return message.metadata.dst_node_id
