"""A Grid that runs the ClientApp in this process: no Ray, no network, starts at once.

Messages and states are copied as if they had been sent, a handler that raises gives an error reply,
and one that returns no reply in time gives none. Nodes run one after the other in one worker
thread, each with `timeout` seconds of its own. A handler that overstays is abandoned (a thread
cannot be killed), its late reply and state are dropped, and the next node gets a new thread.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any

from flwr.app import (
    ArrayRecord,
    Context,
    Error,
    Message,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from gems_flwr.core.flower import (
    HANDLER_RAISED,
    SUPERLINK_NODE_ID,
    NodeInfo,
    ProtoMessage,
    Run,
    TaskIdentity,
    make_message,
    message_from_proto,
    message_to_proto,
)
from gems_flwr.core.records import records_from_bytes, records_to_bytes
from gems_flwr.core.run import generator
from gems_flwr.errors import describe_fault

NodeConfig = Mapping[str, bool | int | float | str]

_Tasks = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class InProcessGrid(Grid):
    """Run a ClientApp for several simulated nodes.

    Parameters
    ----------
    client_app : ClientApp
        The app, as a SuperNode would run it.
    nodes : int or sequence of mappings
        How many nodes, or each node's own config. With a number, node *i* gets Flower's
        ``partition-id`` *i* and ``num-partitions``.
    run_config : mapping, optional
        The run's config, as every node sees it in its context.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid
    >>> grid = InProcessGrid(ClientApp(), nodes=[{"name": "north"}, {"name": "south"}])
    >>> len(list(grid.get_node_ids()))
    2
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: int | Sequence[NodeConfig],
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(nodes, int):
            nodes = [{"partition-id": i, "num-partitions": nodes} for i in range(nodes)]
        self._app = client_app
        self._run_config = dict(run_config or {})
        ids = generator(0, "node-ids").choice(2**62, size=len(nodes), replace=False)
        self._configs = dict(zip((int(i) for i in ids), map(dict, nodes), strict=True))
        self._began = datetime.now(UTC)
        self._states: dict[int, RecordDict] = {}
        self._pending: dict[str, Message] = {}
        self._worker = _Worker()
        self.set_run(Run.create_empty(run_id=1))

    def set_run(self, run: Run) -> None:
        """Set the run, and tell Flower's message class who is speaking."""
        self._run = run
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = run.run_id
        TaskIdentity.node_id = SUPERLINK_NODE_ID

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message to a node (deprecated in Flower: use `Message`)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, in no useful order."""
        return set(self._configs)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return all nodes, registered in the order of their configs.

        A node's name is its ``name`` or ``partition-id``, if it has one.
        """
        return [
            NodeInfo(
                node_id=node,
                name=str(config.get("name", config.get("partition-id", ""))),
                registered_at=(self._began + timedelta(microseconds=number)).isoformat(),
            )
            for number, (node, config) in enumerate(self._configs.items())
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages; the nodes work on them when their replies are pulled."""
        message_ids = []
        for message in messages:
            if message.metadata.dst_node_id not in self._configs:
                raise ValueError(f"there is no node {message.metadata.dst_node_id}")
            message_ids.append(number_message(message))
            self._pending[message_ids[-1]] = copy_message(message)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the messages that were not answered yet."""
        return list(self.collect(message_ids, timeout=None))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies that came in time."""
        return list(self.collect(self.push_messages(messages), timeout=timeout))

    def collect(self, message_ids: Iterable[str], *, timeout: float | None) -> Iterator[Message]:
        """Yield each reply as soon as its node has finished; see `MeteredGrid.stream`."""
        wanted = set(message_ids)
        for message_id in [key for key in self._pending if key in wanted]:
            # Taken off before it runs: a message is delivered once, whatever comes of it.
            reply = self._deliver(self._pending.pop(message_id), timeout)
            if reply is not None:
                yield reply

    def _deliver(self, message: Message, timeout: float | None) -> Message | None:
        node = message.metadata.dst_node_id
        context = Context(
            run_id=self._run.run_id,
            node_id=node,
            node_config=dict(self._configs[node]),
            # A copy: what a handler does to it before it fails is forgotten.
            state=copy_content(self._states.get(node, RecordDict())),
            run_config=dict(self._run_config),
        )
        try:
            reply = self._worker.call(lambda: self._app(message, context), timeout)
            if reply is None:
                return None
            sent = copy_message(reply)
            # Again a copy: what a handler does to it later, in a thread of its own, is not seen.
            self._states[node] = copy_content(context.state)
        except TimeoutError:
            self._worker = _Worker()
            return None
        except Exception as error:
            failed = Error(code=HANDLER_RAISED, reason=describe_fault(error))
            sent = Message(failed, reply_to=message)
        number_message(sent)
        return sent


class _Worker:
    """A daemon thread that runs one function at a time, and ends with the worker.

    Lasting, because torch keeps a pool of processor threads for every thread that computes.
    """

    def __init__(self) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        # The thread knows the queue alone: with the worker itself in hand it would keep it alive.
        thread = threading.Thread(
            target=_run_tasks, args=(self._tasks,), name="in-process-node", daemon=True
        )
        thread.start()
        weakref.finalize(self, self._tasks.put, None)

    def call(self, function: Callable[[], Any], timeout: float | None) -> Any:
        """Return what `function` returns, raise what it raises, or raise a TimeoutError."""
        outcome = Future[Any]()
        self._tasks.put((function, outcome))
        return outcome.result(timeout)


def _run_tasks(tasks: _Tasks) -> None:
    """Run functions one by one until None comes."""
    while (task := tasks.get()) is not None:
        function, outcome = task
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)
        except BaseException as error:  # a handler that calls sys.exit ends only itself
            outcome.set_exception(RuntimeError(f"the app exited: {error!r}"))
        del task, function, outcome


def number_message(message: Message) -> str:
    """Give a message an id of its own, as Flower's grids do, and return it.

    Flower has no public way: its own grids write into the metadata likewise.
    """
    message_id = os.urandom(16).hex()
    message.metadata.__dict__["_message_id"] = message_id
    return message_id


def copy_message(message: Message) -> Message:
    """Return a message as its receiver gets it."""
    if message.has_error():
        sent = message_to_proto(message).SerializeToString()
        return message_from_proto(ProtoMessage.FromString(sent))
    # Numbers and texts, which the class `Message` has checked.
    return make_message(copy.copy(message.metadata), copy_content(message.content))


def copy_content(content: RecordDict) -> RecordDict:
    """Return records as if they had been sent; the bytes of arrays are shared."""
    copied = RecordDict()
    for key, record in content.items():
        if isinstance(record, ArrayRecord):
            copied[key] = ArrayRecord({k: copy.copy(array) for k, array in record.items()})
        else:
            copied.update(records_from_bytes(records_to_bytes(RecordDict({key: record}))))
    return copied
