"""Every name of Flower that Flower does not make public: what a new version of it may break.

Public is what ``__all__`` of `flwr.app`, `flwr.clientapp`, `flwr.clientapp.mod`, `flwr.serverapp`,
`flwr.serverapp.strategy` and `flwr.simulation` lists; nothing else of Flower is imported anywhere
but here (`tests/test_architecture.py`). Beside each name stands what it is needed for, and what to
do when it goes. ``make test-flower`` tries every Flower version that the project admits. How its
records keep their entries is known to `gems_flwr.wire.quick_records` alone.

The tests' own grid (`tests/helpers/helpers_superlink.py`) stands on more of Flower's insides, which
the library itself does not need.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from flwr.app import Context, Message, RecordDict

# The in-process grid hands messages over as Flower does, head and content by themselves, so that
# the bytes of arrays need not be copied. When they go: let `copy_message` (`message_copies`)
# serialise whole messages, which costs a copy of each model.
from flwr.app.message import make_message, remove_content_from_message

# Who speaks for a node that was lost, and the numbers of errors, which Flower keeps in a class of
# integers. When they go: write the numbers here (1, and for errors 2, 3, 4, 5 and 8 in 1.41). They
# cross the network: a new Flower cannot change their meaning without breaking its own nodes.
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode

# Records to bytes and back: kept replies on disk, and what the in-process grid lets pass. When they
# go: look for their new place first, since files that are on disk need them; all that is asked of
# them is that bytes of earlier versions can still be read.
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage

# What `Grid.get_nodes` returns, which is public by its use alone: a node's name, and when it was
# registered and started. When it goes: use whatever `get_nodes` returns then; without it nodes are
# ordered by their ids.
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

# The run that a grid belongs to, which `Grid.set_run` takes and `Grid.run` returns. When it goes:
# the grids here are written against whatever `Grid` asks for then.
from flwr.supercore.run import Run

# Who is speaking, which Flower's Message class asks for when a message is made outside of its own
# processes. When it goes: see what `Message.__init__` asks for instead.
from flwr.supercore.task_identity import TaskIdentity

# Flower's types of mods are in `flwr.clientapp.typing`, which no ``__all__`` names; they are plain
# callables, and spelled out here.
ClientAppCallable = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientAppCallable], Message]

HANDLER_RAISED: int = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
"""The ClientApp raised an exception; also said of a reply that cannot be read."""

NODE_LOST: int = ErrorCode.NODE_UNAVAILABLE
"""A node does not answer any more."""

LOST: tuple[int, ...] = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    NODE_LOST,
    ErrorCode.CLIENT_APP_CRASHED,
)
"""What happens to messages between the apps: the message or its reply expired, the node went away,
or the process of its ClientApp died."""


def number_message(message: Message) -> str:
    """Give a message an id of its own, as Flower's grids do, and return it.

    Flower has no public way: its own grids write into the metadata likewise.
    """
    message_id = os.urandom(16).hex()
    message.metadata.__dict__["_message_id"] = message_id
    return message_id


def records_to_bytes(content: RecordDict) -> bytes:
    """Return records as Flower puts them on the wire."""
    return bytes(recorddict_to_proto(content).SerializeToString())


def records_from_bytes(data: bytes) -> RecordDict:
    """Return the records that `records_to_bytes` wrote."""
    return recorddict_from_proto(ProtoRecordDict.FromString(data))


__all__ = [
    "HANDLER_RAISED",
    "LOST",
    "NODE_LOST",
    "SUPERLINK_NODE_ID",
    "ClientAppCallable",
    "Mod",
    "NodeInfo",
    "ProtoMessage",
    "Run",
    "TaskIdentity",
    "make_message",
    "message_from_proto",
    "message_to_proto",
    "number_message",
    "records_from_bytes",
    "records_to_bytes",
    "remove_content_from_message",
]
