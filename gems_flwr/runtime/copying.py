"""Messages and states as they would be after a network, without the cost of one.

Everything but the bytes of arrays goes through Flower's own serialisation, so nothing passes that
could not be sent, and nothing but those bytes, which cannot be changed, is shared with the sender.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import (
    array_from_proto,
    array_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import Array as ProtoArray
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict


def copy_message(message: Message) -> Message:
    """Return a message as its receiver gets it."""
    sent = message_to_proto(remove_content_from_message(message)).SerializeToString()
    received = message_from_proto(ProtoMessage.FromString(sent))
    if received.has_error():
        return received
    return make_message(received.metadata, copy_content(message.content))


def copy_content(content: RecordDict) -> RecordDict:
    """Return records as their receiver gets them."""
    others = RecordDict()
    for key, record in content.items():
        if not isinstance(record, ArrayRecord):
            others[key] = record
    sent = recorddict_to_proto(others).SerializeToString()
    received = recorddict_from_proto(ProtoRecordDict.FromString(sent))
    copied = RecordDict()
    for key, record in content.items():
        copied[key] = (
            ArrayRecord({name: _copy_array(array) for name, array in record.items()})
            if isinstance(record, ArrayRecord)
            else received[key]
        )
    return copied


def _copy_array(array: Array) -> Array:
    if not isinstance(array.data, bytes):
        raise TypeError(f"the data of an array must be bytes, got {type(array.data).__name__}")
    shell = Array(dtype=array.dtype, shape=array.shape, stype=array.stype, data=b"")
    sent = array_to_proto(shell).SerializeToString()
    copied = array_from_proto(ProtoArray.FromString(sent))
    copied.data = array.data
    return copied
