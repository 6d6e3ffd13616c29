"""Sums under masks: the server learns what nodes add up to, and of a single one nothing else.

`MaskedSums` stands in the place of `gems_flwr.core.sums.PlainSums`: the same questions, the same
digits, every summand under masks. A session of keys (`gems_flwr.secure.session`) serves the sums of
one round. Who is lost on the way is named; below the threshold nothing is opened.

===========  =======================================  ============================================
message      what it says                             what the node answers
===========  =======================================  ============================================
`Keys`       the session, and for how many sums       its public keys
`Shares`     its number, and its neighbours' keys     a sealed letter for each neighbour
``masks``    which sum, who takes part, the letters;  the masked summand, in the place of the
             beside an ordinary question              plain one (`answer_masked`)
`Confirm`    whose numbers the server has             its signature of that list
`Open`       the same, and neighbours' signatures     one share of its own and each neighbour's
===========  =======================================  ============================================

A node keeps its secrets in its state in Flower and forgets each as soon as it is used; whether its
answer will be masked it knows from these, not from the server's word. Where its ``--node-config``
has a ``signing-key`` (a private key's file) and ``trusted-keys`` (a folder with the other nodes'
public keys), neighbours must have signed their keys and the list of those who are in a sum. An
error of what is masked is reported without numbers, which might be those of the node's data.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets as random_bytes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from gems_flwr.carriers.known_layers import lacks_layers
from gems_flwr.core.log import log_event
from gems_flwr.core.question import NOTHING, ON_SERVER, Disclosure, Question, SumQuestion
from gems_flwr.core.records import without_numbers
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
    MAX_SIGNATURE_BYTES,
    SHARE_BYTES,
    AdvertisedKeys,
    Layout,
    NodeSecrets,
    Section,
    SecureSum,
    Signer,
    SumSession,
    TrustedKeys,
    Words,
)

if TYPE_CHECKING:
    from gems_flwr.node import Node, NodeOptions
    from gems_flwr.node.limits import NodeLimits

# Many more than a round of any strategy has use for; each costs a node two keys.
MAX_SUMS = 64
MASKS = "masks"
# In replies, and in a node's state.
_SECURE, _TEXT, _LETTERS = "secure-sum", "text", "letters"
_log = logging.getLogger("gems_flwr")

T = TypeVar("T")


# --- the messages between sums --------------------------------------------------------------


@dataclass(frozen=True)
class _Step(Question[T]):
    """A message of a session that has nothing to do with the node's data."""

    carries_model: ClassVar[bool] = False

    session: str

    def __post_init__(self) -> None:
        sums = getattr(self, "sums", 1)
        fits = isinstance(self.session, str) and 0 < len(self.session) <= 100
        rules = {
            "session": (fits, "a text of 1 to 100 characters"),
            "sums": (type(sums) is int and 1 <= sums <= MAX_SUMS, f"from 1 to {MAX_SUMS}"),
        }
        for name in ("index", "number"):
            rules[name] = (type(getattr(self, name, 0)) is int, "a whole number")
        for name in ("peers", "survivors", "confirmed"):
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
        drawn = NodeSecrets.begin(
            self.session, self.sums, _key_of(node, "signing-key", Signer.load)
        )
        _keep(drawn, node.state)
        return _reply("keys", drawn.own.to_text())

    def read(self, content: RecordDict) -> AdvertisedKeys:
        """Return the public keys for so many sums."""
        try:
            keys = AdvertisedKeys.from_text(_entry(content, "keys", str))
        except SecureSumError as error:
            raise BadReplyError(str(error)) from error
        if len(keys.masks) != self.sums:
            raise BadReplyError(f"'keys' are for {len(keys.masks)} sums, expected {self.sums}")
        return keys


