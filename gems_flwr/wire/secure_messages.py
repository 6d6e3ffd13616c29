"""The messages of secure summation: keys, shares, masked numbers, and what opens a sum.

A stage of the protocol (`gems_flwr.secure`) is a ConfigRecord ``secure-sum`` in an instruction:

=========  ==========================================  ====================================
stage      what the node is told                       what it answers
=========  ==========================================  ====================================
keys       the session, and how many sums it is for    its public keys
shares     its number, its neighbours' keys            a sealed letter for each neighbour
mask       which sum, which neighbours take part,      the masked summand, in the place of
           their letters; beside an ordinary question  the plain one (`wire.summands`)
confirm    whose numbers the server has                its signature of that list
reveal     the same, with its neighbours' signatures   one share of each neighbour
=========  ==========================================  ====================================

Numbers of nodes travel as two bytes each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from gems_flwr.errors import BadReplyError, SecureSumError
from gems_flwr.secure.advertised_keys import DIGEST_BYTES, AdvertisedKeys
from gems_flwr.secure.fixed_point import Layout, Words
from gems_flwr.secure.key_agreement import KEY_BYTES, TAG_BYTES
from gems_flwr.secure.secret_shares import SHARE_BYTES
from gems_flwr.spaces.checks import shown
from gems_flwr.wire.keys import SECURE_SUM, SUMMAND, WORDS
from gems_flwr.wire.model_replies import pack_name
from gems_flwr.wire.summands import summand_words

MAX_NODES = 2**16 - 1
# Many more than a round of any strategy has use for; each costs a node two keys.
MAX_SUMS = 64
_MAX_SIGNATURE_BYTES = 200

_STAGE, _SESSION, _NUMBER = "stage", "session", "sum"
_SUMS, _INDEX, _THRESHOLD, _PEERS, _KEYS = "sums", "index", "threshold", "peers", "keys"
_SIGNERS, _SIGNATURES, _LETTERS, _PRESENT = "signers", "signatures", "letters", "present"
_SURVIVORS, _SHARES, _SIGNER, _SIGNATURE, _WHOSE = (
    *("survivors", "shares", "signer", "signature"),
    "whose",
)


@dataclass(frozen=True)
class KeysStage:
    """Draw secrets for a session of so many sums, and tell the public keys."""

    word: ClassVar[str] = "keys"

    session: str
    sums: int


@dataclass(frozen=True)
class SharesStage:
    """Seal shares of the secrets for the neighbours."""

    word: ClassVar[str] = "shares"

    session: str
    index: int
    threshold: float
    peers: Mapping[int, AdvertisedKeys]


@dataclass(frozen=True)
class MaskStage:
    """Answer the question in the same message with masked numbers."""

    word: ClassVar[str] = "mask"

    session: str
    number: int
    present: tuple[int, ...]
    letters: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class ConfirmStage:
    """Sign the list of those whose numbers the server has."""

    word: ClassVar[str] = "confirm"

    session: str
    number: int
    survivors: tuple[int, ...]


@dataclass(frozen=True)
class RevealStage:
    """Give the shares that open the sum."""

    word: ClassVar[str] = "reveal"

    session: str
    number: int
    survivors: tuple[int, ...]
    confirmations: Mapping[int, bytes] = field(default_factory=dict)


Stage = KeysStage | SharesStage | MaskStage | ConfirmStage | RevealStage


def put_stage(content: RecordDict, stage: Stage) -> None:
    """Put a stage of the protocol into an instruction."""
    said: dict[str, Any] = {_STAGE: stage.word, _SESSION: stage.session}
    if isinstance(stage, KeysStage):
        said[_SUMS] = stage.sums
    elif isinstance(stage, SharesStage):
        peers = list(stage.peers.values())
        said |= {_INDEX: stage.index, _THRESHOLD: stage.threshold}
        said |= {_PEERS: _packed(stage.peers), _KEYS: [_key_bytes(peer) for peer in peers]}
        if any(peer.signer for peer in peers):
            said |= {_SIGNERS: [p.signer for p in peers], _SIGNATURES: [p.signature for p in peers]}
    else:
        said[_NUMBER] = stage.number
        if isinstance(stage, MaskStage):
            said[_PRESENT] = _packed(stage.present)
            said |= _beside(_LETTERS, stage.letters)
        else:
            said[_SURVIVORS] = _packed(stage.survivors)
        if isinstance(stage, RevealStage):
            said |= _beside(_SIGNATURES, stage.confirmations)
    content[SECURE_SUM] = ConfigRecord(said)


def stage_word(content: RecordDict) -> str | None:
    """Return what the stage in an instruction is called, or None where there is none."""
    record = content.get(SECURE_SUM)
    word = record.get(_STAGE) if isinstance(record, ConfigRecord) else None
    return word if isinstance(word, str) else None


def take_stage(content: RecordDict) -> Stage | None:
    """Take the stage of the protocol out of an instruction, or return None where there is none.

    Raises
    ------
    SecureSumError
        If it cannot be read; a node answers nothing then.
    """
    record = content.pop(SECURE_SUM, None)
    if record is None:
        return None
    try:
        return _read_stage(dict(record))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"what the server asks of a secure sum cannot be read: {error!r}"
        raise SecureSumError(reason) from error


def _read_stage(said: dict[str, Any]) -> Stage:
    word, session = said[_STAGE], said[_SESSION]
    if not isinstance(session, str) or not 0 < len(session) <= 100:
        raise ValueError(f"the session {shown(session)}")
    if word == KeysStage.word:
        sums = int(said[_SUMS])
        if not 1 <= sums <= MAX_SUMS:
            raise ValueError(f"{sums} sums")
        return KeysStage(session, sums)
    if word == SharesStage.word:
        numbers = _unpacked(said[_PEERS])
        signers = said.get(_SIGNERS, [""] * len(numbers))
        signatures = said.get(_SIGNATURES, [b""] * len(numbers))
        rows = zip(numbers, said[_KEYS], signers, signatures, strict=True)
        peers = {
            number: _read_keys(keys, signer, signature) for number, keys, signer, signature in rows
        }
        return SharesStage(session, int(said[_INDEX]), float(said[_THRESHOLD]), peers)
    number = int(said[_NUMBER])
    if word == MaskStage.word:
        present = _unpacked(said[_PRESENT])
        return MaskStage(session, number, present, _read_beside(said, _LETTERS))
    survivors = _unpacked(said[_SURVIVORS])
    if word == ConfirmStage.word:
        return ConfirmStage(session, number, survivors)
    if word == RevealStage.word:
        return RevealStage(session, number, survivors, _read_beside(said, _SIGNATURES))
    raise ValueError(f"the stage {shown(word)}")


# --- replies ------------------------------------------------------------------------------------


def pack_keys_reply(keys: AdvertisedKeys, *, name: str) -> RecordDict:
    """Return the content of a reply with a node's public keys."""
    said: dict[str, Any] = {_KEYS: _key_bytes(keys)}
    if keys.signer:
        said |= {_SIGNER: keys.signer, _SIGNATURE: keys.signature}
    return RecordDict({SECURE_SUM: ConfigRecord(said), **pack_name(name)})


