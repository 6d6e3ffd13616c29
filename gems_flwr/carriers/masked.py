"""Sums under masks: the server learns what nodes add up to, and of a single one nothing else.

`MaskedSums` stands in the place of `gems_flwr.core.sums.PlainSums`: the same questions, the same
digits, every summand under masks. A session of keys (`gems_flwr.secure.session`) serves several
sums. Who is lost on the way is named; below the threshold nothing is opened.

1. `Keys`: the session, and for how many sums. A node answers with its public keys.
2. ``masks``, beside an ordinary question: which sum, who is in it, at first the roster with all
   keys. The masked summand stands in the place of the plain one (`answer_masked`), beside it the
   signature of the list of those in the sum, and at first a sealed letter for each neighbour.
3. `Shorten`, where one was lost: a list; back come its signature and masks in common with others.
4. `Open`: the list, its signatures, at first the letters; back come shares of own masks.

A node keeps its secrets in its state in Flower and forgets each as soon as it is used; whether its
answer will be masked it knows from these, not from the server's word. Where its ``--node-config``
has a ``signing-key`` (a private key's file) it signs, and with ``trusted-keys`` (a folder with the
other nodes' public keys) others must have signed their keys and the list of those who are in a sum.
An error of what is masked is reported without numbers, which might be those of the node's data.

A node that breaks the protocol is left out by name, and the sum begins again if it must. Where it
is one node's word against another's, both may be left out and neither is blamed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets as random_bytes
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from gems_flwr.carriers.known_layers import BELOW, lacks_layers
from gems_flwr.core.log import log_event, log_warning, readable
from gems_flwr.core.question import NOTHING, ON_SERVER, Disclosure, Question, SumQuestion
from gems_flwr.core.records import records_to_bytes, without_numbers
from gems_flwr.core.round import Round
from gems_flwr.core.sums import (
    LAYOUT,
    PlainSums,
    Total,
    layout_record,
    summand_record,
    summand_words,
    take_layout,
)
from gems_flwr.errors import (
    BadReplyError,
    GemsError,
    RefusedError,
    RoundFailedError,
    SecureSumError,
    describe_fault,
    shown,
)
from gems_flwr.secure import (
    KEY_BYTES,
    SHARE_BYTES,
    AdvertisedKeys,
    Layout,
    NodeSecrets,
    Roster,
    Section,
    SecureSum,
    Signer,
    SumSession,
    Words,
    judged,
    load_trusted,
)

if TYPE_CHECKING:
    from gems_flwr.node import Node, NodeOptions
    from gems_flwr.node.limits import NodeLimits

# Many more than a round of any strategy has use for; each costs a digest and shares.
MAX_SUMS = 64
# Each leaves out at least one node, that breaks the protocol or is in conflict with one.
MAX_RESTARTS = 3
MASKS = "masks"
# In replies, and in a node's state.
_SECURE, _TEXT, _LETTERS, _SIGNATURE = "secure-sum", "text", "letters", "signature"
# Whose keys or letters a node does not accept, and why.
_ACCUSED, _WHY = "accused", "why"

T = TypeVar("T")


# --- the messages between sums --------------------------------------------------------------


@dataclass(frozen=True)
class _Step(Question[T]):
    """A message of a session that has nothing to do with the node's data."""

    carries_model: ClassVar[bool] = False

    session: str

    def __post_init__(self) -> None:
        sums, number = getattr(self, "sums", 1), getattr(self, "number", 0)
        fits = isinstance(self.session, str) and 0 < len(self.session) <= 100
        rules = {
            "session": (fits, "a text of 1 to 100 characters"),
            "sums": (type(sums) is int and 1 <= sums <= MAX_SUMS, f"from 1 to {MAX_SUMS}"),
            "number": (type(number) is int, "a whole number"),
        }
        for name in ("members", "signers", "senders"):
            nodes = getattr(self, name, ())
            fits = isinstance(nodes, tuple) and all(type(node) is int for node in nodes)
            rules[name] = (fits and len(set(nodes)) == len(nodes), "whole numbers, each once")
        self.check(rules)

    def discloses(self, node: Node) -> Disclosure:
        """Nothing: keys and shares are random numbers."""
        return NOTHING