@dataclass(frozen=True)
class Shares(_Step[dict[int, bytes]]):
    """What is sealed for your neighbours: shares of your secrets?"""

    kind: ClassVar[str] = "secure-shares"

    index: int
    threshold: float
    peers: tuple[int, ...]
    keys: tuple[str, ...]
    letter_bytes: int = field(default=0, metadata=ON_SERVER)

    def answer(self, node: Node) -> RecordDict:
        """Check the neighbours' keys, and seal a letter for each."""
        _check_company(node.limits, len(self.peers) + 1)
        texts = zip(self.peers, self.keys, strict=True)
        peers = {peer: AdvertisedKeys.from_text(text) for peer, text in texts}
        known = _recall(self.session, node.state)
        known, letters = known.share(
            self.index, peers, self.threshold, _key_of(node, "trusted-keys", TrustedKeys.load)
        )
        _keep(known, node.state)
        return _reply(_LETTERS, [letters[peer] for peer in self.peers])

    def read(self, content: RecordDict) -> dict[int, bytes]:
        """Return the letters by receiver."""
        letters = _entry(content, _LETTERS, list)
        sizes = [len(each) if isinstance(each, bytes) else -1 for each in letters]
        if sizes != [self.letter_bytes] * len(self.peers):
            wanted = f"{len(self.peers)} of {self.letter_bytes} bytes"
            raise BadReplyError(f"'{_LETTERS}' must be {wanted}, got {shown(letters)}")
        return dict(zip(self.peers, letters, strict=True))


@dataclass(frozen=True)
class Confirm(_Step[bytes]):
    """What is your signature of the list of those whose numbers the server has?"""

    kind: ClassVar[str] = "secure-list"

    number: int
    survivors: tuple[int, ...]

    def answer(self, node: Node) -> RecordDict:
        """Sign the list, if the node is in it."""
        signer = _key_of(node, "signing-key", Signer.load)
        if signer is None:
            raise SecureSumError("this node has no signing-key to confirm a sum with")
        known = _recall(self.session, node.state)
        return _reply("signature", known.confirm(self.number, self.survivors, signer))

    def read(self, content: RecordDict) -> bytes:
        """Return the signature, which the other nodes check."""
        signature = _entry(content, "signature", bytes)
        if not 0 < len(signature) <= MAX_SIGNATURE_BYTES:
            raise BadReplyError(f"'signature' must have 1 to 200 bytes, got {len(signature)}")
        return signature


@dataclass(frozen=True)
class Open(_Step[dict[int, bytes]]):
    """Which shares open the sum over these nodes?"""

    kind: ClassVar[str] = "secure-opening"

    number: int
    survivors: tuple[int, ...]
    confirmed: tuple[int, ...] = ()
    signatures: tuple[str, ...] = ()
    whose: tuple[int, ...] = field(default=(), metadata=ON_SERVER)

    def answer(self, node: Node) -> RecordDict:
        """Give the share of one secret of each neighbour, if enough are in the sum."""
        known = _recall(self.session, node.state)
        _check_company(node.limits, len({*self.survivors} & {known.index, *known.peers}))
        texts = zip(self.confirmed, self.signatures, strict=True)
        signed = {peer: bytes.fromhex(text) for peer, text in texts}
        known, shares = known.reveal(
            self.number, self.survivors, signed, _key_of(node, "trusted-keys", TrustedKeys.load)
        )
        _keep(known, node.state)
        return _reply("shares", b"".join(shares.values()))

    def read(self, content: RecordDict) -> dict[int, bytes]:
        """Return the shares by whose secret they are of."""
        data, size = _entry(content, "shares", bytes), SHARE_BYTES
        wanted = size * len(self.whose)
        if len(data) != wanted:
            raise BadReplyError(f"'shares' must have {wanted} bytes, got {len(data)}")
        return {peer: data[size * i : size * (i + 1)] for i, peer in enumerate(self.whose)}


def _reply(key: str, value: Any) -> RecordDict:
    return RecordDict({_SECURE: ConfigRecord({key: value})})


def _entry(content: RecordDict, key: str, kind: type[T]) -> T:
    """Return an entry of a reply, if it is of its kind."""
    record = content.get(_SECURE)
    value = record.get(key) if isinstance(record, ConfigRecord) else None
    if not isinstance(value, kind):
        raise BadReplyError(f"'{key}' must be {kind.__name__}, got {shown(value)}")
    return value