def unpack_keys_reply(content: RecordDict, sums: int) -> AdvertisedKeys:
    """Validate a node's public keys for so many sums."""
    record = _reply(content)
    data = _bytes(record, _KEYS, _keys_length(sums))
    signer, signature = record.get(_SIGNER, ""), record.get(_SIGNATURE, b"")
    if not isinstance(signer, str) or not isinstance(signature, bytes):
        raise BadReplyError(f"'{_SIGNER}' and '{_SIGNATURE}' must be a text and bytes")
    try:
        return _read_keys(data, signer, signature)
    except (ValueError, SecureSumError) as error:
        raise BadReplyError(str(error)) from error


def pack_letters_reply(letters: Mapping[int, bytes], *, name: str) -> RecordDict:
    """Return the content of a reply with what is sealed for neighbours."""
    said = _beside(_LETTERS, letters)
    return RecordDict({SECURE_SUM: ConfigRecord(said), **pack_name(name)})


def unpack_letters_reply(content: RecordDict, sums: int) -> dict[int, bytes]:
    """Validate what a node has sealed, by receiver: letters of the right length."""
    try:
        letters = _read_beside(_reply(content), _LETTERS)
    except (KeyError, TypeError, ValueError) as error:
        raise BadReplyError(f"'{_LETTERS}' cannot be read: {error!r}") from error
    length = 2 * SHARE_BYTES * sums + TAG_BYTES
    if any(len(letter) != length for letter in letters.values()):
        raise BadReplyError(f"'{_LETTERS}' must have {length} bytes each")
    return letters


def with_words(content: RecordDict, words: bytes) -> RecordDict:
    """Return a reply with other words in its summand: masked ones for those in the clear."""
    return RecordDict({**content, SUMMAND: ConfigRecord({WORDS: words})})