@dataclass(frozen=True)
class Keys(_Step[AdvertisedKeys]):
    """Draw secrets for a session of so many sums; what are the public keys?"""

    kind: ClassVar[str] = "secure-keys"

    sums: int

    def answer(self, node: Node) -> RecordDict:
        """Forget the last session; publish the keys of this one."""
        signer = _key_of(node.context, "signing-key", Signer.load)
        drawn = NodeSecrets.begin(self.session, self.sums, signer)
        _keep(drawn, node.state)
        return _reply(keys=drawn.own.to_text())

    def read(self, content: RecordDict) -> AdvertisedKeys:
        """Return the public keys for so many sums."""
        try:
            keys = AdvertisedKeys.from_text(_entry(content, "keys", str))
            keys.check(self.session)
        except SecureSumError as error:
            raise BadReplyError(str(error)) from error
        if len(keys.digests) != self.sums:
            raise BadReplyError(f"'keys' are for {len(keys.digests)} sums, expected {self.sums}")
        return keys


@dataclass(frozen=True)
class Shorten(_Step[tuple[bytes, dict[int, bytes]]]):
    """Some are lost: do you agree to the list of those who are left?"""

    kind: ClassVar[str] = "secure-list"

    number: int
    members: tuple[int, ...]
    # Neighbours that are off the list.
    gone: tuple[int, ...] = field(default=(), metadata=ON_SERVER)

    def answer(self, node: Node) -> RecordDict:
        """Sign the list, and give the keys of masks in common with those who are off it."""
        known = _recall(self.session, node.state)
        known, keys = known.narrowed(self.number, self.members)
        _check_company(node.limits, known)
        _keep(known, node.state)
        joined = b"".join(keys[peer] for peer in sorted(keys))
        return _reply(keys=joined, signature=_signature(node.context, known))

    def read(self, content: RecordDict) -> tuple[bytes, dict[int, bytes]]:
        """Return the signature, and the keys by neighbour."""
        keys = _split(_entry(content, "keys", bytes), KEY_BYTES, self.gone, "keys")
        return _entry(content, _SIGNATURE, bytes), keys


@dataclass(frozen=True)
class Open(_Step[tuple[dict[int, bytes], list[int]]]):
    """Which shares open the sum over these nodes?"""

    kind: ClassVar[str] = "secure-opening"

    number: int
    members: tuple[int, ...]
    signers: tuple[int, ...] = ()
    signatures: tuple[str, ...] = ()
    senders: tuple[int, ...] = ()
    letters: tuple[str, ...] = ()
    # Of whose masks shares are expected.
    whose: tuple[int, ...] = field(default=(), metadata=ON_SERVER)

    def answer(self, node: Node) -> RecordDict:
        """Give the shares of the own masks of those in the sum, if enough have signed the list."""
        known = _recall(self.session, node.state)
        _check_company(node.limits, known)
        signatures = map(bytes.fromhex, self.signatures)
        letters = map(bytes.fromhex, self.letters)
        known, shares, accused = known.opened(
            self.number,
            self.members,
            dict(zip(self.signers, signatures, strict=True)),
            dict(zip(self.senders, letters, strict=True)),
            is_checked=bool(node.context.node_config.get("trusted-keys")),
        )
        _keep(known, node.state)
        return _reply(shares=b"".join(shares.values()), accused=json.dumps(accused))

    def read(self, content: RecordDict) -> tuple[dict[int, bytes], list[int]]:
        """Return the shares by whose they are, and who is accused of a letter of no use."""
        accused = _read_accused(content, self.whose)
        there = tuple(node for node in self.whose if node not in accused)
        return _split(_entry(content, "shares", bytes), SHARE_BYTES, there, "shares"), accused


def _reply(**values: Any) -> RecordDict:
    return RecordDict({_SECURE: ConfigRecord(values)})


def _split(data: bytes, size: int, nodes: Sequence[int], what: str) -> dict[int, bytes]:
    """Return parts of one size by node."""
    if len(data) != size * len(nodes):
        raise BadReplyError(f"'{what}' must have {size * len(nodes)} bytes, got {len(data)}")
    return {node: data[size * i : size * (i + 1)] for i, node in enumerate(nodes)}