def _read_masks(record: Any) -> tuple[str, int, tuple[int, ...], dict[int, bytes]]:
    """Return the session, the sum's number, the neighbours in it, and their letters."""
    try:
        session, number, present = json.loads(record[_TEXT])
        asked = Confirm(session, number, tuple(present))  # which checks all three
        letters = dict(zip(present, record[_LETTERS], strict=True)) if _LETTERS in record else {}
    except (GemsError, KeyError, TypeError, ValueError) as error:
        reason = f"what the server asks of a secure sum cannot be read: {error!r}"
        raise SecureSumError(reason) from error
    return asked.session, asked.number, asked.survivors, letters


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

    session, number, present, letters = _read_masks(asked)
    known = _recall(session, context.state).receive(letters)
    _check_company(options.limits or NodeLimits.of_node(context.node_config), len(present) + 1)
    layout = take_layout(RecordDict(dict(message.content)))
    if layout is None:
        raise SecureSumError("the server asks for a masked answer without saying of what form")
    name = node_name(context)
    try:
        reply = call(message, len(present) + 1)
    except HandlerFailedError as failed:
        reply = failed.reply
    except Exception as error:
        fault = str(error) if isinstance(error, GemsError) else describe_fault(error)
        raise SecureSumError(_without_numbers(fault, name)) from error
    if reply.has_error():
        reason = _without_numbers(reply.error.reason or "", name)
        return Message(Error(code=reply.error.code, reason=reason), reply_to=message)
    if lacks_layers(reply.content):
        return reply  # it says what the node lacks, and nothing of its data
    words = summand_words(reply.content)
    if words is None:
        raise SecureSumError("the node answers that question with something that cannot be summed")
    known, masked = known.masked(number, layout, layout.unpack(words), present)
    # Kept before it leaves: no second set of numbers under the same masks.
    _keep(known, context.state)
    # Beside the summand stand names, never numbers.
    names = {key: each for key, each in reply.content.items() if isinstance(each, ConfigRecord)}
    return Message(RecordDict({**names, **summand_record(layout.pack(masked))}), reply_to=message)


def _without_numbers(reason: str, name: str) -> str:
    """Return what the server gets of a fault: numbers may be those of the data."""
    shortened = without_numbers(reason)
    if shortened != reason:
        _log.warning("node %s: %s", name, reason)
    return shortened


def _check_company(limits: NodeLimits, nodes: int) -> None:
    """Refuse a sum over fewer nodes of the neighbourhood than the node's limits ask for."""
    if nodes < limits.least_nodes:
        reason = f"it is {limits.least_nodes}, the sum is over {nodes} nodes that this one knows"
        raise RefusedError("least_nodes", reason)


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


def _key_of(node: Node, option: str, load: Callable[[str], T]) -> T | None:
    """Return what an option of the ``--node-config`` names a file of."""
    path = str(node.context.node_config.get(option, ""))
    return load(path) if path else None


# --- at the server --------------------------------------------------------------------------