def unpack_masked(content: RecordDict, layout: Layout) -> Words:
    """Validate a masked summand, of which there is nothing to see but its length."""
    data = summand_words(content)
    if data is None or len(data) != layout.size_bytes:
        got = "none" if data is None else f"{len(data)} bytes"
        raise BadReplyError(
            f"expected a ConfigRecord '{SUMMAND}' of {layout.size_bytes}, got {got}"
        )
    return layout.unpack(data)


def pack_confirm_reply(signature: bytes, *, name: str) -> RecordDict:
    """Return the content of a reply with a signature."""
    return RecordDict({SECURE_SUM: ConfigRecord({_SIGNATURE: signature}), **pack_name(name)})


def unpack_confirm_reply(content: RecordDict) -> bytes:
    """Validate a signature."""
    signature = _reply(content).get(_SIGNATURE)
    if not isinstance(signature, bytes) or not 0 < len(signature) <= _MAX_SIGNATURE_BYTES:
        raise BadReplyError(f"'{_SIGNATURE}' must be bytes, got {shown(signature)}")
    return signature


def pack_shares_reply(shares: Mapping[int, bytes], *, name: str) -> RecordDict:
    """Return the content of a reply with the shares that open a sum."""
    said: dict[str, Any] = {_WHOSE: _packed(shares), _SHARES: b"".join(shares.values())}
    return RecordDict({SECURE_SUM: ConfigRecord(said), **pack_name(name)})


def unpack_shares_reply(content: RecordDict) -> dict[int, bytes]:
    """Validate shares, by whose they are."""
    record = _reply(content)
    try:
        numbers = _unpacked(record[_WHOSE])  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise BadReplyError(f"'{_WHOSE}' cannot be read: {error!r}") from error
    data = _bytes(record, _SHARES, SHARE_BYTES * len(numbers))
    parts = [data[i : i + SHARE_BYTES] for i in range(0, len(data), SHARE_BYTES)]
    return dict(zip(numbers, parts, strict=True))


# --- parts --------------------------------------------------------------------------------------


def _packed(numbers: Mapping[int, Any] | Sequence[int]) -> bytes:
    return np.array(list(numbers), dtype="<u2").tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    numbers = tuple(np.frombuffer(data, dtype="<u2").tolist())
    if len(set(numbers)) < len(numbers):
        raise ValueError("a node is named twice")
    return numbers


def _beside(key: str, values: Mapping[int, bytes]) -> dict[str, Any]:
    """Return bytes by node as two entries; nothing where there are none."""
    return {f"{key}-of": _packed(values), key: list(values.values())} if values else {}


def _read_beside(said: Mapping[str, Any], key: str) -> dict[int, bytes]:
    if key not in said:
        return {}
    numbers, values = _unpacked(said[f"{key}-of"]), said[key]
    if len(values) != len(numbers) or not all(isinstance(value, bytes) for value in values):
        raise ValueError(f"'{key}' of {len(numbers)} nodes")
    return dict(zip(numbers, values, strict=True))


def _reply(content: RecordDict) -> ConfigRecord:
    record = content.get(SECURE_SUM)
    if not isinstance(record, ConfigRecord):
        raise BadReplyError(f"expected a ConfigRecord '{SECURE_SUM}'")
    return record


def _bytes(record: ConfigRecord, key: str, length: int) -> bytes:
    value = record.get(key)
    if not isinstance(value, bytes) or len(value) != length:
        raise BadReplyError(f"'{key}' must be {length} bytes, got {shown(value)}")
    return value


def _keys_length(sums: int) -> int:
    return KEY_BYTES + sums * (KEY_BYTES + DIGEST_BYTES)


def _key_bytes(keys: AdvertisedKeys) -> bytes:
    return b"".join([*keys.keys, *keys.digests])


def _read_keys(data: bytes, signer: str, signature: bytes) -> AdvertisedKeys:
    sums, rest = divmod(len(data) - KEY_BYTES, KEY_BYTES + DIGEST_BYTES)
    if rest or sums < 1 or len(signer) > 64 or len(signature) > _MAX_SIGNATURE_BYTES:
        raise ValueError(f"{len(data)} bytes of keys")
    parts = [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
    return AdvertisedKeys(
        parts[0], tuple(parts[1 : 1 + sums]), tuple(parts[1 + sums :]), signer, signature
    )
