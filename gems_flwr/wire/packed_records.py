"""Models as bytes in messages: see `gems_flwr.compression.difference_coding`.

A packed model is a ConfigRecord under the key that the ArrayRecord would have: raw bytes without
headers. Empty parts are left out, which Flower cannot count; what travels exactly is never empty,
and tells a packed model from other records.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from gems_flwr.compression.difference_coding import Form, PackedModel, decode
from gems_flwr.errors import BadReplyError
from gems_flwr.typing import Arrays
from gems_flwr.wire.keys import CODES, EXACT, LAYOUT, SCALES
from gems_flwr.wire.quick_records import records_of
from gems_flwr.wire.records import put_instead, to_record


def pack_bytes(packed: PackedModel) -> ConfigRecord:
    """Return the record of a packed model."""
    parts: dict[str, str | bytes] = {
        CODES: packed.codes,
        SCALES: packed.scales,
        EXACT: packed.exact,
        LAYOUT: packed.layout,
    }
    return ConfigRecord({key: part for key, part in parts.items() if part})


def unpack_bytes(record: ConfigRecord, key: str) -> PackedModel:
    """Return the packed model in a record.

    Raises
    ------
    BadReplyError
        If there is something else in it.
    """
    kinds = {CODES: bytes, SCALES: bytes, EXACT: bytes, LAYOUT: str}
    for name, value in record.items():
        if name not in kinds or not isinstance(value, kinds[name]):
            raise BadReplyError(
                f"the packed model '{key}' has a '{name}' that does not belong there"
            )
    values = {name: record.get(name, kind()) for name, kind in kinds.items()}
    return PackedModel(values[CODES], values[SCALES], values[EXACT], values[LAYOUT])  # type: ignore[arg-type]


def packed_models(content: RecordDict) -> dict[str, PackedModel]:
    """Return the packed models of a message, by key."""
    return {
        key: unpack_bytes(record, key)
        for key, record in records_of(content, ConfigRecord).items()
        if EXACT in record
    }


def open_packed_reply(content: RecordDict, base: Arrays, form: Form) -> None:
    """Put the model of a reply, which is a difference to `base`, in the place of its bytes.

    Raises
    ------
    BadReplyError
        If there are several, or it is none that `base` and `form` allow.
    """
    found = packed_models(content)
    if not found:
        return
    if len(found) > 1 or records_of(content, ArrayRecord):
        raise BadReplyError("expected one packed model and no arrays beside it")
    [(key, packed)] = found.items()
    put_instead(content, key, open_packed(packed, base, form))


def open_packed(packed: PackedModel, base: Arrays, form: Form) -> ArrayRecord:
    """Return the arrays of a model that a node sent as a difference to `base`.

    Raises
    ------
    BadReplyError
        If the bytes are not those of such a model, or it came whole.
    """
    if packed.is_whole:
        raise BadReplyError("the model came whole, expected a difference to what the node was sent")
    return to_record(decode(packed, base, form))