def _read_accused(content: RecordDict, among: Collection[int]) -> list[int]:
    """Return whom a node accuses; as text, since an id may be too large for a record."""
    try:
        accused = json.loads(_entry(content, _ACCUSED, str))
    except (ValueError, RecursionError):
        accused = None
    if not isinstance(accused, list) or not all(type(n) is int and n in among for n in accused):
        raise BadReplyError(f"'{_ACCUSED}' must be ids of nodes in the sum, got {shown(accused)}")
    return accused


def _entry(content: RecordDict, key: str, kind: type[T]) -> T:
    """Return an entry of a reply, if it is of its kind."""
    record = content.get(_SECURE)
    value = record.get(key) if isinstance(record, ConfigRecord) else None
    if not isinstance(value, kind):
        raise BadReplyError(f"'{key}' must be {kind.__name__}, got {shown(value)}")
    return value


def _read_masks(record: Any) -> tuple[str, int, tuple[int, ...], Roster | None]:
    """Return the session, the sum's number, the nodes in it, and for the first one the roster."""
    try:
        session, number, members, roster = json.loads(record[_TEXT])
        asked = Shorten(session, number, tuple(members))  # which checks all three
        joined = None if roster is None else Roster.from_json(roster)
    except (GemsError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"what the server asks of a secure sum cannot be read: {error!r}"
        raise SecureSumError(reason) from error
    return asked.session, asked.number, asked.members, joined


# --- on the node ----------------------------------------------------------------------------


def answer_masked(
    options: NodeOptions,
    message: Message,
    context: Context,
    call: Callable[[Message, int], Message],
) -> Message:
    """Answer a message under masks; `call` answers a plain one, and gets how many nodes hide it."""
    asked = message.content.pop(MASKS)
    # A server has no use for what a node needs.
    from gems_flwr.node.limits import NodeLimits
    from gems_flwr.node.mod import HandlerFailedError, node_name

    session, number, members, roster = _read_masks(asked)
    known, letters = _recall(session, context.state), dict[int, bytes]()
    limits = options.limits or NodeLimits.of_node(context.node_config)
    if roster is not None:
        trusted = _key_of(context, "trusted-keys", load_trusted)
        if accused := known.suspects(roster, trusted):
            who, why = json.dumps([*accused]), accused[min(accused)]
            return Message(_reply(accused=who, why=why), reply_to=message)
        known, letters = known.join(roster)
    known = known.entered(number, members, _digest_of(message.content))
    company = _check_company(limits, known)
    layout = take_layout(RecordDict(dict(message.content)))
    if layout is None:
        raise SecureSumError("the server asks for a masked answer without saying of what form")
    name = node_name(context)
    try:
        reply = call(message, company)
    except HandlerFailedError as failed:
        reply = failed.reply
    except Exception as error:
        fault = str(error) if isinstance(error, GemsError) else describe_fault(error)
        raise SecureSumError(without_numbers(fault, name)) from error
    if reply.has_error():
        reason = without_numbers(reply.error.reason or "", name)
        return Message(Error(code=reply.error.code, reason=reason), reply_to=message)
    if lacks_layers(reply.content):
        return reply  # it says what the node lacks, and nothing of its data
    words = summand_words(reply.content)
    if words is None:
        raise SecureSumError("the node answers that question with something that cannot be summed")
    known, masked = known.masked(layout, layout.unpack(words))
    # Kept before it leaves: no second set of numbers under the same masks.
    _keep(known, context.state)
    # Beside the summand stand names, never numbers.
    names = {key: each for key, each in reply.content.items() if isinstance(each, ConfigRecord)}
    sent = [letters[peer] for peer in sorted(letters)]
    beside = _reply(letters=sent, signature=_signature(context, known))
    content = {**names, **summand_record(layout.pack(masked)), **beside}
    return Message(RecordDict(content), reply_to=message)


def _digest_of(content: RecordDict) -> bytes:
    """Return a digest of what all nodes in a sum must be asked alike: question, model, layout.

    Layers that a node lacks come beside it, for that node alone; their digest is among the rest.
    """
    asked = {key: content[key] for key in sorted(content) if key != BELOW}
    return hashlib.sha256(records_to_bytes(RecordDict(asked))).digest()


def _check_company(limits: NodeLimits, known: NodeSecrets) -> int:
    """Return how many nodes of the neighbourhood are in a sum; refuse fewer than the limits ask."""
    roster = known.joined
    nodes = len(roster.near(known.index, known.members))
    if nodes < limits.least_nodes:
        reason = f"it is {limits.least_nodes}, the sum is over {nodes} nodes that this one knows"
        raise RefusedError("least_nodes", reason)
    if roster.threshold < limits.least_threshold - 1e-9:
        reason = f"it is {limits.least_threshold:.3g}, that of the sum is {roster.threshold:.3g}"
        raise RefusedError("least_threshold", reason)
    return nodes


def _signature(context: Context, known: NodeSecrets) -> bytes:
    """Return the node's signature of the list that it has agreed to; empty without a key."""
    signer = _key_of(context, "signing-key", Signer.load)
    return signer.sign(known.list_text) if signer else b""


def _recall(session: str, state: RecordDict) -> NodeSecrets:
    record = state.get(_SECURE)
    text = record.get(_TEXT) if isinstance(record, ConfigRecord) else None
    known = NodeSecrets.from_json(text) if isinstance(text, str) else None
    if known is None or known.session != session:
        reason = "it has restarted, or joined since"
        raise SecureSumError(f"this node has no keys of that session: {reason}")
    return known


def _keep(known: NodeSecrets, state: RecordDict) -> None:
    state[_SECURE] = ConfigRecord({_TEXT: known.to_json()})


def _key_of(context: Context, option: str, load: Callable[[str], T]) -> T | None:
    """Return what an option of the ``--node-config`` names a file of."""
    path = str(context.node_config.get(option, ""))
    return load(path) if path else None


# --- at the server --------------------------------------------------------------------------


class _Masked(NamedTuple):
    """A node's answer under masks."""

    words: Words
    note: Any
    letters: list[bytes]  # in the order of its neighbours
    signature: bytes


class MaskedSums(PlainSums):
    """Adds what nodes send under masks; one session of keys is for so many sums."""

    is_masked = True

    def __init__(self, secure: SecureSum, sums_in_session: int) -> None:
        self.secure, self.sums = secure, min(sums_in_session, MAX_SUMS)
        self._session: SumSession | None = None
        self._server_round = 0
        # Nodes that have the letters of the session; and who is left out of the run's sums.
        self._served: set[int] = set()
        self._out: set[int] = set()
        # Of the sum under way, by accuser and accused: why.
        self._conflicts: dict[tuple[int, int], str] = {}

    def total(
        self,
        round: Round,
        question: SumQuestion,
        sections: Sequence[Section],
        nodes: Sequence[str],
        at_least: int,
    ) -> Total:
        """Return the sum over the nodes that answer; see `Round.total`.

        If fewer than the threshold, or than `at_least`, are left, nothing is opened and a
        RoundFailedError is raised.
        """
        asked = {round.id_of(name) for name in nodes}
        for start in range(MAX_RESTARTS + 1):
            try:
                return self._total(round, question, sections, asked - self._out, at_least)
            except SecureSumError as error:
                found = self._leave_out(round)
                self._session = None
                if found and start < MAX_RESTARTS:
                    log_warning("secure_sum_again", round=round.number, reason=str(error))
                    continue
                text = f"round {round.number} failed: the secure sum '{question.kind}' was not "
                text += f"opened: {error}" + "".join(f"\n  {each}" for each in round.failures)
                # Those who have answered do have the mod; what they sent stays unseen.
                raise RoundFailedError(text, round.answered, round.failures) from error
        raise AssertionError("the last start returns or raises")

    def _total(
        self,
        round: Round,
        question: SumQuestion,
        sections: Sequence[Section],
        nodes: set[int],
        at_least: int,
    ) -> Total:
        session = self._ready(round, nodes)
        self._server_round = round.number
        # Counted before it is asked: whatever happens, no node masks twice for one number.
        self._session = session = dataclasses.replace(session, number=session.number + 1)
        layout = Layout(sections, nodes=len(session.members))
        answers = self._masked(round, question, session, layout)
        if session.number == 0:
            letters = {node: answer.letters for node, answer in answers.items()}
            session = dataclasses.replace(session, letters=letters)
        signed = {node: answer.signature for node, answer in answers.items()}
        self._check_signatures(round, session, signed)
        session, signed, gone = self._agreed(round, session, signed, at_least)
        shares = self._shares(round, session, signed)
        self._refuse_few(session, shares, 0, "would open it")
        seeds, conflicts = session.seeds(shares)
        self._conflicts |= dict.fromkeys(conflicts, "shares of its seed do not fit")
        if lacking := {*session.members} - seeds.keys():
            raise SecureSumError(f"what {len(lacking)} nodes have masked cannot be opened")
        words = session.total(layout, {n: each.words for n, each in answers.items()}, seeds, gone)
        self._session = session.with_members(shares)
        self._leave_out(round, session.members)
        # In the order of names, as the answers are.
        there = {round.nodes.name(n): each.note for n, each in answers.items() if n in signed}
        log_event("secure_sum", round=round.number, what=question.kind, nodes=len(there))
        return Total.of_words(layout, words, [*there], [*there.values()])

    def _ready(self, round: Round, nodes: set[int]) -> SumSession:
        """Return a session for the nodes that are to take part."""
        session = self._session
        # Who was lost may be back in the next round, and needs new keys then.
        same = session is not None and self._server_round == round.number
        if session and session.number + 1 < self.sums and (same or nodes <= {*session.members}):
            fewer = session.with_members(nodes & {*session.members})
            if nodes <= session.roster.keys.keys() and fewer.is_quorum(fewer.members):
                return fewer
        # Also for a few of them, who could not open a sum that all have shared secrets for.
        self._session, self._served = None, set()
        name = random_bytes.token_hex(8)
        keys = self._asked(round, dict.fromkeys(sorted(nodes), Keys(name, self.sums)))
        used = Counter(key for each in keys.values() for key in (each.channel, each.signer) if key)
        for node in [n for n, k in keys.items() if max(used[k.channel], used[k.signer]) > 1]:
            round.refuse(node, "it is in conflict: another node has the same key")
            del keys[node]
        roster = Roster(name, float(self.secure.threshold), self.secure.neighbours, keys)
        return SumSession(roster, tuple(sorted(keys)))

    def _masked(
        self, round: Round, question: SumQuestion, session: SumSession, layout: Layout
    ) -> dict[int, _Masked]:
        """Ask the question under masks; return the answers by id."""
        roster = session.roster
        first = session.number == 0
        about = roster.session, session.number, session.members, roster.to_json() if first else None
        masks = {_TEXT: json.dumps(about)}
        peers, size = roster.degree_drawn if first else 0, roster.letter_bytes

        def read(_: object, content: RecordDict) -> _Masked | tuple[list[int], str]:
            if _ACCUSED in content.get(_SECURE, {}):
                return _read_accused(content, roster.keys), readable(_entry(content, _WHY, str))
            if len(words := summand_words(content) or b"") != layout.size_bytes:
                raise BadReplyError(f"a summand has {layout.size_bytes} bytes, got {len(words)}")
            letters = _entry(content, _LETTERS, list)
            sizes = [len(each) if isinstance(each, bytes) else -1 for each in letters]
            if sizes != [size] * peers:
                got = f"{peers} of {size} bytes, got {shown(letters)}"
                raise BadReplyError(f"'{_LETTERS}' must be {got}")
            signature = _entry(content, _SIGNATURE, bytes)
            return _Masked(layout.unpack(words), question.note(content), letters, signature)

        replies = round.exchange(
            dict.fromkeys(map(round.nodes.name, session.members), question),
            read,
            beside=lambda _: {LAYOUT: layout_record(layout), MASKS: ConfigRecord(dict(masks))},
        )
        answers = dict[int, _Masked]()
        for name, reply in replies.items():
            node = round.id_of(name)
            if isinstance(reply, _Masked):
                answers[node] = reply
            else:
                self._conflict(node, *reply)
        return answers

    def _agreed(
        self, round: Round, session: SumSession, signed: dict[int, bytes], at_least: int
    ) -> tuple[SumSession, dict[int, bytes], dict[int, dict[int, bytes]]]:
        """Let nodes agree to the list of those who are left, while one of them is lost.

        Returns the session with them, their signatures and what each gave of masks in common with
        those who are off the list.
        """
        roster, gone = session.roster, {node: dict[int, bytes]() for node in signed}
        while True:
            left = session.with_members(signed)
            # Of those left some may have too few others left to be opened with.
            all_left = len(left.members) == len(signed)
            gave = "gave" if all_left else f"can open it with those left, {len(signed)} gave"
            self._refuse_few(left, left.members, at_least, f"{gave} their numbers")
            if left.members == session.members:
                return session, signed, gone
            off, asked = {*session.members} - {*left.members}, {}
            for node in left.members:
                peers = tuple(peer for peer in roster.neighbours[node] if peer in off)
                asked[node] = Shorten(roster.session, session.number, left.members, peers)
            answers = self._asked(round, asked)
            for node, (_, keys) in answers.items():
                gone[node] |= keys
            session, signed = left, {node: each for node, (each, _) in answers.items()}
            self._check_signatures(round, session, signed)

    def _shares(
        self, round: Round, session: SumSession, signed: Mapping[int, bytes]
    ) -> dict[int, dict[int, bytes]]:
        """Return what the members give to open a sum."""
        roster, asked = session.roster, {}
        signers = [node for node in session.members if signed[node]][: roster.needed]
        signatures = tuple(signed[node].hex() for node in signers)
        for node in session.members:
            whose = tuple(sorted(roster.near(node, session.members)))
            senders = tuple(p for p in whose if p != node and node not in self._served)
            letters = tuple(session.letter(peer, node).hex() for peer in senders)
            about = roster.session, session.number, session.members, tuple(signers), signatures
            asked[node] = Open(*about, senders, letters, whose)
        answers = self._asked(round, asked)
        self._served |= answers.keys()
        for node, (_, accused) in answers.items():
            self._conflict(node, accused, "its letter cannot be opened")
        return {node: shares for node, (shares, _) in answers.items()}

    # --- who is left out ----------------------------------------------------------------------

    def _conflict(self, node: int, others: Collection[int], why: str) -> None:
        self._conflicts |= {(node, other): why for other in others if other != node}

    def _check_signatures(
        self, round: Round, session: SumSession, signed: dict[int, bytes]
    ) -> None:
        """Take out who has not signed the list of the members by its own key."""
        keys, text = session.roster.keys, session.list_text
        for node in [n for n, each in signed.items() if not keys[n].has_signed(text, each)]:
            del signed[node]
            round.refuse(node, "its signature of the list of those in the sum is not by its key")

    def _leave_out(self, round: Round, members: Collection[int] | None = None) -> bool:
        """Name who breaks the protocol; return whether a sum without some nodes may be opened.

        With the `members` of a sum that was opened only those leave who have left it anyway.
        """
        conflicts, self._conflicts = self._conflicts, {}
        if not conflicts or self._session is None:
            return False
        roster, names = self._session.roster, round.nodes.name
        at_fault, leaving = judged(conflicts.keys(), roster.liars)
        if members is not None:
            leaving = {accuser for accuser, _ in conflicts} - {*members}
        elif len(roster.keys.keys() - at_fault - leaving) < 3:
            # Rather one of two than no sum.
            leaving -= {other for node, other in conflicts if node in leaving}
        reasons = dict[int, str]()
        for pair, why in conflicts.items():
            for node in at_fault & {*pair}:
                reasons[node] = f"it breaks the protocol of secure sums with several nodes: {why}"
            if not at_fault & {*pair}:
                log_warning("conflict", round=round.number, nodes=[*map(names, pair)], reason=why)
                for node in leaving & {*pair}:
                    other = names(pair[node == pair[0]])
                    reasons.setdefault(node, f"it is in conflict with node {other}: {why}")
        for node, reason in reasons.items():
            round.refuse(node, reason)
        self._out |= reasons.keys()
        return bool(reasons)

    # --- messages -----------------------------------------------------------------------------

    def _asked(self, round: Round, questions: Mapping[int, _Step[T]]) -> dict[int, T]:
        """Return what nodes answer, by id."""
        named = {round.nodes.name(node): each for node, each in questions.items()}
        answers = round.exchange(named, lambda asked, content: asked.read(content))
        return {round.id_of(name): answer for name, answer in answers.items()}

    def _refuse_few(
        self, session: SumSession, there: Collection[int], at_least: int, did: str
    ) -> None:
        """End the round if too few nodes are left to open a sum, before anything is opened."""
        if not session.is_quorum(there) or len(there) < at_least:
            of, also = len(session.roster.keys), f", min_nodes {at_least}" if at_least > 3 else ""
            threshold = f"{self.secure.threshold:.3g} of {of} (at least 3{also})"
            reason = f"{len(there)} of {of} nodes {did}, and the threshold is {threshold}"
            raise SecureSumError(reason)
