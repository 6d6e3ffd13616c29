"""How large a message is and which round it belongs to: what the meter asks."""

from __future__ import annotations

from flwr.app import ArrayRecord, RecordDict

from gems_flwr.wire.keys import SERVER_ROUND


def payload_bytes(content: RecordDict) -> int:
    """Return the payload of a message in bytes, as Flower's `count_bytes` counts it.

    Numbers count 8 bytes, booleans 1, arrays their serialised form with its header. Unlike
    `count_bytes` it accepts empty strings and lists, and counts text by its UTF-8 length.
    """
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += record.count_bytes()
        else:
            total += sum(len(key) + _value_bytes(value) for key, value in record.items())
    return total


def _value_bytes(value: object) -> int:
    if isinstance(value, list):
        return sum(_value_bytes(item) for item in value)
    if isinstance(value, bool):
        return 1
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    return 8


def instruction_round(content: RecordDict) -> int | None:
    """Return the round that a message belongs to, where it says so."""
    for record in content.config_records.values():
        server_round = record.get(SERVER_ROUND)
        if isinstance(server_round, int) and not isinstance(server_round, bool):
            return server_round
    return None
