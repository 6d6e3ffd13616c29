"""Nodes that run as ever and train together: one fast engine for many small nodes.

Every message goes through the real ClientApp with its mod, but in a thread of its own (a `_Lane`)
that stops where the node is about to train. Once all have come so far, their models are trained in
one computation (`simulations.experiment.together`), and each goes on with its own. One lane runs at
a time: threads serve to stop in the middle of a call, not to compute side by side.

Messages, bytes and draws are those of ``backend=inprocess``; weights are, up to rounding. What
cannot be trained together is trained by the node itself, which is logged once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp

from gems_flwr import InProcessGrid
from simulations.experiment.together import Order, Outcome, meeting, train_together

_log = logging.getLogger("gems_flwr")
# Under way at a time: nodes, and bytes of their models.
_MOST_NODES = 256
_MOST_BYTES = 256 * 2**20


class LockstepGrid(InProcessGrid):
    """An in-process grid of some nodes of a ClientApp, which train together; see the module."""

    def __init__(self, client_app: ClientApp, nodes: int) -> None:
        super().__init__(client_app, nodes)
        # What a message needs done is done in the lane that the message is in already.
        self._worker = _InPlace()  # type: ignore[assignment]
        self._free: list[_Lane] = []
        self._is_logged = False

    def collect(self, message_ids: Iterable[str], *, timeout: float | None) -> Iterator[Message]:
        """Yield each reply as soon as its node has finished; see `MeteredGrid.stream`."""
        wanted = set(message_ids)
        chosen = [key for key in self._pending if key in wanted]
        while chosen:
            journeys = self._start(chosen, timeout)
            try:
                while waiting := [each for each in journeys if each.order is not None]:
                    yield from self._train(journeys, waiting)
                yield from _arrived(journeys)
            finally:
                for journey in journeys:
                    journey.give_up()

    def _start(self, chosen: list[str], timeout: float | None) -> list[_Journey]:
        """Send messages on their way, as many as may be under way, up to where nodes train."""
        journeys: list[_Journey] = []
        held_bytes = 0
        while chosen and len(journeys) < _MOST_NODES and held_bytes < _MOST_BYTES:
            # Taken off before it runs: a message is delivered once, whatever comes of it.
            message = self._pending.pop(chosen.pop(0))
            lane = self._free.pop() if self._free else _Lane()
            journey = _Journey(lane, timeout, self._free)
            journey.go_on(lambda message=message: self._deliver(message, None))  # type: ignore[misc]
            self._log_why_alone(lane)
            journeys.append(journey)
            if journey.order is not None:
                held_bytes += sum(w.nbytes for w in journey.order.model.parameters())
        return journeys

    def _train(self, journeys: list[_Journey], waiting: list[_Journey]) -> Iterator[Message]:
        """Train whatever nodes wait for, and let them go on."""
        started = time.perf_counter()
        orders = [each.order for each in waiting if each.order is not None]
        try:
            found: list[Any] = list(train_together(orders))
        except Exception as error:
            found = [error] * len(waiting)
        share = (time.perf_counter() - started) / len(waiting)
        for journey, outcome in zip(waiting, found, strict=True):
            journey.go_on(outcome, share)
            yield from _arrived(journeys)

    def _log_why_alone(self, lane: _Lane) -> None:
        if lane.why_alone is not None and not self._is_logged:
            self._is_logged = True
            _log.warning(
                "backend=lockstep: nodes train one after the other, as with backend=inprocess, "
                "since their model cannot be trained together with others: %s",
                lane.why_alone,
            )


def _arrived(journeys: list[_Journey]) -> Iterator[Message]:
    """Yield replies in the order of the messages, and forget them."""
    while journeys and journeys[0].is_over:
        reply = journeys.pop(0).reply
        if reply is not None:
            yield reply


class _InPlace:
    """Runs a function right here; see the `_Worker` of the in-process grid."""

    def call(self, function: Callable[[], Any], timeout: float | None) -> Any:
        try:
            return function()
        except TimeoutError as error:
            # One of the app's own is no message that took too long.
            raise RuntimeError(str(error)) from error
        except Exception:
            raise
        except BaseException as error:  # a handler that calls sys.exit ends only itself
            raise RuntimeError(f"the app exited: {error!r}") from error


class _Journey:
    """One message on its way through a lane: an order while the node waits, then a reply."""

    def __init__(self, lane: _Lane, timeout: float | None, free: list[_Lane]) -> None:
        self.order: Order | None = None
        self.is_over = False
        self.reply: Message | None = None
        self._lane, self._free, self._left = lane, free, timeout

    def go_on(self, word: Any, seconds: float = 0.0) -> None:
        """Start, or go on with what training came to, which took the node so many seconds."""
        started = time.perf_counter()
        try:
            came = self._lane.ask(word, None if self._left is None else self._left - seconds)
        except TimeoutError:
            # The lane is left behind: a thread cannot be killed.
            self.order, self.is_over = None, True
            return
        if self._left is not None:
            self._left -= seconds + time.perf_counter() - started
        if isinstance(came, Order):
            self.order = came
            return
        self.order, self.reply, self.is_over = None, came, True
        self._free.append(self._lane)

    def give_up(self) -> None:
        """End a lane whose reply is of no use any more."""
        if not self.is_over:
            self.is_over = True
            self._lane.inbox.put(RuntimeError("the reply is of no use any more"))


class _Lane:
    """A lasting thread that takes one message at a time as far as its training, and on."""

    def __init__(self) -> None:
        # Why the last training was not handed over, if it was not.
        self.why_alone: str | None = None
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="lockstep-node", daemon=True).start()

    def ask(self, word: Any, timeout: float | None) -> Any:
        """Send a word, and return what comes of it: an order, or a reply."""
        self.inbox.put(word)
        try:
            return self._outbox.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            raise TimeoutError from None

    def _run(self) -> None:
        with meeting(self._hand_over):
            while True:
                deliver = self.inbox.get()
                if callable(deliver):
                    self.why_alone = None
                    self._outbox.put(deliver())
                del deliver

    def _hand_over(self, order: Order) -> Outcome | None:
        self.why_alone = order.why_alone()
        if self.why_alone is not None:
            return None
        self._outbox.put(order)
        outcome: Outcome | Exception | None = self.inbox.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
