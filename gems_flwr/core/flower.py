"""Every name of Flower that Flower does not make public: what a new version of it may break.

Public is what ``__all__`` of `flwr.app`, `flwr.clientapp`, `flwr.clientapp.mod`, `flwr.serverapp`,
`flwr.serverapp.strategy` and `flwr.simulation` lists; all else is imported here alone (a test
checks it), with what it is needed for and what to do when it goes. ``make test-flower`` tries every
version that the project admits.
"""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message

# The in-process grid makes a message of a copied head and content, so that the bytes of arrays need
# not be copied. When it goes: serialise whole messages in `copy_message` (`carriers.in_process`).
from flwr.app.message import make_message

# Who speaks for a node that was lost, and the numbers of errors. When they go: write the numbers
# here (1, and for errors 2, 3, 4, 5 and 8 in 1.41); they cross the network, so they keep their
# meaning.
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode

# Records to bytes and back: kept replies on disk, and what the in-process grid lets pass. When they
# go: look for their new place, since files that are on disk need them.
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage

# What `Grid.get_nodes` returns: a node's name, and when it was registered. When it goes: use
# whatever `get_nodes` returns then; without it nodes are ordered by their ids.
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

# The lines at the beginning of a run that a Flower user knows. When it goes: leave them out.
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info

# What `Grid.set_run` takes and `Grid.run` returns. When it goes: see what `Grid` asks for then.
from flwr.supercore.run import Run

# What `Message.__init__` asks for outside of Flower's own processes. When it goes: see there.
from flwr.supercore.task_identity import TaskIdentity

# As in `flwr.clientapp.typing`, which no ``__all__`` names.
ClientAppCallable = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientAppCallable], Message]

# The ClientApp raised an exception; also said of a reply that cannot be read.
HANDLER_RAISED: int = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
NODE_LOST: int = ErrorCode.NODE_UNAVAILABLE  # a node does not answer any more
# The message or its reply expired, the node went away, or the process of its ClientApp died.
LOST: tuple[int, ...] = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    NODE_LOST,
    ErrorCode.CLIENT_APP_CRASHED,
)


__all__ = [
    "HANDLER_RAISED",
    "LOST",
    "NODE_LOST",
    "SUPERLINK_NODE_ID",
    "ClientAppCallable",
    "Mod",
    "NodeInfo",
    "ProtoMessage",
    "ProtoRecordDict",
    "Run",
    "TaskIdentity",
    "log_strategy_start_info",
    "make_message",
    "message_from_proto",
    "message_to_proto",
    "recorddict_from_proto",
    "recorddict_to_proto",
]  # fmt: skip
