"""What the receiver of a message gets of it: a copy, as if it had been sent.

Flower turns a message into bytes and back. Most of what is in messages comes out of that as it went
in: numbers, texts and bytes of Python's own types, in the ranges that the bytes have room for. Such
values cannot be changed, so the copy may share them, and only what holds them is made anew:

==========  ==================================================================
made anew   the message, its metadata, its records, the entry of each array,
            each list of numbers or texts
shared      numbers, texts, and bytes, those of arrays and of packed models
            among them: nobody can change them
looked at   every key and every value, each time: what was sent before may
            have been changed since
==========  ==================================================================

All else (a number of numpy's, an integer of 70 bits, a text with half a character, a list of mixed
types, a subclass) goes through Flower's own serialisation, record by record: it comes out as there,
or is refused with the same error.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict

from gems_flwr.runtime.flower_internals import (
    ProtoMessage,
    make_message,
    message_from_proto,
    message_to_proto,
    records_from_bytes,
    records_to_bytes,
    remove_content_from_message,
)
from gems_flwr.wire.quick_records import (
    make_array,
    make_arrays,
    make_config,
    make_content,
    make_metrics,
)

# Ranges of Flower's bytes: integers in records, ids, sides of arrays, and the length of a text.
_LEAST_INTEGER, _MOST_INTEGER = -(2**63), 2**63 - 1
_MOST_ID = 2**64 - 1
_MOST_SIDE = 2**31 - 1
_MOST_SECONDS = 2**53  # whole numbers up to here are the same as floats
_MOST_BYTES = 2**30

_SCALARS = frozenset({bool, int, float, str, bytes})
_NUMBERS = frozenset({int, float})


def copy_message(message: Message) -> Message:
    """Return a message as its receiver gets it."""
    if message.has_error():
        sent = message_to_proto(message).SerializeToString()
        return message_from_proto(ProtoMessage.FromString(sent))
    return make_message(_copy_metadata(message), copy_content(message.content))


def copy_content(content: RecordDict) -> RecordDict:
    """Return records as their receiver gets them."""
    copied: dict[str, Any] = {}
    for key, record in content.items():
        quick = _quick_copy(record) if _is_plain_text(key) else None
        if quick is not None:
            copied[key] = quick
        else:
            copied.update(records_from_bytes(records_to_bytes(RecordDict({key: record}))))
    return make_content(copied)


def _copy_metadata(message: Message) -> Metadata:
    head = message.metadata
    numbers = (head.run_id, head.src_node_id, head.dst_node_id)
    tasks = (head.src_task_id, head.dst_task_id)
    texts = (head.message_id, head.reply_to_message_id, head.group_id, head.message_type)
    if (
        type(head.created_at) is float
        and (type(head.ttl) is float or (type(head.ttl) is int and 0 <= head.ttl <= _MOST_SECONDS))
        and all(type(number) is int and 0 <= number <= _MOST_ID for number in numbers)
        and all(task is None or (type(task) is int and 0 <= task <= _MOST_ID) for task in tasks)
        and all(map(_is_plain_text, texts))
    ):
        return Metadata(
            numbers[0], texts[0], *numbers[1:], *texts[1:3],
            head.created_at, float(head.ttl), texts[3], *tasks,
        )  # fmt: skip
    sent = message_to_proto(remove_content_from_message(message)).SerializeToString()
    return message_from_proto(ProtoMessage.FromString(sent)).metadata


def _quick_copy(record: object) -> ArrayRecord | ConfigRecord | MetricRecord | None:
    """Return a copy of a record in which all is plain; None of any other."""
    kind = type(record)
    if kind is ArrayRecord:
        arrays = _plain_arrays(record)  # type: ignore[arg-type]
        return None if arrays is None else make_arrays(arrays)
    if kind is ConfigRecord:
        values = _plain_values(record, _SCALARS)  # type: ignore[arg-type]
        return None if values is None else make_config(values)
    if kind is MetricRecord:
        values = _plain_values(record, _NUMBERS)  # type: ignore[arg-type]
        return None if values is None else make_metrics(values)
    return None


def _plain_values(
    record: ConfigRecord | MetricRecord, kinds: frozenset[type]
) -> dict[str, Any] | None:
    values: dict[str, Any] = {}
    for key, value in record.items():
        if type(value) is list:
            if value and not all(type(each) is type(value[0]) for each in value):
                return None
            if not all(_is_plain(each, kinds) for each in value):
                return None
            values[key] = value.copy()
        elif _is_plain(value, kinds):
            values[key] = value
        else:
            return None
        if not _is_plain_text(key):
            return None
    return values


def _is_plain(value: object, kinds: frozenset[type]) -> bool:
    kind = type(value)
    if kind not in kinds:
        return False
    if kind is int:
        return _LEAST_INTEGER <= value <= _MOST_INTEGER  # type: ignore[operator]
    if kind is str:
        return _is_plain_text(value)
    return kind is not bytes or len(value) <= _MOST_BYTES  # type: ignore[arg-type]


def _is_plain_text(value: object) -> bool:
    if type(value) is not str or len(value) > _MOST_BYTES:
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain_arrays(record: ArrayRecord) -> dict[str, Array] | None:
    arrays = {}
    for name, array in record.items():
        dtype, shape, stype, data = array.dtype, array.shape, array.stype, array.data
        if not isinstance(data, bytes):
            raise TypeError(f"the data of an array must be bytes, got {type(data).__name__}")
        if not (
            type(array) is Array
            and type(data) is bytes
            and type(shape) is tuple
            and all(type(side) is int and 0 <= side <= _MOST_SIDE for side in shape)
            and _is_plain_text(dtype)
            and _is_plain_text(stype)
            and _is_plain_text(name)
        ):
            return None
        arrays[name] = make_array(dtype, shape, stype, data)
    return arrays
