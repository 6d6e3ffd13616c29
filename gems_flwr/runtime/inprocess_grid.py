"""A Grid that runs the ClientApp in this process: no Ray, no network, starts at once.

It is as strict as real Flower. Messages and states are copied as if they had been sent
(`gems_flwr.runtime.message_copies` says how): nothing passes that could not be sent, and nothing
that can be changed is shared with the sender. A handler that raises gives an error reply; one that
returns no reply, or does not return in time, gives none. Node ids are scattered numbers, in no
relation to the order of the data.

Two things differ from a real network, on purpose:

- Nodes run one after the other. Each has `timeout` seconds of its own: time spent queueing
  for this machine's processor is the simulation's, not the node's.
- Handlers run in one worker thread. A handler that overstays is abandoned (a thread cannot be
  killed), its late reply and state are dropped, and the next node gets a new thread.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from gems_flwr.errors import describe_fault
from gems_flwr.runtime.flower_internals import (
    HANDLER_RAISED,
    SUPERLINK_NODE_ID,
    NodeInfo,
    Run,
    TaskIdentity,
    number_message,
)
from gems_flwr.runtime.message_copies import copy_content, copy_message
from gems_flwr.runtime.seeding import generator

NodeConfig = Mapping[str, bool | int | float | str]

_Tasks = queue.SimpleQueue[Callable[[], Any] | None]
_Outcomes = queue.SimpleQueue[tuple[Any, Exception | None]]


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

    # --- the Grid interface -------------------------------------------------------------------

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
        """Return all nodes; a node's name is its ``name`` or ``partition-id``, if it has one.

        As in Flower's simulation they were registered one after the other, in the order of their
        configs.
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
            self._pending[message.metadata.message_id] = copy_message(message)
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
            message = self._pending.pop(message_id)
            reply = self._deliver(message, timeout)
            if reply is not None:
                yield reply

    # --- one message --------------------------------------------------------------------------

    def _deliver(self, message: Message, timeout: float | None) -> Message | None:
        node = message.metadata.dst_node_id
        context = Context(
            run_id=self._run.run_id,
            node_id=node,
            node_config=dict(self._configs[node]),
            # A copy: what a handler does to it before it fails is forgotten.
            state=copy_content(self._states[node]) if node in self._states else RecordDict(),
            run_config=dict(self._run_config),
        )
        try:
            reply = self._worker.call(lambda: self._app(message, context), timeout)
            if reply is None:
                return None
            sent = copy_message(reply)
            # Again a copy: what a handler does to it later, in a thread of its own, is not seen.
            state = copy_content(context.state) if context.state else None
        except TimeoutError:
            self._worker = _Worker()
            return None
        except Exception as error:
            failed = Error(code=HANDLER_RAISED, reason=describe_fault(error))
            return _with_id(Message(failed, reply_to=message))
        if state is None:
            self._states.pop(node, None)
        else:
            self._states[node] = state
        return _with_id(sent)


class _Worker:
    """One daemon thread that runs one function at a time, for as long as somebody has the worker.

    A lasting thread, because torch keeps a pool of processor threads for every thread that
    computes; a new thread per message would pile them up. It ends with the worker: of hundreds of
    runs in one process each would leave one behind otherwise.
    """

    def __init__(self) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._outcomes: _Outcomes = queue.SimpleQueue()
        # The thread knows the queues alone: with the worker itself in hand it would keep it alive.
        threading.Thread(
            target=_run_tasks,
            args=(self._tasks, self._outcomes),
            name="in-process-node",
            daemon=True,
        ).start()
        weakref.finalize(self, self._tasks.put, None)

    def call(self, function: Callable[[], Any], timeout: float | None) -> Any:
        """Return what `function` returns, raise what it raises, or TimeoutError."""
        self._tasks.put(function)
        try:
            value, error = self._outcomes.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None
        if error is not None:
            raise error
        return value


def _run_tasks(tasks: _Tasks, outcomes: _Outcomes) -> None:
    """Run functions one by one until None comes."""
    while (function := tasks.get()) is not None:
        try:
            outcomes.put((function(), None))
        except Exception as error:
            outcomes.put((None, error))
        except BaseException as error:  # a handler that calls sys.exit ends only itself
            outcomes.put((None, RuntimeError(f"the app exited: {error!r}")))
        del function


def _with_id(reply: Message) -> Message:
    number_message(reply)
    return reply