class MaskedSums(PlainSums):
    """Adds what nodes send under masks; one session of keys is for so many sums in a round."""

    is_masked = True

    def __init__(self, secure: SecureSum, sums_in_round: int) -> None:
        self.secure, self.sums = secure, min(sums_in_round, MAX_SUMS)
        self._session: SumSession | None = None
        self._server_round = 0

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
        try:
            session = self._ready(round, {round.id_of(name) for name in nodes})
            # Counted before it is asked: whatever happens, no node masks twice for one number.
            number, used = session.used, session.used + 1
            self._session = dataclasses.replace(session, used=used)
            layout = Layout(sections, nodes=len(session.members))

            def beside(name: str) -> dict[str, ConfigRecord]:
                present = session.present_for(round.id_of(name))
                masks: dict[str, Any] = {_TEXT: json.dumps([session.session, number, present])}
                if number == 0:
                    masks[_LETTERS] = list(session.letters_for(round.id_of(name)).values())
                return {LAYOUT: layout_record(layout), MASKS: ConfigRecord(masks)}

            answers = round.exchange(
                {round.nodes.name(node): question for node in session.members},
                lambda _, content: (_masked_words(content, layout), question.note(content)),
                beside=beside,
            )
            masked = {round.id_of(name): words for name, (words, _) in answers.items()}
            self._refuse_few(session, masked, at_least, "gave their numbers")
            shares = self._shares(round, session, number, tuple(sorted(masked)))
            self._refuse_few(session, shares, 0, "would open it")
            words = session.opened(number, layout, masked, shares)
        except SecureSumError as error:
            self._session = None
            text = f"round {round.number} failed: the secure sum '{question.kind}' was not "
            text += f"opened: {error}" + "".join(f"\n  {failure}" for failure in round.failures)
            # Those who have answered do have the mod; what they sent stays unseen.
            raise RoundFailedError(text, round.answered, round.failures) from error
        self._session = dataclasses.replace(session.with_members(shares), used=used)
        log_event("secure_sum", round=round.number, what=question.kind, nodes=len(answers))
        return Total.of_words(layout, words, list(answers), [note for _, note in answers.values()])

    def _ready(self, round: Round, nodes: set[int]) -> SumSession:
        """Return the session of this round, for the nodes that are to take part."""
        session = self._session
        if (
            session is not None
            and self._server_round == round.number
            and session.used < self.sums
            and nodes <= session.keys.keys()
        ):
            fewer = session.with_members(nodes & set(session.members))
            if fewer.is_quorum(fewer.members):
                return fewer
        # Also for a few of them, who could not open a sum that all have shared secrets for.
        self._session, self._server_round = None, round.number
        return self._begin(round, nodes)

    def _begin(self, round: Round, nodes: set[int]) -> SumSession:
        """Let nodes exchange keys and shares."""
        name = random_bytes.token_hex(8)
        keys = self._asked(round, dict.fromkeys(sorted(nodes), Keys(name, self.sums)))
        session = SumSession.begin(name, keys, self.secure.threshold, self.secure.neighbours)
        texts = {node: each.to_text() for node, each in keys.items()}
        size = session.letter_bytes
        asked = {
            node: Shares(name, node, session.threshold, peers, tuple(texts[p] for p in peers), size)
            for node, peers in session.neighbours.items()
        }
        letters = self._asked(round, asked)
        session = session.with_letters(letters)
        self._refuse_few(session, session.members, 0, "shared their secrets")
        return session

    def _shares(
        self, round: Round, session: SumSession, number: int, survivors: tuple[int, ...]
    ) -> dict[int, dict[int, bytes]]:
        """Return what the survivors give to open a sum."""
        signed: dict[int, bytes] = {}
        if self.secure.signed:
            confirm = Confirm(session.session, number, survivors)
            signed = self._asked(round, dict.fromkeys(survivors, confirm))
        asked = {}
        for node in survivors:
            present = session.present_for(node)
            confirmed = tuple(peer for peer in present if peer in signed)
            signatures = tuple(signed[peer].hex() for peer in confirmed)
            whose = (node, *present)
            asked[node] = Open(session.session, number, survivors, confirmed, signatures, whose)
        return self._asked(round, asked)

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
            of, also = len(session.keys), f", min_nodes {at_least}" if at_least > 3 else ""
            threshold = f"{self.secure.threshold:.3g} of {of} (at least 3{also})"
            reason = f"{len(there)} of {of} nodes {did}, and the threshold is {threshold}"
            raise SecureSumError(reason)


def _masked_words(content: RecordDict, layout: Layout) -> Words:
    """Validate a masked summand, of which there is nothing to see but its length."""
    data = summand_words(content) or b""
    if len(data) != layout.size_bytes:
        got = f"{layout.size_bytes} bytes, got {len(data)}"
        raise BadReplyError(f"a masked summand must have {got}")
    return layout.unpack(data)
