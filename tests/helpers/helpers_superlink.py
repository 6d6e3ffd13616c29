"""A grid for tests on Flower's own SuperLink state: what it says of lost nodes is Flower's word.

Messages, replies, registrations and errors go through the very code that a deployed SuperLink
runs; only the processes and the network are missing. Nodes work when replies are pulled. A node can
be killed (with its message in hand, or before it took it), started again, registered late or
removed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID, ErrorCode
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

FOR_EVER = 1e300


class SuperLinkGrid(InMemoryGrid):
    """Nodes of one app on Flower's SuperLink state.

    Parameters
    ----------
    app : ClientApp
        What the nodes run.
    nodes : sequence of mappings
        Each node's config; its key ``registered`` is the name that it is registered under.
    """

    def __init__(self, app: ClientApp, nodes: Sequence[Mapping[str, str | int]]) -> None:
        super().__init__(
            LinkStateFactory(":flwr-in-memory:", NoOpFederationManager(), ObjectStoreFactory())
        )
        run_id = self.state.create_run(
            None, None, "00", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self.set_run(Run.create_empty(run_id))
        TaskIdentity.task_id, TaskIdentity.run_id = 1, run_id
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        self.app, self.configs = app, {}
        self.states: dict[int, RecordDict] = {}
        # Nodes that die as soon as they have a message in hand, and how often.
        self.dies: dict[int, int] = {}
        # What nodes have taken and not answered yet.
        self.held: list[tuple[int, Message]] = []
        for config in nodes:
            self.register(config)

    def register(self, config: Mapping[str, str | int]) -> int:
        """Register a node and start it; return its id."""
        config = dict(config)
        node = self.state.create_node(
            NOOP_FLWR_AID, "", secrets.token_bytes(32), FOR_EVER, name=config.pop("registered", "")
        )
        self.configs[node] = config
        self.start(node)
        return node

    def start(self, node: int) -> None:
        """Start a node; as in Flower, one that counts as connected cannot be started."""
        assert self.state.activate_node(node, FOR_EVER)

    def kill(self, node: int) -> None:
        """Let a node miss its heartbeats."""
        assert self.state.deactivate_node(node)

    def remove(self, node: int) -> None:
        """Remove a node from the federation, as its operator may."""
        self.state.delete_node(NOOP_FLWR_AID, node)

    def id_of(self, name: str) -> int:
        """Return the id of the node that was registered under a name."""
        return next(n.node_id for n in self.state.get_node_info() if n.name == name)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for node in self.get_node_ids():
            for message in self.state.get_message_ins(node, limit=None):
                if self.dies.get(node, 0):
                    self.dies[node] -= 1
                    self.killed(node)
                else:
                    self.held.append((node, message))
        for work in list(self.held):
            if self.ready(*work):
                self.held.remove(work)
                self.state.store_message_res(self.reply(*work))
        return super().pull_messages(message_ids)

    def ready(self, node: int, message: Message) -> bool:
        """Return whether a node answers a message now, and not when replies are pulled again."""
        return True

    def killed(self, node: int) -> None:
        """Kill a node that has a message in hand."""
        self.kill(node)

    def reply(self, node: int, message: Message) -> Message:
        """Return what a node's app answers."""
        state = self.states.setdefault(node, RecordDict())
        try:
            reply = self.app(message, Context(1, node, dict(self.configs[node]), state, {}))
        except Exception as error:  # as Flower's own runner of ClientApps
            fault = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error).__name__}: {error}")
            reply = Message(fault, reply_to=message)
        reply.metadata.__dict__["_message_id"] = secrets.token_hex(8)
        return reply
